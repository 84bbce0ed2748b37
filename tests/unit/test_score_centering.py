from __future__ import annotations

import math

import pytest
import torch

from megatron_ac2.algorithm.importance import TOKEN_KINDS, weight_function
from megatron_ac2.algorithm.score_centering import score_centering
from megatron_ac2.types import UserError

VOCABULARY = 7


def policies(seed: int = 0, spread: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    """A trainer's logits (differentiable) and a sampler's log-probs, over a small vocabulary."""
    generator = torch.Generator().manual_seed(seed)
    logits, other = torch.randn(2, VOCABULARY, dtype=torch.float64, generator=generator) * spread
    return logits.requires_grad_(), torch.log_softmax(other, 0)


def scores(logits: torch.Tensor) -> torch.Tensor:
    """grad log p_v with respect to the logits, one row a v: identity - p."""
    p = torch.softmax(logits.detach(), 0)
    return torch.eye(len(logits), dtype=logits.dtype) - p


def centre_gradient(logits: torch.Tensor, log_q: torch.Tensor, head: torch.Tensor, kind: str) -> torch.Tensor:
    log_p = torch.log_softmax(logits, 0)
    centre, _ = score_centering(log_p[head], log_q[head], kind)
    return torch.autograd.grad(centre, logits)[0]


def drift(logits: torch.Tensor, log_q: torch.Tensor, kind: str) -> torch.Tensor:
    """sum_v q_v f(p_v / q_v) grad log p_v by brute force: what E_q[w grad log p] is."""
    p, q = torch.softmax(logits.detach(), 0), log_q.exp()
    return (q * weight_function(kind)(p / q)) @ scores(logits)


@pytest.mark.parametrize("kind", TOKEN_KINDS)
@pytest.mark.parametrize("seed", range(4))
def test_full_vocabulary_gives_the_exact_centred_score(kind: str, seed: int) -> None:
    logits, log_q = policies(seed)
    f = weight_function(kind)
    expected = drift(logits, log_q, kind)
    torch.testing.assert_close(
        centre_gradient(logits, log_q, torch.arange(VOCABULARY), kind), expected, rtol=1e-9, atol=1e-12
    )
    mean = torch.zeros(VOCABULARY, dtype=torch.float64)
    for y in range(VOCABULARY):  # the whole loss, -A (w_y log p_y) + A C, token by token
        log_p = torch.log_softmax(logits, 0)
        centre, _ = score_centering(log_p, log_q, kind)
        weight = f((log_p[y] - log_q[y]).exp().detach())
        advantage = 1.7
        found = torch.autograd.grad(-advantage * weight * log_p[y] + advantage * centre, logits)[0]
        centred = weight * scores(logits)[y] - expected
        torch.testing.assert_close(found, -advantage * centred, rtol=1e-9, atol=1e-12)
        mean += log_q[y].exp() * found
    # No drift is left: under q, a constant advantage moves nothing.
    torch.testing.assert_close(mean, torch.zeros(VOCABULARY, dtype=torch.float64), rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", TOKEN_KINDS)
@pytest.mark.parametrize("tail_scale", [0.1, 1.0, 4.0])
def test_a_partial_head_is_exact_where_the_tail_is_proportional(kind: str, tail_scale: float) -> None:
    """q = rho p outside of H, with 1 / rho above, inside and below the bounds of token_mis."""
    p = torch.tensor([0.02, 0.5, 0.04, 0.3, 0.1, 0.03, 0.01], dtype=torch.float64)
    logits = p.log().requires_grad_()
    head, tail = torch.tensor([1, 3, 4]), torch.tensor([0, 2, 5, 6])
    q = p.clone()
    q[tail] = p[tail] * tail_scale
    q[head] = torch.tensor([0.7, 0.2, 0.1], dtype=torch.float64) * (1 - q[tail].sum())
    assert q.sum().item() == pytest.approx(1.0) and (q > 0).all()
    torch.testing.assert_close(
        centre_gradient(logits, q.log(), head, kind), drift(logits, q.log(), kind), rtol=1e-9, atol=1e-12
    )


@pytest.mark.parametrize("kind", TOKEN_KINDS)
def test_filtered_sampling_is_exact_on_the_support(kind: str) -> None:
    """The sampler drew from four tokens; both sides are normalised on them, and two more columns are unused."""
    logits, log_q = policies(2)
    support = torch.tensor([5, 0, 3, 6])
    log_q = torch.log_softmax(log_q[support], 0)
    log_p = torch.log_softmax(logits[support], 0)
    padded_p = torch.cat([log_p, torch.tensor([-0.3, math.nan], dtype=torch.float64)])
    padded_q = torch.cat([log_q, torch.full((2,), -math.inf, dtype=torch.float64)])
    centre, signals = score_centering(padded_p, padded_q, kind)
    found = torch.autograd.grad(centre, logits)[0]
    expected = torch.zeros(VOCABULARY, dtype=torch.float64)
    expected[support] = drift(logits.detach()[support], log_q, kind)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
    assert signals["head_mass_q"].item() == pytest.approx(1.0)
    assert signals["head_mass_p"].item() == pytest.approx(1.0)


@pytest.mark.parametrize("size", [1, 3, VOCABULARY])
@pytest.mark.parametrize("spread", [1.0, 30.0])
def test_full_importance_sampling_makes_it_vanish(size: int, spread: float) -> None:
    logits, log_q = policies(3, spread)
    head = log_q.argsort(descending=True)[:size]
    centre, _ = score_centering(torch.log_softmax(logits, 0)[head], log_q[head], "token_is")
    assert centre.item() == pytest.approx(0.0, abs=1e-12)
    assert torch.autograd.grad(centre, logits)[0].abs().max() < 1e-12


@pytest.mark.parametrize("kind", TOKEN_KINDS)
def test_it_vanishes_where_sampler_and_trainer_agree(kind: str) -> None:
    logits, _ = policies(4)
    log_p = torch.log_softmax(logits, 0)
    head = log_p.argsort(descending=True)[:3]
    centre, _ = score_centering(log_p[head], log_p[head].detach(), kind)
    # q f(1) - alpha p = 0 with rho = 1
    assert torch.autograd.grad(centre, logits)[0].abs().max() < 1e-12


def test_hand_worked() -> None:
    # H: p = (.4, .1), q = (.1, .3): tails .5 and .6, rho = .6 / .5 = 1.2.
    p = torch.tensor([0.4, 0.1], dtype=torch.float64)
    log_q = torch.tensor([0.1, 0.3], dtype=torch.float64).log()
    expected = {
        "none": (0.1 - 1.2 * 0.4, 0.3 - 1.2 * 0.1),  # alpha = rho
        "token_is": (0.0, 0.0),
        "token_tis": (0.2 - 0.4, 0.1 - 0.1),  # min(p, 2q) = (.2, .1), alpha = min(1, 2.4) = 1
        "token_mis": (0.4 - 0.4, 0.0 - 0.1),  # ratios 4 (kept) and 1/3 (out), 1 / rho = .83 kept: alpha = 1
    }
    for kind, coefficients in expected.items():
        log_p = p.log().requires_grad_()
        centre, signals = score_centering(log_p, log_q, kind)
        assert torch.autograd.grad(centre, log_p)[0].tolist() == pytest.approx(coefficients, abs=1e-12)
        assert centre.item() == pytest.approx(coefficients[0] * math.log(0.4) + coefficients[1] * math.log(0.1))
        assert signals["head_mass_q"].item() == pytest.approx(0.4)
        assert signals["head_mass_p"].item() == pytest.approx(0.5)


def test_truncated_and_rejected_tails() -> None:
    # p tail .5, q tail .1: rho = .2, 1 / rho = 5. TIS: alpha = min(1, 2 * .2) = .4. MIS: 5 is kept at high 5, not at 4.
    log_p, log_q = torch.tensor([0.5], dtype=torch.float64).log(), torch.tensor([0.9], dtype=torch.float64).log()
    for kind, high, head_mass, alpha in (
        ("token_tis", None, 0.5, 0.4),
        ("token_mis", 6.0, 0.5, 1.0),
        ("token_mis", 4.0, 0.5, 0.0),
    ):
        leaf = log_p.clone().requires_grad_()
        centre, _ = score_centering(leaf, log_q, kind, None, high)
        assert torch.autograd.grad(centre, leaf)[0].item() == pytest.approx(head_mass - alpha * 0.5)


def test_empty_tails_are_floored() -> None:
    # q all in H and p by half: rho = 1e-6 / .5; the other way about: rho = .5 / 1e-6
    for p, q, rho in ((0.5, 1.0, 2e-6), (1.0, 0.5, 5e5)):
        log_p = torch.tensor([p], dtype=torch.float64).log().requires_grad_()
        centre, _ = score_centering(log_p, torch.tensor([q], dtype=torch.float64).log(), "none")
        found = torch.autograd.grad(centre, log_p)[0].item()
        assert found == pytest.approx(q - rho * p, rel=1e-12, abs=0)


@pytest.mark.parametrize("kind", TOKEN_KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_extreme_log_probs_stay_finite(kind: str, dtype: torch.dtype) -> None:
    top_current = torch.tensor([[0.0, -100.0], [-100.0, 0.0]], dtype=dtype, requires_grad=True)
    top_behavior = torch.tensor([[-100.0, 0.0], [0.0, -100.0]], dtype=dtype)
    centre, signals = score_centering(top_current, top_behavior, kind)
    centre.sum().backward()
    assert centre.shape == (2,) and torch.isfinite(centre).all() and torch.isfinite(top_current.grad).all()
    assert all(torch.isfinite(signal).all() for signal in signals.values())
    assert centre.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


@pytest.mark.parametrize("junk", [0.0, math.nan, math.inf, -math.inf])
def test_an_empty_head_is_zero(junk: float) -> None:
    top_current = torch.full((1, 4, 3), junk, requires_grad=True)
    centre, signals = score_centering(top_current, torch.full((1, 4, 3), -math.inf), "token_tis")
    centre.sum().backward()
    assert (centre == 0).all() and (top_current.grad == 0).all()
    assert all((signal == 0).all() and not signal.requires_grad for signal in signals.values())


def test_sequence_kinds_are_refused() -> None:
    with pytest.raises(UserError, match="actor.importance.kind: found sequence_mis"):
        score_centering(torch.zeros(1, 2), torch.zeros(1, 2), "sequence_mis")
