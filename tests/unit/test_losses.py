from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ac2.algorithm.losses import clipped_policy_loss, value_bce_loss
from megatron_ac2.types import UserError

BOUNDS = {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": 3.0}


def row(*values: float, grad: bool = False, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype).requires_grad_(grad)


def one_token(ratio: float, advantage: float, **bounds: float) -> tuple[float, float, dict]:
    """Loss, d loss / d ratio, metric sums of a single token."""
    current = row(math.log(ratio), grad=True)
    loss, sums = clipped_policy_loss(current, row(0.0), row(advantage), row(1.0), 1, **{**BOUNDS, **bounds})
    loss.backward()
    return loss.item(), current.grad.item() / ratio, {name: total.item() for name, total in sums.items()}


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "slope"),
    [
        (1.0, 2.0, -2.0, -2.0),
        (1.2, 2.0, -2.4, -2.0),
        (1.25, 2.0, -2.5, -2.0),  # above 1 + clip_low but below 1 + clip_high: clip-higher keeps the gradient
        (1.5, 2.0, -2.56, 0.0),  # clipped at 1.28
        (0.5, 2.0, -1.0, -2.0),  # a good token made rarer is never clipped
        (1.0, -2.0, 2.0, 2.0),
        (0.9, -2.0, 1.8, 2.0),
        (0.5, -2.0, 1.6, 0.0),  # clipped at 0.8
        (2.0, -2.0, 4.0, 2.0),  # a bad token made likelier keeps its gradient ...
        (3.5, -2.0, 6.0, 0.0),  # ... until the dual clip at 3
        (5.0, 0.0, 0.0, 0.0),
    ],
)
def test_hand_worked_regions(ratio: float, advantage: float, loss: float, slope: float) -> None:
    found_loss, found_slope, _ = one_token(ratio, advantage)
    assert found_loss == pytest.approx(loss, abs=1e-12)
    assert found_slope == pytest.approx(slope, abs=1e-12)


def test_upper_bound_follows_the_controller() -> None:
    assert one_token(1.3, 1.0)[0] == pytest.approx(-1.28)
    assert one_token(1.3, 1.0, clip_high=0.28 + 0.06)[0] == pytest.approx(-1.3)


@pytest.mark.parametrize(
    ("ratio", "advantage", "counted"),
    [
        (1.5, 1.0, "clip_high"),
        (0.5, -1.0, "clip_low"),
        (3.5, -1.0, "dual_clip"),
        (1.1, 1.0, None),
        (0.5, 1.0, None),
        (1.5, -1.0, None),
        (5.0, 0.0, None),
    ],
)
def test_clip_counts_count_lost_gradients(ratio: float, advantage: float, counted: str | None) -> None:
    sums = one_token(ratio, advantage)[2]
    assert {name for name in ("clip_high", "clip_low", "dual_clip") if sums[name]} == ({counted} if counted else set())


def test_metrics_are_sums_over_unmasked_tokens() -> None:
    current = row(math.log(2.0), 0.0, 7.0)
    _, sums = clipped_policy_loss(current, row(0.0, 0.0, 0.0), row(1.0, 1.0, 1.0), row(1.0, 1.0, 0.0), 100, **BOUNDS)
    assert sums["tokens"] == 2
    assert sums["ratio"] == pytest.approx(3.0)
    assert sums["loss"] == pytest.approx(-2.28)
    assert sums["kl_k1"] == pytest.approx(-math.log(2.0))
    assert sums["kl_k3"] == pytest.approx(1.0 - math.log(2.0))
    assert not any(total.requires_grad for total in sums.values())


def naive_loss(current, proximal, advantages, mask, num_tokens, clip_low, clip_high, dual_clip):
    """The formula token by token, in plain Python."""
    total = torch.zeros((), dtype=torch.float64)
    for c, p, a, m in zip(current, proximal, advantages, mask):
        if m == 0:
            continue
        ratio = torch.exp(c - p)
        clipped = min(max(ratio, 1 - clip_low), 1 + clip_high)
        objective = min(ratio * a, clipped * a)
        if a < 0:
            objective = max(objective, dual_clip * a)
        total = total - m * objective
    return total / num_tokens


