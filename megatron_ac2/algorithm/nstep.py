"""N-step targets of a critic that reads whole trajectories, at every chunk boundary (T-SAC, arXiv 2503.03660).

Adapted to a state-value critic in a deterministic setting without rewards on the way: looking n chunks ahead from a
boundary gives the frozen critic's value there, or the endpoint's value once the end is reached. No importance weights.
A boundary's loss is the mean over its existing n of 1/2 (V - G_n)^2: the losses are averaged, not the targets.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class MaskedTargets(NamedTuple):
    """Targets of k boundaries, or of one without the first axis; column n - 1 looks n chunks ahead."""

    targets: np.ndarray  # float32[k, num_max]; 0 where the mask is False
    mask: np.ndarray  # bool[k, num_max]; every boundary has at least one target


def nstep_targets(
    frozen_values: Sequence[np.ndarray], end_values: np.ndarray, num_max: int
) -> tuple[MaskedTargets, list[MaskedTargets]]:
    """One group of G trajectories from one prefix -> targets of the prefix [num_max], and of each trajectory's own
    boundaries [M_g, num_max].

    frozen_values[g] f[M_g]: the frozen critic at the chunk boundaries strictly between the prefix and the end of
    trajectory g, M_g may be 0. end_values f[G]: the reward, or the critic's value of a chunk that was cut; leave out
    trajectories whose end has no known value. num_max: how many chunks are looked ahead, at least 1.

    The prefix: the mean over siblings of their n-th boundary's value, or of their end value where they ended before
    that. A later boundary i: its own trajectory's value at i + n. Reaching the end gives one target, the end's value;
    looking further is masked (for the prefix: once every sibling has ended). No boundary is its own target. A group
    without trajectories has no target at all.
    Raises ValueError for num_max below 1, or end values that do not match the trajectories.
    """
    end_values = np.asarray(end_values, dtype=np.float64)
    if num_max < 1:
        raise ValueError(f"nstep_targets: found num_max {num_max}, needs at least 1")
    if end_values.shape != (len(frozen_values),):
        raise ValueError(f"nstep_targets: {len(frozen_values)} trajectories, end values of shape {end_values.shape}")
    paths = [np.append(np.asarray(row, dtype=np.float64), end) for row, end in zip(frozen_values, end_values)]
    return _of_prefix(paths, num_max), [_of_own_boundaries(path, num_max) for path in paths]


def _of_own_boundaries(path: np.ndarray, num_max: int) -> MaskedTargets:
    """path f64[M + 1]: the values at boundaries 1 ... M and at the end."""
    places = np.arange(1, len(path))[:, None] + np.arange(num_max)
    mask = places < len(path)
    targets = np.where(mask, path[np.minimum(places, len(path) - 1)], 0.0)
    return MaskedTargets(targets.astype(np.float32), mask)


def _of_prefix(paths: Sequence[np.ndarray], num_max: int) -> MaskedTargets:
    """A sibling that has ended stays at its end value: it still is one of the prefix's G outcomes."""
    mask = np.arange(num_max) < max((len(path) for path in paths), default=0)
    if not paths:
        return MaskedTargets(np.zeros(num_max, dtype=np.float32), mask)
    held = np.stack([path[np.minimum(np.arange(num_max), len(path) - 1)] for path in paths])
    return MaskedTargets(np.where(mask, held.mean(axis=0), 0.0).astype(np.float32), mask)
