from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ac2.algorithm.importance import (
    DEFAULT_BOUNDS,
    KINDS,
    TOKEN_KINDS,
    importance_problems,
    importance_weights,
    mass_function,
    weight_function,
)
from megatron_ac2.algorithm.ratios import sequence_means, sequence_sums, to_tokens
from megatron_ac2.types import UserError


def weigh(kind, ratios, ids=None, mask=None, low=None, high=None):
    log_rho = torch.tensor(ratios, dtype=torch.float64).log()
    mask = torch.ones_like(log_rho) if mask is None else torch.tensor(mask)
    ids = torch.zeros(log_rho.shape, dtype=torch.int64) if ids is None else torch.tensor(ids)
    return importance_weights(kind, log_rho, mask, ids, int(ids.max()) + 1, low, high)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("none", [1.0, 1.0, 1.0, 1.0]),
        ("token_is", [0.4, 1.5, 3.0, 6.0]),
        ("token_tis", [0.4, 1.5, 2.0, 2.0]),
        ("token_mis", [0.0, 1.5, 3.0, 0.0]),
    ],
)
def test_token_kinds_hand_worked(kind: str, expected: list[float]) -> None:
    weights, signals = weigh(kind, [0.4, 1.5, 3.0, 6.0])
    assert weights.tolist() == pytest.approx(expected)
    assert signals["importance_weight"].tolist() == pytest.approx(expected)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        # products 3 (2 * 1.5), 6 (6 * 1), 0.25 (0.5 * 0.5)
        ("sequence_tis", [2.0, 2.0, 2.0, 2.0, 0.25, 0.25]),
        ("sequence_mis", [3.0, 3.0, 0.0, 0.0, 0.0, 0.0]),
        # geometric means sqrt 3, sqrt 6, 0.5: all far out
        ("geometric_rejection", [0.0] * 6),
    ],
)
def test_sequence_kinds_hand_worked(kind: str, expected: list[float]) -> None:
    weights, _ = weigh(kind, [2.0, 1.5, 6.0, 1.0, 0.5, 0.5], ids=[0, 0, 1, 1, 2, 2])
    assert weights.tolist() == pytest.approx(expected)


def test_geometric_rejection_weighs_one_inside() -> None:
    # geometric means: sqrt(1.1 / 1.1) = 1, sqrt(1.008 * 1.008) = 1.008 inside, sqrt(1.05 * 1) = 1.0247 outside
    weights, signals = weigh("geometric_rejection", [1.1, 1 / 1.1, 1.008, 1.008, 1.05, 1.0], ids=[0, 0, 1, 1, 2, 2])
    assert weights.tolist() == [1.0, 1.0, 1.0, 1.0, 0.0, 0.0]
    assert signals["importance_rejected"].tolist() == [False] * 4 + [True] * 2


def test_rejected_and_truncated_are_counted() -> None:
    rejected = weigh("token_mis", [0.4, 1.5, 6.0, 6.0], mask=[1.0, 1.0, 1.0, 0.0])[1]
    assert rejected["importance_rejected"].tolist() == [True, False, True, False]
    truncated = weigh("token_tis", [0.4, 1.5, 6.0, 6.0], mask=[1.0, 1.0, 1.0, 0.0])[1]
    assert truncated["importance_truncated"].tolist() == [False, False, True, False]
    assert "importance_rejected" not in truncated and "importance_truncated" not in rejected


def test_bounds_may_be_set() -> None:
    assert weigh("token_tis", [0.4, 6.0], low=0.5, high=5.0)[0].tolist() == pytest.approx([0.5, 5.0])
    assert weigh("token_mis", [0.4, 60.0], low=0.0, high=math.inf)[0].tolist() == pytest.approx([0.4, 60.0])


def test_a_sequence_of_masked_and_weighted_tokens() -> None:
    # sequence 0 is the tokens 0 and 2 with product 2 * 0.8 = 1.6; the mask's weight 0.5 takes no part in the ratio
    weights, _ = weigh("sequence_mis", [2.0, math.inf, 0.8], ids=[0, 7, 0], mask=[1.0, 0.0, 0.5])
    assert weights.tolist() == pytest.approx([1.6, 0.0, 1.6])


@pytest.mark.parametrize("junk", [math.nan, math.inf, -math.inf])
def test_sums_by_sequence(junk: float) -> None:
    # sequence 0: 1 + 4, sequence 1: nothing, sequence 2: 2; the masked token's id is out of range
    values, ids = torch.tensor([[1.0, junk], [2.0, 4.0]]), torch.tensor([[0, -9], [2, 0]])
    mask = torch.tensor([[0.5, 0.0], [1.0, 1.0]])
    assert sequence_sums(values, ids, 3, mask).tolist() == [5.0, 0.0, 2.0]
    means = sequence_means(values, ids, 3, mask)
    assert means.tolist() == [2.5, 0.0, 2.0]
    assert to_tokens(means, ids, mask, torch.float32).tolist() == [[2.5, 0.0], [2.0, 2.5]]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("junk", [math.nan, math.inf, -math.inf])
