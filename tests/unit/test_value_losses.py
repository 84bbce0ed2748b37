from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron_ac2.algorithm.value_losses import (
    two_hot,
    two_hot_value,
    value_bce_loss,
    value_mse_loss,
    value_two_hot_loss,
)
from megatron_ac2.types import UserError

NUM_BINS = 11


def row(*values: float, grad: bool = False, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.tensor(values, dtype=dtype).requires_grad_(grad)


def draws(*shape: int, seed: int = 0) -> Tensor:
    return torch.rand(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def clipped_mse(values: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
    return value_mse_loss(values, targets, weights, torch.full_like(values, 0.125).detach(), 0.5)


LOSSES = [(value_bce_loss, ()), (value_mse_loss, ()), (clipped_mse, ()), (value_two_hot_loss, (NUM_BINS,))]
each_loss = pytest.mark.parametrize(("loss", "bins"), LOSSES)


# binary cross-entropy


def test_bce_hand_worked() -> None:
    # value 0.5 against any target costs log 2; value 0.75 (logit log 3) against 1 costs log(4/3)
    logits = row(0.0, math.log(3.0), grad=True)
    loss = value_bce_loss(logits, row(0.3, 1.0), row(1.0, 0.5))
    loss.backward()
    assert loss.item() == pytest.approx(math.log(2.0) + 0.5 * math.log(4 / 3))
    assert logits.grad.tolist() == pytest.approx([0.5 - 0.3, 0.5 * (0.75 - 1.0)])


def test_bce_matches_the_naive_formula_and_its_gradient() -> None:
    start, targets, weights = draws(3, 50)
    ours, naive = (start * 8 - 4).requires_grad_(), (start * 8 - 4).requires_grad_()
    value = torch.sigmoid(naive)
    expected = -(weights * (targets * value.log() + (1 - targets) * (1 - value).log())).sum()
    loss = value_bce_loss(ours, targets, weights)
    loss.backward()
    expected.backward()
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(ours.grad, naive.grad)


def test_bce_is_least_at_the_target() -> None:
    logits = torch.linspace(-4, 4, 161, dtype=torch.float64)
    losses = torch.stack([value_bce_loss(logit, torch.tensor(0.7), torch.tensor(1.0)) for logit in logits])
    assert torch.sigmoid(logits[losses.argmin()]).item() == pytest.approx(0.7, abs=0.006)


@pytest.mark.parametrize("logit", [100.0, -100.0])
def test_bce_extreme_logits(logit: float) -> None:
    logits = row(logit, grad=True, dtype=torch.float32)
    loss = value_bce_loss(logits, row(0.5, dtype=torch.float32), row(1.0, dtype=torch.float32))
    loss.backward()
    assert loss.item() == pytest.approx(50.0)
    assert logits.grad.item() == pytest.approx(math.copysign(0.5, logit))


# two-hot


def test_two_hot_hand_worked() -> None:
    # 0.37 is 3.7 grid steps: 0.3 of the mass on 0.3, 0.7 on 0.4
    expected = torch.zeros(4, NUM_BINS, dtype=torch.float64)
    expected[0, 3], expected[0, 4], expected[1, 0], expected[2, 10], expected[3, 6] = 0.3, 0.7, 1.0, 1.0, 1.0
    torch.testing.assert_close(two_hot(row(0.37, 0.0, 1.0, 0.6)), expected)


def test_two_hot_takes_other_grids_and_holds_what_lies_outside() -> None:
    torch.testing.assert_close(two_hot(row(0.125), 5), row(0.5, 0.5, 0, 0, 0)[None])
    torch.testing.assert_close(two_hot(row(-2.0, 7.0), 2), torch.eye(2, dtype=torch.float64))
    with pytest.raises(ValueError, match="1 bins"):
        two_hot(row(0.5), 1)


@settings(max_examples=100)
@given(st.floats(0, 1), st.integers(2, 41))
def test_two_hot_is_a_distribution_on_two_neighbours_with_the_value_as_mean(value: float, num_bins: int) -> None:
    mass = two_hot(row(value), num_bins)[0]
    filled = mass.nonzero().flatten()
    assert (mass >= 0).all() and mass.sum().item() == pytest.approx(1)
    assert len(filled) <= 2 and filled[-1] - filled[0] <= 1
    assert (mass * torch.linspace(0, 1, num_bins, dtype=torch.float64)).sum().item() == pytest.approx(value, abs=1e-12)
    assert two_hot_value(mass.log()).item() == pytest.approx(value, abs=1e-12)


def test_two_hot_value_of_flat_and_extreme_logits() -> None:
    assert two_hot_value(torch.zeros(2, NUM_BINS)).tolist() == pytest.approx([0.5, 0.5])
    extreme = torch.full((NUM_BINS,), -1e4)
    extreme[3] = 1e4
    assert two_hot_value(extreme).item() == pytest.approx(0.3)


def test_two_hot_loss_hand_worked() -> None:
    # flat logits: every bin costs log 11; weight 2. Gradient: 2 (1/11 - two_hot)
    logits = torch.zeros(1, NUM_BINS, dtype=torch.float64, requires_grad=True)
    loss = value_two_hot_loss(logits, row(0.37), row(2.0))
    loss.backward()
    assert loss.item() == pytest.approx(2 * math.log(11))
    assert logits.grad[0, [0, 3, 4]].tolist() == pytest.approx([2 / 11, 2 * (1 / 11 - 0.3), 2 * (1 / 11 - 0.7)])


def test_two_hot_loss_is_least_where_the_distribution_is_the_target() -> None:
    target = two_hot(row(0.37))
    logits = (target + 1e-12).log().requires_grad_()
    value_two_hot_loss(logits, row(0.37), row(1.0)).backward()
    assert logits.grad.abs().max().item() < 1e-9


# squared error


@pytest.mark.parametrize(
    ("value", "target", "old", "loss", "slope"),
    [
        (0.6, 1.0, 0.5, 0.08, -0.4),  # moved by 0.1: within the clip, plain
        (0.9, 1.0, 0.1, 0.08, 0.0),  # held at 0.6, which is farther off: 1/2 0.4^2, no gradient towards the target
        (0.9, 0.0, 0.1, 0.405, 0.9),  # went the wrong way: the plain error is the larger one, and pulls back
        (0.0, 0.21, 0.9, 0.02205, -0.21),  # held at 0.4, beyond the target but nearer to it: the plain error
    ],
)
def test_clipped_mse_hand_worked(value: float, target: float, old: float, loss: float, slope: float) -> None:
    values = row(value, grad=True)
    found = value_mse_loss(values, row(target), row(1.0), row(old), 0.5)
    found.backward()
    assert found.item() == pytest.approx(loss)
    assert values.grad.item() == pytest.approx(slope, abs=1e-12)


@pytest.mark.parametrize(("old", "clip"), [(None, None), (row(0.1), None), (None, 0.5), (row(0.1), 1e9)])
def test_mse_without_a_clip_is_half_the_square(old: Tensor | None, clip: float | None) -> None:
    values = row(0.9, grad=True)
    loss = value_mse_loss(values, row(1.0), row(3.0), old, clip)
    loss.backward()
    assert loss.item() == pytest.approx(3 * 0.005)
    assert values.grad.item() == pytest.approx(-0.3)


def test_old_values_get_no_gradient_and_the_clip_must_be_positive() -> None:
    values, old = row(0.9, grad=True), row(0.1, grad=True)
    value_mse_loss(values, row(0.0), row(1.0), old, 0.5).backward()
    assert old.grad is None and values.grad is not None
    with pytest.raises(UserError, match="critic.value_clip: found 0"):
        value_mse_loss(values, row(0.0), row(1.0), old, 0.0)
    with pytest.raises(ValueError, match="old values"):
        value_mse_loss(values, row(0.0), row(1.0), row(0.1, 0.2), 0.5)


def test_an_old_value_where_masked_is_not_read() -> None:
    values = row(0.9, 0.9, grad=True)
    loss = value_mse_loss(values, row(0.0, 0.0), row(1.0, 0.0), row(0.9, math.nan), 0.5)
    loss.backward()
    assert loss.item() == pytest.approx(0.405) and values.grad.tolist() == pytest.approx([0.9, 0.0])


# what holds for each


@each_loss
@pytest.mark.parametrize("shape", [(6,), (2, 3), (6, 4)])
def test_gradients_in_float64(loss, bins, shape: tuple[int, ...]) -> None:
    predictions = draws(*(shape if shape != (6, 4) else (6,)), *bins, seed=1).requires_grad_()
    targets, weights = draws(*shape, seed=2), draws(*shape, seed=3) - 0.3 * (draws(*shape, seed=4) > 0.5)
    assert torch.autograd.gradcheck(lambda found: loss(found, targets, weights), (predictions,))


@each_loss
def test_targets_and_weights_get_no_gradient(loss, bins) -> None:
    predictions, targets, weights = draws(5, *bins).requires_grad_(), draws(5).requires_grad_(), draws(5)
    loss(predictions, targets, weights.requires_grad_()).backward()
    assert predictions.grad is not None and targets.grad is None and weights.grad is None


@each_loss
@pytest.mark.parametrize("junk", [0.0, math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("shape", [(4,), (4, 3), (0,)])
def test_all_masked_is_exactly_zero(loss, bins, junk: float, shape: tuple[int, ...]) -> None:
    logits = torch.full((shape[0], *bins), junk, requires_grad=True)
    total = loss(logits, torch.full(shape, junk), torch.zeros(shape))
    total.backward()
    assert total.item() == 0.0 and (logits.grad == 0).all()


@each_loss
def test_what_is_masked_changes_nothing(loss, bins) -> None:
    whole = draws(3, *bins).requires_grad_()
    targets, weights = row(0.1, 0.5, 0.9), row(1.0, 0.0, 2.0)
    loss(whole, targets, weights).backward()
    broken = whole.detach().clone()
    broken[1] = math.nan
    broken.requires_grad_()
    loss(broken, row(0.1, math.inf, 0.9), weights).backward()
    assert torch.equal(whole.grad, broken.grad)


@each_loss
@pytest.mark.parametrize("logit", [100.0, -100.0, 1e4])
def test_extreme_predictions_stay_finite(loss, bins, logit: float) -> None:
    logits = torch.zeros(2, *bins)
    logits.view(2, -1)[0, 0] = logit
    logits.requires_grad_()
    total = loss(logits, torch.tensor([1.0, 0.0]), torch.ones(2))
    total.backward()
    assert total.isfinite() and logits.grad.isfinite().all()


@each_loss
def test_half_precision_is_computed_in_float32(loss, bins) -> None:
    logits = draws(2, *bins).bfloat16()
    total = loss(logits, row(0.1, 0.9), row(1.0, 1.0, dtype=torch.bfloat16))
    assert total.dtype == torch.float32
    torch.testing.assert_close(total, loss(logits.float(), row(0.1, 0.9), torch.ones(2)))


@each_loss
def test_one_prediction_with_n_targets_is_n_predictions(loss, bins) -> None:
    predictions, targets, weights = draws(2, 3, *bins), draws(2, 3, 5, seed=1), draws(2, 3, 5, seed=2)
    repeated = predictions.unsqueeze(2).expand(2, 3, 5, *bins)
    expected = loss(repeated, targets, weights)
    torch.testing.assert_close(loss(predictions, targets, weights), expected)
    torch.testing.assert_close(loss(predictions.unsqueeze(2), targets, weights), expected)


@each_loss
def test_shapes_that_only_broadcasting_would_take_are_refused(loss, bins) -> None:
    square = torch.ones(3, 3)
    for predictions, targets, weights in [
        (torch.ones(2, *bins), square, square),
        (torch.ones(1, 3, *bins), square, square),
        (torch.ones(3, *bins), torch.ones(3), torch.ones(1)),
        (torch.ones(1, *bins), torch.tensor(1.0), torch.tensor(1.0)),
    ]:
        with pytest.raises(ValueError, match="value loss"):
            loss(predictions, targets, weights)


@pytest.mark.parametrize("loss", [value_bce_loss, value_mse_loss])
def test_averaged_losses_have_the_gradient_of_the_mean_target(loss) -> None:
    # state 0 has the targets 0.2, 0.4, 0.9, state 1 only 0.7
    targets = torch.stack([row(0.2, 0.4, 0.9), row(0.7, math.nan, math.nan)])
    weights = torch.stack([row(1 / 3, 1 / 3, 1 / 3), row(1.0, 0.0, 0.0)])
    many, one = row(0.3, 0.8, grad=True), row(0.3, 0.8, grad=True)
    averaged = loss(many, targets, weights)
    on_the_mean = loss(one, row(0.5, 0.7), row(1.0, 1.0))
    averaged.backward()
    on_the_mean.backward()
    torch.testing.assert_close(many.grad, one.grad)
    # variance of (0.2, 0.4, 0.9) around 0.5: (0.09 + 0.01 + 0.16) / 3
    gap = 0.5 * 0.26 / 3 if loss is value_mse_loss else 0.0
    assert (averaged - on_the_mean).item() == pytest.approx(gap, abs=1e-12)


def test_averaged_two_hot_losses_fit_the_mean_distribution() -> None:
    logits = draws(1, NUM_BINS).requires_grad_()
    value_two_hot_loss(logits, row(0.2, 0.9)[None], row(0.5, 0.5)[None]).backward()
    expected = logits.detach().softmax(-1) - two_hot(row(0.2, 0.9)).mean(0)
    torch.testing.assert_close(logits.grad, expected)
