"""Detached weights for what the engine samples differently from the trainer: rho = trainer / engine.

token_is    rho_t (full importance sampling)
token_tis   rho_t truncated to [low, high] (Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy
            RL training")
token_mis   rho_t inside [low, high], else 0
sequence_*  the same with the product of rho over the sequence
geometric_rejection   1 where the geometric mean of rho over the sequence is inside [low, high], else 0

A rejected token weighs 0 but stays in the denominator of the loss: dropping it there would give the others its share.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from megatron_ac2.algorithm.ratios import bounded_exp, sequence_means, sequence_sums, to_tokens, wide
from megatron_ac2.types import UserError

# (low, high) of each kind that has bounds.
DEFAULT_BOUNDS: dict[str, tuple[float, float]] = {
    "token_tis": (0.0, 2.0),
    "token_mis": (0.5, 5.0),
    "sequence_tis": (0.0, 2.0),
    "sequence_mis": (0.5, 5.0),
    "geometric_rejection": (0.99, 1.01),
}
KINDS = ("none", "token_is", *DEFAULT_BOUNDS)
TOKEN_KINDS = ("none", "token_is", "token_tis", "token_mis")


def importance_problems(kind: str, low: float | None, high: float | None) -> list[str]:
    """What is wrong with `actor.importance`, as messages; empty if nothing."""
    if kind not in KINDS:
        return [f"actor.importance.kind: found {kind!r}, accepted: {', '.join(KINDS)}"]
    if kind not in DEFAULT_BOUNDS:
        given = {"low": low, "high": high}
        return [
            f"actor.importance.{name}: found {bound}, but kind {kind} has no bounds; accepted: null"
            for name, bound in given.items()
            if bound is not None
        ]
    low, high = _bounds(kind, low, high)
    problems = []
    if not 0 <= low <= 1:
        problems.append(f"actor.importance.low: found {low}, accepted: 0 to 1 (a ratio of 1 must pass)")
    if not high >= 1:
        problems.append(f"actor.importance.high: found {high}, must be >= 1 (a ratio of 1 must pass)")
    return problems


def importance_weights(
    kind: str,
    log_rho: Tensor,
    mask: Tensor,
    sequence_ids: Tensor,
    num_sequences: int,
    low: float | None = None,
    high: float | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Weights [..., T], detached, 0 where mask is 0; nothing is read there.

    log_rho [..., T]: log(trainer / engine) of the sampled tokens, in nats. sequence_ids int64[..., T] in
    [0, num_sequences); sequences whole. low, high: None takes DEFAULT_BOUNDS.
    Second, tensors [..., T] to be summed into metrics: importance_weight and, by kind, importance_rejected or
    importance_truncated (1 where the ratio was outside of its bounds).
    Raises UserError for an unknown kind and for bounds that ratio 1 does not pass.
    """
    _refuse(importance_problems(kind, low, high))
    keep = mask != 0
    log_rho = wide(log_rho).detach().masked_fill(~keep, 0.0)
    if kind.startswith("sequence"):
        sums = sequence_sums(log_rho, sequence_ids, num_sequences, mask)
        log_rho = to_tokens(sums, sequence_ids, mask, log_rho.dtype)
    elif kind == "geometric_rejection":
        means = sequence_means(log_rho, sequence_ids, num_sequences, mask)
        log_rho = to_tokens(means, sequence_ids, mask, log_rho.dtype)
    ratio = bounded_exp(log_rho)
    if kind not in DEFAULT_BOUNDS:
        weights = (ratio if kind == "token_is" else torch.ones_like(ratio)) * keep
        return weights, {"importance_weight": weights}
    low, high = _bounds(kind, low, high)
    outside = ((ratio < low) | (ratio > high)) & keep
    if kind.endswith("tis"):
        weights, name = ratio.clamp(low, high) * keep, "importance_truncated"
    else:
        inside = torch.ones_like(ratio) if kind == "geometric_rejection" else ratio
        weights, name = inside * (keep & ~outside), "importance_rejected"
    return weights, {"importance_weight": weights, name: outside}


def mass_function(kind: str, low: float | None = None, high: float | None = None) -> Callable[[Tensor, Tensor], Tensor]:
    """(p, q) -> q f(p / q), f being the token kind's weight as a function of the ratio; no division, q = 0 is fine.

    Raises UserError for a kind that is no function of one token's ratio.
    """
    problems = importance_problems(kind, low, high)
    if kind in KINDS and kind not in TOKEN_KINDS:
        problems.append(f"actor.importance.kind: found {kind}, accepted where f is by token: {', '.join(TOKEN_KINDS)}")
    _refuse(problems)
    if kind == "none":
        return lambda p, q: q
    if kind == "token_is":
        return lambda p, q: p
    low, high = _bounds(kind, low, high)
    below, above = (low, high) if kind == "token_tis" else (0.0, 0.0)

    def mass(p: Tensor, q: Tensor) -> Tensor:
        # An infinite bound times q = 0 is NaN, which is above and below nothing: as if unbounded.
        return torch.where(p > high * q, above * q, torch.where(p < low * q, below * q, p))

    return mass


def weight_function(kind: str, low: float | None = None, high: float | None = None) -> Callable[[Tensor], Tensor]:
    """f(r) of the token kinds: 1, r, truncated r, or r inside the bounds and 0 outside. Raises as `mass_function`."""
    mass = mass_function(kind, low, high)
    return lambda ratio: mass(ratio, torch.ones_like(ratio))


def _bounds(kind: str, low: float | None, high: float | None) -> tuple[float, float]:
    default_low, default_high = DEFAULT_BOUNDS[kind]
    return default_low if low is None else low, default_high if high is None else high


def _refuse(problems: list[str]) -> None:
    if problems:
        raise UserError(problems)
