"""How good a critic is: its values f[N] against what they should have been, outcomes f[N].

Entries with `valid` False are left out, and what they hold is never read. Of nothing, every number here is nan.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

# Float32 values on a bin's lower edge may lie just below it; they belong to the bin. In bins.
_EDGE_TOLERANCE = 1e-5


class ReliabilityBin(NamedTuple):
    """The values in [low, high), the last bin's in [low, 1]. A calibrated critic has mean_value == mean_outcome."""

    low: float
    high: float
    count: int
    mean_value: float  # nan where the bin is empty
    mean_outcome: float


def explained_variance(values: np.ndarray, outcomes: np.ndarray, valid: np.ndarray | None = None) -> float:
    """1 - Var(outcome - value) / Var(outcome): 1 is perfect, 0 no better than a constant; blind to a constant bias.

    nan if the outcomes do not vary.
    """
    values, outcomes = _valid_pairs(values, outcomes, valid)
    variance = float(outcomes.var()) if outcomes.size else 0.0
    return float(1 - (outcomes - values).var() / variance) if variance > 0 else math.nan


def mean_absolute_error(values: np.ndarray, outcomes: np.ndarray, valid: np.ndarray | None = None) -> float:
    """mean |value - outcome|."""
    values, outcomes = _valid_pairs(values, outcomes, valid)
    return _mean(np.abs(values - outcomes))


def bias(values: np.ndarray, outcomes: np.ndarray, valid: np.ndarray | None = None) -> float:
    """mean (value - outcome): above 0, the critic is too hopeful."""
    values, outcomes = _valid_pairs(values, outcomes, valid)
    return _mean(values - outcomes)


def reliability(
    values: np.ndarray, outcomes: np.ndarray, num_bins: int = 5, valid: np.ndarray | None = None
) -> list[ReliabilityBin]:
    """All `num_bins` equal bins of [0, 1] by value, in order. Values outside count in the nearer end's bin."""
    if num_bins < 1:
        raise ValueError(f"reliability: found num_bins {num_bins}, needs at least 1")
    values, outcomes = _valid_pairs(values, outcomes, valid)
    places = np.clip(np.floor(values * num_bins + _EDGE_TOLERANCE), 0, num_bins - 1)
    members = [places == number for number in range(num_bins)]
    return [
        ReliabilityBin(
            low=number / num_bins,
            high=(number + 1) / num_bins,
            count=int(inside.sum()),
            mean_value=_mean(values[inside]),
            mean_outcome=_mean(outcomes[inside]),
        )
        for number, inside in enumerate(members)
    ]


def expected_calibration_error(
    values: np.ndarray, outcomes: np.ndarray, num_bins: int = 5, valid: np.ndarray | None = None
) -> float:
    """Mean over the entries of their bin's |mean value - mean outcome| (arXiv 1706.04599, eq. 3)."""
    filled = [found for found in reliability(values, outcomes, num_bins, valid) if found.count]
    total = sum(found.count for found in filled)
    gaps = sum(found.count * abs(found.mean_value - found.mean_outcome) for found in filled)
    return gaps / total if total else math.nan


def _valid_pairs(values: np.ndarray, outcomes: np.ndarray, valid: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
    values, outcomes = np.asarray(values, dtype=np.float64).ravel(), np.asarray(outcomes, dtype=np.float64).ravel()
    keep = np.ones(values.shape, dtype=bool) if valid is None else np.asarray(valid, dtype=bool).ravel()
    if not values.shape == outcomes.shape == keep.shape:
        raise ValueError(f"critic quality: {len(values)} values, {len(outcomes)} outcomes, {len(keep)} flags")
    return values[keep], outcomes[keep]


def _mean(array: np.ndarray) -> float:
    return float(array.mean()) if array.size else math.nan
