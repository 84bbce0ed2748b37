"""On which problems the critic is trusted (docs/ALGORITHM.md §3, item 8)."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron_ac2.types import TargetTag


@dataclass(frozen=True, slots=True)
class ErrorRecord:
    """The critic's error on one replayed prefix that got a target this step."""

    problem_id: str
    error: float  # |V(s) - z| in [0, 1]; counted as 1 when the probe is invalid, whatever stands here
    probe_value: float
    probe_valid: bool
    tag: TargetTag


def error_of(record: ErrorRecord) -> float:
    """The record's error as it counts: an invalid probe is 1."""
    return record.error if record.probe_valid else 1.0


def errors_by_tag(records: Sequence[ErrorRecord]) -> dict[str, float]:
    """Mean error by the target's tag (only tags that occur): an error against own bootstraps flatters the critic."""
    errors: dict[str, list[float]] = defaultdict(list)
    for record in records:
        errors[record.tag].append(error_of(record))
    return {tag: float(np.mean(found)) for tag, found in sorted(errors.items())}


class Readiness:
    """A problem becomes ready when all hold, and stays ready:

    (a) mean error over every prefix of the last `window` complete steps < `global_threshold`, this step included, once
        that many steps were measured (a step without any record measures nothing and is not counted);
    (b) its own error this step < `local_threshold` (the mean, if it filled several slots);
    (c) a valid nonzero value was predicted for it, now or before;
    (d) the reference bank held a solution of it *before* this step's additions.
    An invalid probe counts as error 1 and cannot make its problem ready. Equal on every rank; no randomness.
    """

    def __init__(self, global_threshold: float, local_threshold: float, window: int):
        self.global_threshold = global_threshold
        self.local_threshold = local_threshold
        self.window = window
        self._steps: deque[np.ndarray] = deque(maxlen=window)  # float64[records of the step] each
        self._ready: set[str] = set()
        self._nonzero: set[str] = set()
        self._last_error: dict[str, float] = {}

    @property
    def ready(self) -> frozenset[str]:
        return frozenset(self._ready)

    @property
    def global_error(self) -> float:
        """Mean over every prefix of the steps in the window; NaN before the first record."""
        return float(np.concatenate(self._steps).mean()) if self._steps else float("nan")

    @property
    def gate_open(self) -> bool:
        """Condition (a)."""
        return len(self._steps) == self.window and self.global_error < self.global_threshold

    def last_error(self, problem_id: str) -> float | None:
        """The problem's error at the last step that measured it."""
        return self._last_error.get(problem_id)

    def update(self, records: Sequence[ErrorRecord], referenced_before: Set[str]) -> list[str]:
        """End one step. Returns the problems that became ready, in the order of the records."""
        if not records:
            return []
        self._steps.append(np.array([error_of(record) for record in records], dtype=np.float64))
        by_problem: dict[str, list[ErrorRecord]] = defaultdict(list)
        for record in records:
            by_problem[record.problem_id].append(record)
        gate_open = self.gate_open
        newly_ready = []
        for problem_id, own in by_problem.items():
            self._observe(problem_id, own)
            if gate_open and problem_id not in self._ready and self._qualifies(problem_id, own, referenced_before):
                newly_ready.append(problem_id)
        self._ready.update(newly_ready)
        return newly_ready

    def _observe(self, problem_id: str, own: Sequence[ErrorRecord]) -> None:
        self._last_error[problem_id] = float(np.mean([error_of(record) for record in own]))
        if any(record.probe_valid and record.probe_value > 0 for record in own):
            self._nonzero.add(problem_id)

    def _qualifies(self, problem_id: str, own: Sequence[ErrorRecord], referenced_before: Set[str]) -> bool:
        return (
            any(record.probe_valid for record in own)
            and self._last_error[problem_id] < self.local_threshold
            and problem_id in self._nonzero
            and problem_id in referenced_before
        )

    def state_dict(self) -> dict[str, Any]:
        return {
            "ready": sorted(self._ready),
            "nonzero": sorted(self._nonzero),
            "last_error": {problem_id: self._last_error[problem_id] for problem_id in sorted(self._last_error)},
            "steps": [errors.copy() for errors in self._steps],
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Thresholds and window stay the config's; a shorter window keeps the newest steps."""
        self._ready = set(saved["ready"])
        self._nonzero = set(saved["nonzero"])
        self._last_error = {problem_id: float(error) for problem_id, error in saved["last_error"].items()}
        self._steps = deque((np.asarray(errors, dtype=np.float64) for errors in saved["steps"]), maxlen=self.window)
