from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ac2.algorithm.policy_losses import asympo, cispo, gspo, policy_gradient, ppo, reference_kl

BOUNDS = {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": 3.0}
TWO_BOUNDS = {"clip_low": 0.2, "clip_high": 0.28}


def row(*values: float, grad: bool = False, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype).requires_grad_(grad)


def slopes(loss: torch.Tensor, current: torch.Tensor) -> torch.Tensor:
    return torch.autograd.grad(loss.sum(), current)[0]


def one_token(ratio: float, advantage: float, **bounds: float | None) -> tuple[float, float, dict]:
    """PPO's loss, d loss / d ratio and signals of a single token."""
    current = row(math.log(ratio), grad=True)
    loss, signals = ppo(current, row(0.0), row(advantage), **{**BOUNDS, **bounds})
    slope = slopes(loss, current).item() / ratio
    return loss.item(), slope, {name: signal.item() for name, signal in signals.items()}


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
def test_ppo_hand_worked_regions(ratio: float, advantage: float, loss: float, slope: float) -> None:
    found_loss, found_slope, _ = one_token(ratio, advantage)
    assert found_loss == pytest.approx(loss, abs=1e-12)
    assert found_slope == pytest.approx(slope, abs=1e-12)


def test_ppo_upper_bound_follows_the_controller() -> None:
    assert one_token(1.3, 1.0)[0] == pytest.approx(-1.28)
    assert one_token(1.3, 1.0, clip_high=0.28 + 0.06)[0] == pytest.approx(-1.3)


def test_ppo_without_dual_clip() -> None:
    loss, slope, signals = one_token(3.5, -2.0, dual_clip=None)
    assert (loss, slope) == (pytest.approx(7.0), pytest.approx(2.0))
    assert "dual_clip" not in signals


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
def test_ppo_counts_lost_gradients(ratio: float, advantage: float, counted: str | None) -> None:
    signals = one_token(ratio, advantage)[2]
    found = {name for name in ("clip_high", "clip_low", "dual_clip") if signals[name]}
    assert found == ({counted} if counted else set())


def test_ppo_distances() -> None:
    # r = 2: k1 = -log 2, k3 = 2 - 1 - log 2
    signals = one_token(2.0, 1.0)[2]
    assert signals["ratio"] == pytest.approx(2.0)
    assert signals["kl_k1"] == pytest.approx(-math.log(2.0))
    assert signals["kl_k3"] == pytest.approx(1.0 - math.log(2.0))


def naive_ppo(current, anchor, advantages, clip_low, clip_high, dual_clip):
    """The formula token by token, in plain Python."""
    losses = []
    for c, p, a in zip(current, anchor, advantages, strict=True):
        ratio = torch.exp(c - p)
        clipped = min(max(ratio, 1 - clip_low), 1 + clip_high)
        objective = min(ratio * a, clipped * a)
        losses.append(-max(objective, dual_clip * a) if a < 0 else -objective)
    return torch.stack(losses)


@pytest.mark.parametrize("seed", range(3))
def test_ppo_matches_the_naive_formula_and_its_gradient(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    draw = {"generator": generator, "dtype": torch.float64}
    anchor = -torch.rand(100, **draw) * 5
    current = (anchor + torch.randn(100, **draw)).requires_grad_()
    advantages = torch.randn(100, **draw)
    loss, _ = ppo(current, anchor, advantages, **BOUNDS)
    expected = naive_ppo(current, anchor, advantages, **BOUNDS)
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(slopes(loss, current), slopes(expected, current), rtol=1e-12, atol=1e-14)


def test_ppo_at_ratio_one_is_the_policy_gradient() -> None:
    current = torch.randn(6, dtype=torch.float64).requires_grad_()
    advantages = row(1.0, -2.0, 0.5, 0.0, 3.0, -0.1)
    loss, _ = ppo(current, current.detach(), advantages, **BOUNDS)
    plain, signals = policy_gradient(current, advantages)
    torch.testing.assert_close(loss, -advantages)
    torch.testing.assert_close(plain, -advantages * current)
    torch.testing.assert_close(slopes(loss, current), slopes(plain, current))
    assert signals == {}


def test_cispo_hand_worked() -> None:
    # ratios 0.5 -> 0.8, 1.1 as it is, 2 -> 1.28, each times -A log pi; current is log(r) - 1
    current = row(math.log(0.5) - 1, math.log(1.1) - 1, math.log(2.0) - 1, grad=True)
    loss, signals = cispo(current, row(-1.0, -1.0, -1.0), row(-1.0, 2.0, 3.0), **TWO_BOUNDS)
    weights = row(0.8, 1.1, 1.28) * row(1.0, -2.0, -3.0)
    torch.testing.assert_close(loss.detach(), weights * current.detach())
    torch.testing.assert_close(slopes(loss, current), weights)  # no token loses its gradient
    assert signals["clip_low"].tolist() == [True, False, False]
    assert signals["clip_high"].tolist() == [False, False, True]


def test_cispo_unclipped_has_the_importance_weighted_policy_gradient() -> None:
    anchor = -torch.rand(8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    advantages = torch.linspace(-1, 1, 8, dtype=torch.float64)
    current = anchor.clone().requires_grad_()
    loss, _ = cispo(current, anchor, advantages, **TWO_BOUNDS)  # ratio 1: exactly the policy gradient's loss
    torch.testing.assert_close(loss, policy_gradient(current, advantages)[0])
    moved = (anchor + 0.1).requires_grad_()
    plain = slopes(policy_gradient(moved, advantages)[0], moved)
    torch.testing.assert_close(slopes(cispo(moved, anchor, advantages, **TWO_BOUNDS)[0], moved), plain * math.exp(0.1))


def test_cispo_without_a_lower_bound() -> None:
    loss, signals = cispo(row(-5.0), row(-1.0), row(1.0), clip_low=1.0, clip_high=0.28)
    assert loss.item() == pytest.approx(math.exp(-4.0) * 5.0)
    assert not signals["clip_low"]


def sequences(*lengths: int) -> torch.Tensor:
    return torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))


def test_gspo_hand_worked() -> None:
    # sequence 0: log ratios 0.2, 0, 0.1 -> s = e^0.1 = 1.105, inside; sequence 1: 1.0, 0.5 -> e^0.75 = 2.1, clipped
    current = row(0.2, 0.0, 0.1, 1.0, 0.5, grad=True)
    loss, signals = gspo(
        current, torch.zeros(5), row(2.0, 2.0, 2.0, 1.0, 1.0), sequences(3, 2), 2, torch.ones(5), **TWO_BOUNDS
    )
    s = math.exp(0.1)
    torch.testing.assert_close(loss.detach(), row(-2 * s, -2 * s, -2 * s, -1.28, -1.28))
    torch.testing.assert_close(slopes(loss, current), row(-2 * s, -2 * s, -2 * s, 0.0, 0.0))
    torch.testing.assert_close(signals["ratio"], row(s, s, s, math.exp(0.75), math.exp(0.75)))
    assert signals["clip_high"].tolist() == [False] * 3 + [True] * 2
    torch.testing.assert_close(signals["kl_k1"], -current.detach())


def test_gspo_of_one_token_sequences_is_ppo_without_dual_clip() -> None:
    generator = torch.Generator().manual_seed(0)
    current, anchor, advantages = torch.randn(3, 40, dtype=torch.float64, generator=generator)
    current.requires_grad_()
    ids = torch.randperm(40, generator=generator)
    loss, signals = gspo(current, anchor, advantages, ids, 40, torch.ones(40), **TWO_BOUNDS)
    expected, expected_signals = ppo(current, anchor, advantages, **TWO_BOUNDS, dual_clip=None)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(slopes(loss, current), slopes(expected, current))
    torch.testing.assert_close(signals, expected_signals)


@given(seed=st.integers(0, 1000), lengths=st.lists(st.integers(1, 5), min_size=1, max_size=5))
@settings(max_examples=30)
def test_gspo_gradient_is_the_sequence_forms(seed: int, lengths: list[int]) -> None:
    generator = torch.Generator().manual_seed(seed)
    ids = sequences(*lengths)[torch.randperm(sum(lengths), generator=generator)]  # order within the pack is free
    current, anchor = torch.randn(2, len(ids), dtype=torch.float64, generator=generator) * 0.4
    current.requires_grad_()
    by_sequence = torch.randn(len(lengths), dtype=torch.float64, generator=generator)
    token_form, _ = gspo(current, anchor, by_sequence[ids], ids, len(lengths), torch.ones(len(ids)), **TWO_BOUNDS)
    means, forms = [], []
    for i, advantage in enumerate(by_sequence):
        means.append(token_form[ids == i].mean())
        s = (current - anchor)[ids == i].mean().exp()
        forms.append(-torch.minimum(s * advantage, s.clamp(0.8, 1.28) * advantage))
    torch.testing.assert_close(torch.stack(means), torch.stack(forms))
    torch.testing.assert_close(slopes(torch.stack(means), current), slopes(torch.stack(forms), current))


def test_asympo_hand_worked() -> None:
    # sequence 0: nll 1, 3, mean 2, A 2 -> 2 * (1, 3) / 2, slopes -A / 2; sequence 1: nll 0, mean 0 -> floor 0.5, A -1
    current = row(-1.0, -3.0, 0.0, grad=True)
    loss, signals = asympo(current, row(2.0, 2.0, -1.0), sequences(2, 1), 2, torch.ones(3), floor=0.5)
    torch.testing.assert_close(loss.detach(), row(1.0, 3.0, 0.0))
    torch.testing.assert_close(slopes(loss, current), row(-1.0, -1.0, 2.0))
    assert signals["nll_floored"].tolist() == [False, False, True]


def test_asympo_loss_of_a_sequence_is_its_advantage() -> None:
    # The mean over a sequence of l_t / mean l is 1, whatever the log-probs: only the gradient tells them apart.
    current = -torch.rand(6, dtype=torch.float64, generator=torch.Generator().manual_seed(3)) - 0.1
    loss, _ = asympo(current, torch.full((6,), 0.7), sequences(4, 2), 2, torch.ones(6), floor=0.01)
    assert loss[:4].mean().item() == pytest.approx(0.7, rel=1e-6)
    assert loss[4:].mean().item() == pytest.approx(0.7, rel=1e-6)


@pytest.mark.parametrize("junk", [math.nan, math.inf, -math.inf])
def test_sequence_losses_read_nothing_where_the_mask_is_zero(junk: float) -> None:
    mask, ids = row(1.0, 0.0, 0.5), torch.tensor([0, 99, 0])  # any weight counts a token once in its sequence's mean
    current, other = row(-0.2, junk, -0.4, grad=True), row(0.0, junk, 0.0)
    clean, clean_ids, ones = row(-0.2, -0.4, grad=True), torch.tensor([0, 0]), torch.ones(2)
    for masked, expected in (
        (
            gspo(current, other, row(1.0, junk, 1.0), ids, 1, mask, **TWO_BOUNDS)[0],
            gspo(clean, row(0.0, 0.0), row(1.0, 1.0), clean_ids, 1, ones, **TWO_BOUNDS)[0],
        ),
        (
            asympo(current, row(1.0, junk, 1.0), ids, 1, mask, floor=0.01)[0],
            asympo(clean, row(1.0, 1.0), clean_ids, 1, ones, floor=0.01)[0],
        ),
    ):
        torch.testing.assert_close(masked[[0, 2]], expected)
        assert masked[1] == 0
        found = slopes(masked, current)
        torch.testing.assert_close(found[[0, 2]], slopes(expected, clean))
        assert found[1] == 0


def test_reference_kl_hand_worked() -> None:
    # x = log(reference / pi) = log 2: k1 = -log 2, k2 = (log 2)^2 / 2, k3 = 2 - 1 - log 2; slopes 1, -x, 1 - e^x
    log2 = math.log(2.0)
    for estimator, value, slope in (("k1", -log2, 1.0), ("k2", log2**2 / 2, -log2), ("k3", 1 - log2, -1.0)):
        current = row(-1.0, grad=True)
        found = reference_kl(current, row(-1.0 + log2), estimator)
        assert found.item() == pytest.approx(value)
        assert slopes(found, current).item() == pytest.approx(slope)
        assert reference_kl(current, current.detach(), estimator).item() == 0.0


def test_reference_kl_expected_values_and_gradients() -> None:
    """By summation over a small vocabulary: what the docstring says of each estimator."""
    generator = torch.Generator().manual_seed(5)
    logits, reference_logits = torch.randn(2, 6, dtype=torch.float64, generator=generator)
    logits.requires_grad_()
    log_p, log_ref = torch.log_softmax(logits, 0), torch.log_softmax(reference_logits, 0)
    p = log_p.exp().detach()

    def gradient(scalar: torch.Tensor) -> torch.Tensor:
        return torch.autograd.grad(scalar, logits, retain_graph=True)[0]

    estimates = {name: (p * reference_kl(log_p, log_ref, name)).sum() for name in ("k1", "k2", "k3")}
    reverse = (log_p.exp() * (log_p - log_ref)).sum()  # KL(pi || reference)
    forward = (log_ref.exp() * (log_ref - log_p)).sum()  # KL(reference || pi)
    torch.testing.assert_close(estimates["k1"], reverse)
    torch.testing.assert_close(estimates["k3"], reverse)
    torch.testing.assert_close(gradient(estimates["k1"]), torch.zeros(6, dtype=torch.float64))
    torch.testing.assert_close(gradient(estimates["k2"]), gradient(reverse))
    torch.testing.assert_close(gradient(estimates["k3"]), gradient(forward))


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize(("current", "reference"), [(0.0, -100.0), (-100.0, 0.0)])
def test_reference_kl_extremes_never_push_away(estimator: str, current: float, reference: float) -> None:
    leaf = row(current, grad=True, dtype=torch.float32)
    loss = reference_kl(leaf, row(reference, dtype=torch.float32), estimator)
    slope = slopes(loss, leaf).item()
    assert math.isfinite(loss.item()) and math.isfinite(slope)
    if estimator != "k1":
        assert slope * (current - reference) >= 0
    if current > reference:
        assert slope > 0  # the divergent case keeps its pull


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("log_ratio", [100.0, -100.0])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_ppo_extreme_ratios(log_ratio: float, advantage: float, dtype: torch.dtype) -> None:
    current = row(log_ratio, grad=True, dtype=dtype)
    loss, signals = ppo(current, row(0.0, dtype=dtype), row(advantage, dtype=dtype), **BOUNDS)
    expected = {(100, 1): -1.28, (100, -1): 3.0, (-100, 1): 0.0, (-100, -1): 0.8}[int(log_ratio), int(advantage)]
    assert loss.item() == pytest.approx(expected, abs=1e-6)
    assert slopes(loss, current).item() == pytest.approx(0.0, abs=1e-8)
    assert all(torch.isfinite(signal).all() for signal in signals.values())
    assert loss.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


def test_gradient_reaches_the_current_policy_only() -> None:
    ids, ones = torch.tensor([0]), torch.ones(1)
    for loss in (
        lambda c, p, a: policy_gradient(c, a),
        lambda c, p, a: ppo(c, p, a, **BOUNDS),
        lambda c, p, a: cispo(c, p, a, **TWO_BOUNDS),
        lambda c, p, a: gspo(c, p, a, ids, 1, ones, **TWO_BOUNDS),
        lambda c, p, a: asympo(c, a, ids, 1, ones, floor=0.01),
        lambda c, p, a: (reference_kl(c, p, "k3"), {}),
    ):
        current, anchor, advantages = row(-1.0, grad=True), row(-1.5, grad=True), row(1.0, grad=True)
        per_token, signals = loss(current, anchor, advantages)
        per_token.sum().backward()
        assert current.grad is not None and anchor.grad is None and advantages.grad is None
        assert not any(signal.requires_grad for signal in signals.values())
