"""Rewards before they become values, and which groups are worth training on (docs/ALGORITHM.md §5 and §6)."""

from __future__ import annotations

import math

import numpy as np

from megatron_ac2.types import UserError


def overlong_penalty(response_len: int, budget: int, cache: int) -> float:
    """DAPO's soft overlong punishment (arXiv 2503.14476, eq. 13), in [-1, 0], to be added to the reward.

    0 up to budget - cache tokens, then falling linearly to -1 at the budget, and -1 beyond it. Lengths in tokens.
    Raises UserError for a cache outside [0, budget].
    """
    if not 0 <= cache <= budget:
        raise UserError(f"sampling.overlong_cache: found {cache}, accepted: 0 to sampling.response_budget ({budget})")
    if response_len > budget:
        return -1.0
    excess = response_len - (budget - cache)
    return -excess / cache if excess > 0 else 0.0


def map_reward(reward: float, low: float, high: float) -> float:
    """The affine map of [low, high] onto [0, 1]. Raises UserError for a reward outside it, and for an empty range."""
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        raise UserError(
            f"data.reward_range: found [{low}, {high}], accepted: two finite numbers, the smaller one first"
        )
    if not low <= reward <= high:
        raise UserError(f"data.reward_range: found reward {reward}, accepted: {low} to {high}")
    return (reward - low) / (high - low)


def informative(values: np.ndarray, valid: np.ndarray) -> bool:
    """DAPO's dynamic sampling (arXiv 2503.14476, §3.2) keeps a group whose valid values are not all equal.

    values float[G], valid bool[G]. A group with fewer than two valid values teaches nothing.
    """
    known = np.asarray(values)[np.asarray(valid, dtype=bool)]
    return bool(len(known)) and bool((known != known[0]).any())
