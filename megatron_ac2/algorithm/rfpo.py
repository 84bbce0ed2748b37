"""RFPO (arXiv 2609.37119): a frozen critic, calibrated once on labelled rollouts, stands in for the verifier.

The reward of a finished response is 1[v - b(length) > tau], v the critic's value of it. b takes out what the value owes
to the length alone; tau makes the critic say "correct" as often as the verifier does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron_ac2.types import UserError

NUM_DECILES = 10


@dataclass(frozen=True, slots=True)
class Calibration:
    """What `fit_calibration` found; equal on every rank, and part of a checkpoint."""

    edges: np.ndarray  # float64[9], response lengths in tokens between the deciles; an edge belongs to the lower one
    offsets: np.ndarray  # float64[10], b of each length decile
    threshold: float  # tau, on v - b

    def state_dict(self) -> dict[str, Any]:
        return {
            "edges": self.edges.copy(),
            "offsets": self.offsets.copy(),
            "threshold": float(self.threshold),
        }

    @classmethod
    def from_state(cls, saved: Mapping[str, Any]) -> Calibration:
        """Raises ValueError for arrays that are no calibration."""
        edges, offsets = (np.array(saved[name], dtype=np.float64) for name in ("edges", "offsets"))
        if edges.shape != (NUM_DECILES - 1,) or offsets.shape != (NUM_DECILES,):
            raise ValueError(f"RFPO calibration: found edges {edges.shape} and offsets {offsets.shape}")
        return cls(edges, offsets, float(saved["threshold"]))


def fit_calibration(values: np.ndarray, lengths: np.ndarray, labels: np.ndarray) -> Calibration:
    """Labelled rollouts -> offsets by length decile and the threshold.

    values f[N], the frozen critic's; lengths int[N], response tokens; labels bool[N], the verifier's.
    Raises UserError if the labels are all of one class, ValueError for arrays that do not match or a value that is
    not finite.
    """
    values, lengths = np.asarray(values, dtype=np.float64), np.asarray(lengths, dtype=np.float64)
    labels = np.asarray(labels, dtype=bool)
    if not values.shape == lengths.shape == labels.shape or values.ndim != 1 or not np.isfinite(values).all():
        raise ValueError(
            f"fit_calibration: one finite value, length and label a rollout are needed; found shapes "
            f"{values.shape}, {lengths.shape}, {labels.shape}"
        )
    num_correct = int(labels.sum())
    if num_correct in (0, len(labels)):
        raise UserError(
            f"estimator.rfpo_num_labelled: found {num_correct} correct among {len(labels)} labelled rollouts, needs "
            "correct and incorrect ones: raise it, or label problems that the model solves sometimes"
        )
    edges = np.quantile(lengths, np.arange(1, NUM_DECILES) / NUM_DECILES)
    deciles = np.searchsorted(edges, lengths)
    offsets = _offsets(values, deciles, labels)
    return Calibration(edges, offsets, _threshold(values - offsets[deciles], num_correct))


def calibrated_rewards(calibration: Calibration, values: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """values f[N] of finished responses, lengths int[N] in tokens -> float32[N], 0 or 1. A NaN value earns 0."""
    deciles = np.searchsorted(calibration.edges, np.asarray(lengths, dtype=np.float64))
    scores = np.asarray(values, dtype=np.float64) - calibration.offsets[deciles]
    return (scores > calibration.threshold).astype(np.float32)


def rfpo_advantages(reward: float, values: np.ndarray) -> np.ndarray:
    """values f[T], V(s_t) at the state that token t was sampled in -> reward - V(s_t), float32[T].

    That is `token_returns.gae` with gamma = lambda = 1.
    """
    return (float(reward) - np.asarray(values, dtype=np.float64)).astype(np.float32)


def _offsets(values: np.ndarray, deciles: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Decile mean minus class mean, within each class, averaged over the classes that the decile holds; else 0.

    Within a class, so that a decile is not marked down for holding more wrong answers.
    """
    totals, counts = np.zeros(NUM_DECILES), np.zeros(NUM_DECILES)
    for in_class in (labels, ~labels):
        sizes = np.bincount(deciles[in_class], minlength=NUM_DECILES)
        sums = np.bincount(deciles[in_class], weights=values[in_class], minlength=NUM_DECILES)
        totals += np.where(sizes > 0, sums / np.maximum(sizes, 1) - values[in_class].mean(), 0.0)
        counts += sizes > 0
    return totals / np.maximum(counts, 1)


def _threshold(scores: np.ndarray, num_above: int) -> float:
    """The threshold with `num_above` of the scores strictly above it, or, where equal scores forbid that, the closest.

    Between two scores it lies in the middle; 0 < num_above < N. Two counts equally close: the smaller.
    """
    ordered, sizes = np.unique(scores, return_counts=True)
    above = np.append(len(scores), len(scores) - np.cumsum(sizes))  # above[i]: scores from ordered[i] on
    place = len(above) - 1 - int(np.argmin(np.abs(above[::-1] - num_above)))
    if place == 0:
        return float(np.nextafter(ordered[0], -np.inf))
    below = ordered[place - 1]
    if place == len(ordered):
        return float(below)
    middle = (below + ordered[place]) / 2
    return float(middle if middle < ordered[place] else below)  # neighbouring floats have no middle
