"""Endpoint values -> chunk advantages, critic targets and critic errors (docs/ALGORITHM.md §3, items 6 and 7)."""

from __future__ import annotations

import math

import numpy as np

from megatron_ac2.types import TargetTag

GRID_STEPS = 10  # the critic's values are 0, 1/10, ..., 1
# Endpoint values are float32, so the mean of 0.1 and 0.2 may come out above 0.15; it is still a tie. In grid steps.
_TIE_TOLERANCE = 1e-5


def group_advantages(values: np.ndarray, valid: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Value minus the group's mean, not divided by the standard deviation.

    values float[B, G], valid bool[B, G] -> advantages float32[B, G], weights float32[B, G]. An invalid value counts as
    the mean of the group's valid ones (0 if none), hence has advantage 0, and weight 0 in the actor's loss. What an
    invalid entry holds is never read, NaN included.
    """
    valid = np.asarray(valid, dtype=bool)
    known = np.where(valid, values, 0.0).astype(np.float64)
    num_valid = valid.sum(axis=-1, keepdims=True)
    valid_mean = known.sum(axis=-1, keepdims=True) / np.maximum(num_valid, 1)
    filled = np.where(valid, known, valid_mean)
    advantages = np.where(valid, filled - filled.mean(axis=-1, keepdims=True), 0.0)
    return advantages.astype(np.float32), valid.astype(np.float32)


def round_to_grid(value: float) -> float:
    """Nearest of {0, .1, ..., 1}, ties down; a value outside [0, 1] goes to the nearer end."""
    steps = math.ceil(float(value) * GRID_STEPS - 0.5 - _TIE_TOLERANCE)
    return min(max(steps, 0), GRID_STEPS) / GRID_STEPS


def critic_target(
    values: np.ndarray, valid: np.ndarray, from_critic: np.ndarray, min_valid: int
) -> tuple[float, TargetTag] | None:
    """A group's target on the grid and where it comes from, or None with fewer than `min_valid` valid values.

    values float[G], valid bool[G] (False also where the grader failed), from_critic bool[G]. The tag speaks of the
    valid values only: all rewards "terminal", all the critic's own "bootstrapped", else "mixed".
    """
    valid = np.asarray(valid, dtype=bool)
    num_valid = int(valid.sum())
    if num_valid < max(min_valid, 1):
        return None
    mean = float(np.asarray(values, dtype=np.float64)[valid].mean())
    num_bootstrapped = int(np.asarray(from_critic, dtype=bool)[valid].sum())
    tag: TargetTag = "mixed"
    if num_bootstrapped in (0, num_valid):
        tag = "bootstrapped" if num_bootstrapped else "terminal"
    return round_to_grid(mean), tag


def probe_error(probe: float, probe_valid: bool, target: float) -> float:
    """|V(s) - z|; an invalid probe is as wrong as can be, 1."""
    return abs(float(probe) - float(target)) if probe_valid else 1.0
