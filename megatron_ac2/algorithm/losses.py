"""Per-token losses: sums over the tokens at hand, normalised by a count that the caller took over the whole job.

Nothing here reads what masked positions hold (NaN and inf included), so an all-masked batch gives exactly 0 and zero
gradients. Half-precision inputs are computed in float32, float64 stays float64.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_ac2.types import UserError

# exp overflows float32 at 88.7. Where |log ratio| > 20 the clips (and dual clip) have already removed the gradient, or
# the ratio is below 2.1e-9, so the bound changes nothing but keeps every intermediate finite.
_MAX_LOG_RATIO = 20.0


def clipped_policy_loss(
    current: Tensor,
    proximal: Tensor,
    advantages: Tensor,
    mask: Tensor,
    num_tokens: int | float | Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float,
) -> tuple[Tensor, dict[str, Tensor]]:
    """PPO's clipped loss with separate bounds (clip-higher, arXiv 2503.14476) and dual clip (arXiv 1912.09729).

    current, proximal: log-probs in nats at the sampling temperature; all tensors [..., T] of one shape. mask: 0 takes a
    token out, other values weigh it. num_tokens: generated tokens of the minibatch over all ranks; the loss is the
    masked sum divided by it. Gradients reach `current` only.
    Returns (scalar loss, detached SUMS over this call's tokens, to be divided by the token count by the caller).
    Raises UserError for bounds that make no trust region.
    """
    _check_bounds(clip_low, clip_high, dual_clip)
    keep = mask != 0
    weight = _wide(mask).masked_fill(~keep, 0.0)
    log_ratio = (_wide(current) - _wide(proximal).detach()).masked_fill(~keep, 0.0)
    advantages = _wide(advantages).detach().masked_fill(~keep, 0.0)
    ratio = log_ratio.clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO).exp()
    clipped = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    pessimistic = torch.maximum(-advantages * ratio, -advantages * clipped)
    bounded = torch.where(advantages < 0, torch.minimum(pessimistic, -advantages * dual_clip), pessimistic)
    loss_sum = (bounded * weight).sum()
    with torch.no_grad():
        log_ratio, ratio = log_ratio.detach(), ratio.detach()
        sums = {
            "loss": loss_sum.detach().clone(),
            "ratio": (ratio * weight).sum(),
            "clip_low": (weight * ((advantages < 0) & (ratio < 1.0 - clip_low))).sum(),
            "clip_high": (weight * ((advantages > 0) & (ratio > 1.0 + clip_high))).sum(),
            "dual_clip": (weight * ((advantages < 0) & (ratio > dual_clip))).sum(),
            "kl_k1": (-log_ratio * weight).sum(),  # estimates KL(proximal || current) on the proximal's samples
            "kl_k3": ((ratio - 1.0 - log_ratio) * weight).sum(),
            "tokens": weight.sum(),
        }
    return loss_sum / _at_least_one(num_tokens), sums


def value_bce_loss(logits: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
    """Binary cross-entropy of value = sigmoid(logit) against a soft target in [0, 1]: the weighted sum, a scalar.

    All tensors [...] of one shape; weight 0 takes an entry out. Its minimum is at value == target, and its gradient on
    a logit is weight * (value - target).
    """
    keep = weights != 0
    logits = _wide(logits).masked_fill(~keep, 0.0)
    targets = _wide(targets).detach().masked_fill(~keep, 0.0).to(logits.dtype)
    weights = _wide(weights).masked_fill(~keep, 0.0)
    return (F.binary_cross_entropy_with_logits(logits, targets, reduction="none") * weights).sum()


def _wide(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def _at_least_one(num_tokens: int | float | Tensor) -> float | Tensor:
    """No token anywhere must give 0 / 1, not 0 / 0."""
    return num_tokens.clamp(min=1) if isinstance(num_tokens, Tensor) else max(num_tokens, 1)


def _check_bounds(clip_low: float, clip_high: float, dual_clip: float) -> None:
    problems = []
    if not 0 <= clip_low < 1:
        problems.append(f"clip_low: found {clip_low}, accepted: from 0 to below 1")
    if not clip_high >= 0:
        problems.append(f"clip_high: found {clip_high}, must be >= 0")
    if not dual_clip > 1 + clip_high:
        problems.append(f"dual_clip: found {dual_clip}, must be above 1 + clip_high ({1 + clip_high})")
    if problems:
        raise UserError(problems)
