"""Endpoint values -> chunk advantages, critic targets and critic errors (docs/ALGORITHM.md §3, items 6 and 7)."""

from __future__ import annotations

import math

import numpy as np

from megatron_ac2.types import TargetTag, UserError

GRID_STEPS = 10  # the critic's values are 0, 1/10, ..., 1
# Endpoint values are float32, so the mean of 0.1 and 0.2 may come out above 0.15; it is still a tie. In grid steps.
_TIE_TOLERANCE = 1e-5
_STD_GUARD = 1e-6  # a group of equal values has no spread to divide by
BASELINES = ("mean", "leave_one_out")


def group_advantages(
    values: np.ndarray,
    valid: np.ndarray,
    baselines: np.ndarray | None = None,
    present: np.ndarray | None = None,
    kind: str = "mean",
    divide_by_std: bool = False,
) -> tuple[np.ndarray, np.ndarray]:
    """Value minus baseline: values float[B, G], valid bool[B, G] -> advantages float32[B, G], weights float32[B, G].

    Baseline of a group: the mean of its valid values (`kind` "mean"), or for each member the mean of the others
    ("leave_one_out": RLOO, arXiv 2402.14740; a lone valid value gets 0). `baselines` float[B] replaces it where it is
    a number (V(s), the singleton estimator). `divide_by_std`: by the sample standard deviation of the valid values
    (GRPO, arXiv 2402.03300), save where `baselines` has a number. An invalid value has advantage 0 and weight 0, and so
    has a member that is not `present` bool[B, G] (the padding of a smaller group). What these hold is never read, NaN
    included. Raises UserError for an unknown kind.
    """
    if kind not in BASELINES:
        raise UserError(f"estimator.baseline: found {kind!r}, accepted: {', '.join(BASELINES)}")
    valid = np.asarray(valid, dtype=bool)
    counted = valid if present is None else valid & np.asarray(present, dtype=bool)
    known = np.where(counted, values, 0.0).astype(np.float64)
    advantages = _within_group(known, counted, kind, divide_by_std)
    if baselines is not None:
        column = np.asarray(baselines, dtype=np.float64)[:, None]
        advantages = np.where(np.isfinite(column), known - column, advantages)
    return np.where(counted, advantages, 0.0).astype(np.float32), counted.astype(np.float32)


def _within_group(known: np.ndarray, counted: np.ndarray, kind: str, divide_by_std: bool) -> np.ndarray:
    """known float64[B, G], 0 where not counted. An invalid value counts as the mean of the valid ones: it drops out."""
    num = counted.sum(axis=-1, keepdims=True)
    centred = np.where(counted, known - known.sum(axis=-1, keepdims=True) / np.maximum(num, 1), 0.0)
    num_others = np.maximum(num - 1, 1)
    advantages = centred * (num / num_others) if kind == "leave_one_out" else centred
    if divide_by_std:
        std = np.sqrt(np.square(centred).sum(axis=-1, keepdims=True) / num_others)
        advantages = advantages / (std + _STD_GUARD)
    return advantages


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
