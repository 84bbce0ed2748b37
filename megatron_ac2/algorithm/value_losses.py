"""Losses of the critic: weighted sums over the labels at hand, a scalar each (docs/ALGORITHM.md §4 and §6).

A state has one prediction, and one target or N of them. With one, all tensors are [...] of one shape. With N, targets
and weights are [..., N] and predictions [...] or [..., 1]; then the losses of a state are averaged, not its targets, by
giving each of its N_i existing targets the weight 1 / N_i and the others 0. Targets lie in [0, 1] and get no gradient.

Nothing here reads what stands where the weight is 0 (NaN and inf included), so weights of 0 throughout give exactly 0
and zero gradients. Half-precision inputs are computed in float32, float64 stays float64. The loss of a state with N
targets has the gradient of a fit to their mean (two-hot: to their mean distribution), unless the value is clipped.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_ac2.algorithm.advantages import GRID_STEPS
from megatron_ac2.types import UserError


def value_bce_loss(logits: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
    """Binary cross-entropy of value = sigmoid(logit) against soft targets: the weighted sum, a scalar.

    logits [...]; targets and weights [...] or [..., N]. Least at value == target; the gradient on a logit
    is the sum of weight * (value - target) over its targets. Raises ValueError for shapes that do not match.
    """
    logits, targets, weights = _readable(logits, targets, weights)
    return (F.binary_cross_entropy_with_logits(logits, targets, reduction="none") * weights).sum()


def two_hot(targets: Tensor, num_bins: int = GRID_STEPS + 1) -> Tensor:
    """Values [...] -> probabilities [..., num_bins] on an even grid over [0, 1], whose mean is the value.

    The mass is on the two neighbours of the value, on one alone where the value is on the grid. A value outside [0, 1]
    counts as the nearer end. Two-hot targets: arXiv 2301.04104 (DreamerV3). Raises ValueError below two bins.
    """
    if num_bins < 2:
        raise ValueError(f"two_hot: found {num_bins} bins, needs at least 2")
    position = _wide(targets).clamp(0.0, 1.0).unsqueeze(-1) * (num_bins - 1)
    bins = torch.arange(num_bins, dtype=position.dtype, device=position.device)
    return (1.0 - (position - bins).abs()).clamp(min=0.0)


def two_hot_value(logits: Tensor) -> Tensor:
    """Logits [..., num_bins] over an even grid on [0, 1] -> the mean of their distribution [...]."""
    logits = _wide(logits)
    grid = torch.linspace(0.0, 1.0, logits.shape[-1], dtype=logits.dtype, device=logits.device)
    return (logits.softmax(dim=-1) * grid).sum(dim=-1)


def value_two_hot_loss(logits: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
    """Cross-entropy of a distribution over the grid against two-hot targets: the weighted sum, a scalar.

    logits [..., num_bins]; targets and weights [...] or [..., N]. The gradient on a state's
    logits is the sum of weight * (softmax - two_hot(target)) over its targets. Raises ValueError for shapes that do
    not match.
    """
    num_bins = logits.shape[-1]
    shape = _state_shape(logits.shape[:-1], targets, weights)
    keep = weights != 0
    logits = _wide(logits).reshape(*shape, num_bins).expand(*targets.shape, num_bins)
    logits = logits.masked_fill(~keep.unsqueeze(-1), 0.0)
    targets, weights = _kept(targets, keep, logits.dtype), _kept(weights, keep, logits.dtype)
    cross_entropy = -(two_hot(targets, num_bins) * logits.log_softmax(dim=-1)).sum(dim=-1)
    return (cross_entropy * weights).sum()


def value_mse_loss(
    values: Tensor,
    targets: Tensor,
    weights: Tensor,
    old_values: Tensor | None = None,
    clip: float | None = None,
) -> Tensor:
    """Half the squared error, the weighted sum, a scalar; with PPO's value clipping, as BRACE uses it (clip 0.5).

    With both `old_values` (of the values' shape, no gradient) and `clip`: 1/2 max((v - G)^2, (v_clipped - G)^2), where
    v_clipped is v held within `clip` of its old value, so a value that has moved further than that towards its target
    gets no gradient. With either missing: 1/2 (v - G)^2.
    values [...]; targets and weights [...] or [..., N]. Raises UserError for a clip of 0 or below,
    ValueError for shapes that do not match.
    """
    if clip is not None and not clip > 0:
        raise UserError(f"critic.value_clip: found {clip}, must be above 0, or null for no clip")
    if old_values is not None and old_values.shape != values.shape:
        raise ValueError(f"value loss: values {list(values.shape)} but old values {list(old_values.shape)}")
    keep = weights != 0
    shape = _state_shape(values.shape, targets, weights)
    values, targets, weights = _readable(values, targets, weights)
    squared = (values - targets).square()
    if clip is not None and old_values is not None:
        old = _kept(old_values.reshape(shape).expand(keep.shape), keep, values.dtype)
        clipped = old + (values - old).clamp(-clip, clip)
        squared = torch.maximum(squared, (clipped - targets).square())
    return 0.5 * (squared * weights).sum()


def _readable(predictions: Tensor, targets: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """All three in the targets' shape and one dtype, 0 where the weight is 0; gradients reach the predictions only."""
    shape = _state_shape(predictions.shape, targets, weights)
    keep = weights != 0
    predictions = _wide(predictions).reshape(shape).expand(targets.shape).masked_fill(~keep, 0.0)
    return predictions, _kept(targets, keep, predictions.dtype), _kept(weights, keep, predictions.dtype)


def _state_shape(predictions: torch.Size, targets: Tensor, weights: Tensor) -> tuple[int, ...]:
    """The predictions' shape that expands to the targets'. Broadcasting alone would take [T] against [T, T]."""
    one, many = tuple(targets.shape), (*targets.shape[:-1], 1)
    accepted = {one: one, targets.shape[:-1]: many, many: many} if one else {one: one}
    if weights.shape != targets.shape or tuple(predictions) not in accepted:
        raise ValueError(
            f"value loss: predictions {list(predictions)}, targets {list(targets.shape)}, weights "
            f"{list(weights.shape)}; accepted: [...] each, or predictions [...] with targets and weights [..., N]"
        )
    return accepted[tuple(predictions)]


def _kept(tensor: Tensor, keep: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.detach().to(dtype).masked_fill(~keep, 0.0)


def _wide(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype == torch.float64 else tensor.float()
