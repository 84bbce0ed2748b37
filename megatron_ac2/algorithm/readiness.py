"""On which problems the critic is trusted (docs/ALGORITHM.md §3, item 8, and §5)."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron_ac2.types import TargetTag, UserError

KINDS = ("local", "global_only", "terminal_only")


@dataclass(frozen=True, slots=True)
class ErrorRecord:
    """The critic's error on one replayed prefix that got a target this step."""

    problem_id: str
    error: float  # |V(s) - z| in [0, 1]; counted as 1 when the probe is invalid, whatever stands here
    probe_value: float
    probe_valid: bool
    tag: TargetTag
    audit: bool = False  # the group was an audit: rolled out in full although its problem is ready


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

    That is `kind` "local". "global_only" (an ablation of arXiv 2609.39247): once (a) held, every problem is ready for
    good, known or not. "terminal_only" (ours): as local, blind to records whose target is not made of rewards alone.
    `demote_threshold` (ours): an audit of a ready problem whose error reaches it makes the problem unready; it may
    become ready again at a later step. Raises UserError for an unknown kind, and for demotion under "global_only".
    """

    def __init__(
        self,
        global_threshold: float,
        local_threshold: float,
        window: int,
        kind: str = "local",
        demote_threshold: float | None = None,
    ):
        if kind not in KINDS:
            raise UserError(f"readiness.kind: found {kind!r}, accepted: {', '.join(KINDS)}")
        if kind == "global_only" and demote_threshold is not None:
            raise UserError(
                f"readiness.demote_threshold: found {demote_threshold}, accepted with readiness.kind global_only: null"
            )
        self.global_threshold = global_threshold
        self.local_threshold = local_threshold
        self.window = window
        self.kind = kind
        self.demote_threshold = demote_threshold
        self.demoted: list[str] = []  # by the last update, in the order of its records
        self._steps: deque[np.ndarray] = deque(maxlen=window)  # float64[records of the step] each
        self._ready: set[str] = set()
        self._nonzero: set[str] = set()
        self._last_error: dict[str, float] = {}
        self._opened = False  # global_only: the gate was open once

    @property
    def ready(self) -> frozenset[str]:
        """The ready ones of the problems measured so far; `ready_among` also knows of the others."""
        return frozenset(self._ready)

    @property
    def all_ready(self) -> bool:
        """Every problem is ready, measured or not: global_only, from the first open gate on."""
        return self.kind == "global_only" and self._opened

    def ready_among(self, problem_ids: Iterable[str]) -> frozenset[str]:
        asked = frozenset(problem_ids)
        return asked if self.all_ready else asked & self._ready

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
        """End one step. Returns the problems that became ready, in the order of the records (global_only: by id).

        `demoted` then lists those that this step made unready.
        """
        self.demoted = []
        if self.kind == "terminal_only":
            records = [record for record in records if record.tag == "terminal"]
        if not records:
            return []
        self._steps.append(np.array([error_of(record) for record in records], dtype=np.float64))
        by_problem: dict[str, list[ErrorRecord]] = defaultdict(list)
        for record in records:
            by_problem[record.problem_id].append(record)
        for problem_id, own in by_problem.items():
            self._observe(problem_id, own)
        newly_ready = self._newly_ready(by_problem, referenced_before)
        self.demoted = [problem_id for problem_id, own in by_problem.items() if self._fails_audit(problem_id, own)]
        self._ready.difference_update(self.demoted)
        self._ready.update(newly_ready)
        return newly_ready

    def _newly_ready(self, by_problem: Mapping[str, Sequence[ErrorRecord]], referenced_before: Set[str]) -> list[str]:
        gate_open = self.gate_open
        if self.kind == "global_only":
            self._opened = self._opened or gate_open
            return sorted(self._last_error.keys() - self._ready) if self._opened else []
        return [
            problem_id
            for problem_id, own in by_problem.items()
            if gate_open and problem_id not in self._ready and self._qualifies(problem_id, own, referenced_before)
        ]

    def _fails_audit(self, problem_id: str, own: Sequence[ErrorRecord]) -> bool:
        if self.demote_threshold is None or problem_id not in self._ready:
            return False
        return any(record.audit and error_of(record) >= self.demote_threshold for record in own)

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
            "opened": self._opened,
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Kind, thresholds and window stay the config's; a shorter window keeps the newest steps."""
        self._ready = set(saved["ready"])
        self._nonzero = set(saved["nonzero"])
        self._last_error = {problem_id: float(error) for problem_id, error in saved["last_error"].items()}
        self._steps = deque((np.asarray(errors, dtype=np.float64) for errors in saved["steps"]), maxlen=self.window)
        self._opened = bool(saved["opened"])
        self.demoted = []