def test_all_masked(kind: str, junk: float) -> None:
    ids = torch.full((1, 3), -1)
    weights, signals = importance_weights(kind, torch.full((1, 3), junk), torch.zeros(1, 3), ids, 0)
    assert (weights == 0).all() and all((signal == 0).all() for signal in signals.values())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_extreme_ratios_stay_finite_and_detached(kind: str, dtype: torch.dtype) -> None:
    log_rho = torch.tensor([100.0, -100.0, 0.0], dtype=dtype, requires_grad=True)
    weights, signals = importance_weights(kind, log_rho, torch.ones(3), torch.arange(3), 3)
    assert torch.isfinite(weights).all() and not weights.requires_grad
    assert weights[2] == 1
    assert weights.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    if "mis" in kind or kind == "geometric_rejection":
        assert weights[:2].tolist() == [0.0, 0.0]
    assert not any(signal.requires_grad for signal in signals.values())


@given(log_rho=st.lists(st.floats(-30, 30), min_size=1, max_size=8))
@settings(max_examples=50)
def test_sequence_kinds_of_one_token_are_the_token_kinds(log_rho: list[float]) -> None:
    ratios, n = torch.tensor(log_rho, dtype=torch.float64), len(log_rho)
    for scheme in ("tis", "mis"):
        by_token = importance_weights(f"token_{scheme}", ratios, torch.ones(n), torch.arange(n), n)
        by_sequence = importance_weights(f"sequence_{scheme}", ratios, torch.ones(n), torch.arange(n), n)
        torch.testing.assert_close(by_token, by_sequence)


@pytest.mark.parametrize("kind", TOKEN_KINDS)
def test_weight_function_is_the_token_weight(kind: str) -> None:
    log_rho = torch.linspace(-3, 3, 61, dtype=torch.float64)
    weights, _ = importance_weights(kind, log_rho, torch.ones(61), torch.arange(61), 61)
    torch.testing.assert_close(weight_function(kind)(log_rho.exp()), weights)


@pytest.mark.parametrize("kind", TOKEN_KINDS)
def test_mass_function_is_q_times_f(kind: str) -> None:
    p, q = torch.rand(2, 200, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(mass_function(kind)(p, q), q * weight_function(kind)(p / q))


def test_mass_function_hand_worked() -> None:
    p, q = torch.tensor([0.6, 0.3, 0.1]), torch.tensor([0.1, 0.3, 0.6])  # ratios 6, 1, 1/6
    assert mass_function("token_tis")(p, q).tolist() == pytest.approx([0.2, 0.3, 0.1])  # min(p, 2 q)
    assert mass_function("token_mis")(p, q).tolist() == pytest.approx([0.0, 0.3, 0.0])
    assert mass_function("token_is")(p, q).tolist() == p.tolist()
    assert mass_function("none")(p, q).tolist() == q.tolist()


def test_mass_function_where_q_underflows() -> None:
    p, q = torch.tensor([0.5, 0.0]), torch.zeros(2)
    assert mass_function("token_tis")(p, q).tolist() == [0.0, 0.0]
    assert mass_function("token_tis", 0.0, math.inf)(p, q).tolist() == [0.5, 0.0]
    assert mass_function("token_mis")(p, q).tolist() == [0.0, 0.0]


def test_default_bounds_are_accepted() -> None:
    for kind in KINDS:
        assert importance_problems(kind, None, None) == []
    for kind, (low, high) in DEFAULT_BOUNDS.items():
        assert importance_problems(kind, low, high) == []


@pytest.mark.parametrize(
    ("kind", "low", "high", "messages"),
    [
        ("tis", None, None, ["actor.importance.kind: found 'tis', accepted: none, token_is"]),
        ("token_mis", 1.5, 0.9, ["actor.importance.low: found 1.5", "actor.importance.high: found 0.9"]),
        ("token_tis", -0.1, None, ["actor.importance.low: found -0.1"]),
        ("sequence_mis", None, math.nan, ["actor.importance.high: found nan"]),
        ("none", 0.5, 2.0, ["actor.importance.low: found 0.5", "actor.importance.high: found 2.0"]),
        ("token_is", None, 2.0, ["actor.importance.high: found 2.0"]),
    ],
)
def test_bad_settings_are_all_named(kind: str, low, high, messages: list[str]) -> None:
    problems = importance_problems(kind, low, high)
    assert len(problems) == len(messages)
    assert all(problem.startswith(message) for problem, message in zip(problems, messages, strict=True))
    with pytest.raises(UserError, match="actor.importance"):
        importance_weights(kind, torch.zeros(1), torch.ones(1), torch.zeros(1, dtype=torch.int64), 1, low, high)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in TOKEN_KINDS])
def test_sequence_kinds_are_no_function_of_a_ratio(kind: str) -> None:
    with pytest.raises(UserError, match=f"actor.importance.kind: found {kind}"):
        weight_function(kind)