@pytest.mark.parametrize("seed", range(5))
def test_matches_the_naive_formula_and_its_gradient(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    draw = {"generator": generator, "dtype": torch.float64}
    proximal = -torch.rand(200, **draw) * 5
    start = proximal + torch.randn(200, **draw)
    advantages = torch.randn(200, **draw)
    mask = (torch.rand(200, **draw) > 0.3).double()
    ours, naive = start.clone().requires_grad_(), start.clone().requires_grad_()
    loss, _ = clipped_policy_loss(ours, proximal, advantages, mask, 77, **BOUNDS)
    expected = naive_loss(naive, proximal, advantages, mask, 77, **BOUNDS)
    loss.backward()
    expected.backward()
    assert loss.dtype == torch.float64
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(ours.grad, naive.grad, rtol=1e-12, atol=1e-14)


def test_first_update_is_the_policy_gradient() -> None:
    current = torch.randn(6, dtype=torch.float64).requires_grad_()
    advantages = row(1.0, -2.0, 0.5, 0.0, 3.0, -0.1)
    loss, _ = clipped_policy_loss(current, current.detach(), advantages, torch.ones(6), 6, **BOUNDS)
    loss.backward()
    torch.testing.assert_close(current.grad, -advantages / 6)


@given(split=st.integers(0, 12), seed=st.integers(0, 50))
@settings(max_examples=30, deadline=None)
def test_any_split_adds_up_to_the_whole(split: int, seed: int) -> None:
    tensors = torch.randn(4, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    current, proximal, advantages, mask = tensors[0], tensors[1], tensors[2], (tensors[3] > 0).double()
    whole, _ = clipped_policy_loss(current, proximal, advantages, mask, 12, **BOUNDS)
    parts = [
        clipped_policy_loss(current[s], proximal[s], advantages[s], mask[s], 12, **BOUNDS)[0]
        for s in (slice(0, split), slice(split, 12))
    ]
    torch.testing.assert_close(sum(parts), whole)


@pytest.mark.parametrize("num_tokens", [0, torch.tensor(0)])
@pytest.mark.parametrize("junk", [0.0, math.nan, math.inf, -math.inf])
def test_all_masked_is_zero_whatever_it_holds(junk: float, num_tokens) -> None:
    current = torch.full((1, 5), junk, requires_grad=True)
    other = torch.full((1, 5), junk)
    loss, sums = clipped_policy_loss(current, other, other, torch.zeros(1, 5), num_tokens, **BOUNDS)
    loss.backward()
    assert loss.item() == 0.0
    assert (current.grad == 0).all()
    assert all(total == 0 for total in sums.values())


def test_masked_junk_does_not_leak() -> None:
    current = row(0.1, math.nan, grad=True)
    loss, _ = clipped_policy_loss(current, row(0.0, math.inf), row(1.0, math.nan), row(1.0, 0.0), 1, **BOUNDS)
    loss.backward()
    assert loss.item() == pytest.approx(-math.exp(0.1))
    assert current.grad.tolist() == pytest.approx([-math.exp(0.1), 0.0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("log_ratio", [100.0, -100.0])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_extreme_ratios_stay_finite(log_ratio: float, advantage: float, dtype: torch.dtype) -> None:
    current = row(log_ratio, grad=True, dtype=dtype)
    loss, sums = clipped_policy_loss(
        current, row(0.0, dtype=dtype), row(advantage, dtype=dtype), row(1.0, dtype=dtype), 1, **BOUNDS
    )
    loss.backward()
    expected = {(100, 1): -1.28, (100, -1): 3.0, (-100, 1): 0.0, (-100, -1): 0.8}[int(log_ratio), int(advantage)]
    assert loss.item() == pytest.approx(expected, abs=1e-6)
    assert current.grad.item() == pytest.approx(0.0, abs=1e-8)
    assert all(torch.isfinite(total) for total in sums.values())
    assert loss.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


def test_gradient_reaches_the_current_policy_only() -> None:
    current, proximal, advantages = row(0.0, grad=True), row(0.0, grad=True), row(1.0, grad=True)
    clipped_policy_loss(current, proximal, advantages, row(1.0), 1, **BOUNDS)[0].backward()
    assert current.grad is not None and proximal.grad is None and advantages.grad is None


@pytest.mark.parametrize(
    ("bad", "message"),
    [({"clip_low": 1.0}, "clip_low: found 1.0"), ({"clip_high": -0.1}, "clip_high"), ({"dual_clip": 1.2}, "dual_clip")],
)
def test_bounds_without_a_trust_region_are_refused(bad: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        one_token(1.0, 1.0, **bad)


def test_value_bce_hand_worked() -> None:
    # value 0.5 against any target costs log 2; value 0.75 (logit log 3) against 1 costs log(4/3)
    logits = row(0.0, math.log(3.0), grad=True)
    loss = value_bce_loss(logits, row(0.3, 1.0), row(1.0, 0.5))
    loss.backward()
    assert loss.item() == pytest.approx(math.log(2.0) + 0.5 * math.log(4 / 3))
    assert logits.grad.tolist() == pytest.approx([0.5 - 0.3, 0.5 * (0.75 - 1.0)])


def test_value_bce_matches_the_naive_formula_and_its_gradient() -> None:
    generator = torch.Generator().manual_seed(0)
    start, targets, weights = (torch.rand(3, 50, dtype=torch.float64, generator=generator) for _ in range(3))
    ours, naive = (start * 8 - 4).requires_grad_(), (start * 8 - 4).requires_grad_()
    value = torch.sigmoid(naive)
    expected = -(weights * (targets * value.log() + (1 - targets) * (1 - value).log())).sum()
    loss = value_bce_loss(ours, targets, weights)
    loss.backward()
    expected.backward()
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(ours.grad, naive.grad)


def test_value_bce_is_least_at_the_target() -> None:
    logits = torch.linspace(-4, 4, 161, dtype=torch.float64)
    losses = torch.stack([value_bce_loss(logit, torch.tensor(0.7), torch.tensor(1.0)) for logit in logits])
    assert torch.sigmoid(logits[losses.argmin()]).item() == pytest.approx(0.7, abs=0.006)


@pytest.mark.parametrize("logit", [100.0, -100.0])
def test_value_bce_extreme_logits(logit: float) -> None:
    logits = row(logit, grad=True, dtype=torch.float32)
    loss = value_bce_loss(logits, row(0.5, dtype=torch.float32), row(1.0, dtype=torch.float32))
    loss.backward()
    assert loss.item() == pytest.approx(50.0)
    assert logits.grad.item() == pytest.approx(math.copysign(0.5, logit))


@pytest.mark.parametrize("junk", [0.0, math.nan, math.inf])
def test_value_bce_all_masked(junk: float) -> None:
    logits = torch.full((4,), junk, requires_grad=True)
    loss = value_bce_loss(logits, torch.full((4,), junk), torch.zeros(4))
    loss.backward()
    assert loss.item() == 0.0 and (logits.grad == 0).all()


def test_value_bce_half_precision_is_computed_in_float32() -> None:
    logits = row(0.3, -2.0, dtype=torch.bfloat16)
    loss = value_bce_loss(logits, row(0.1, 0.9), row(1.0, 1.0, dtype=torch.bfloat16))
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, value_bce_loss(logits.float(), row(0.1, 0.9), torch.ones(2)))
