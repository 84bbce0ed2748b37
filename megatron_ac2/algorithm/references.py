"""At most one known-correct solution a problem, for the critic's eyes only (docs/ALGORITHM.md §3, item 9)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from megatron_ac2.algorithm.ragged import join_ids, split_ids


class ReferenceBank:
    """Added once, never replaced. Equal on every rank."""

    def __init__(self) -> None:
        self._references: dict[str, np.ndarray] = {}

    def __len__(self) -> int:
        return len(self._references)

    def get(self, problem_id: str) -> np.ndarray | None:
        """int32[R], or None while no solution of the problem is known."""
        return self._references.get(problem_id)

    def problem_ids(self) -> frozenset[str]:
        """A snapshot: later additions do not show in it (readiness needs the bank as it was before them)."""
        return frozenset(self._references)

    def add(self, candidates: Mapping[str, Sequence[np.ndarray]], rng: np.random.Generator) -> list[str]:
        """One of each new problem's candidates, uniformly at random. Returns the problems added.

        Goes through the problems sorted by id, so the draws do not depend on the mapping's order.
        """
        added = []
        for problem_id in sorted(candidates):
            solutions = candidates[problem_id]
            if problem_id in self._references or not solutions:
                continue
            self._references[problem_id] = np.array(solutions[rng.integers(len(solutions))], dtype=np.int32)
            added.append(problem_id)
        return added

    def state_dict(self) -> dict[str, Any]:
        return {"problem_ids": list(self._references), "references": join_ids(list(self._references.values()))}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        self._references = dict(zip(saved["problem_ids"], split_ids(saved["references"])))
