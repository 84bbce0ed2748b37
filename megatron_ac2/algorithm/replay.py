"""The two first-in-first-out buffers of a run (docs/ALGORITHM.md §2). The same on every rank."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np

from megatron_ac2.algorithm.ragged import join_ids, split_ids
from megatron_ac2.types import CriticTarget, Trajectory


class ReplayBuffer:
    """The newest `capacity` complete trajectories, right or wrong. Only fresh rollouts go in."""

    def __init__(self, capacity: int):
        self._items: deque[Trajectory] = deque(maxlen=capacity)

    def __len__(self) -> int:
        return len(self._items)

    def add(self, trajectories: Sequence[Trajectory]) -> None:
        self._items.extend(trajectories)

    def by_problem(self) -> dict[str, list[Trajectory]]:
        """Trajectories of each distinct problem, oldest first; problems in the order of their oldest one."""
        grouped: dict[str, list[Trajectory]] = {}
        for trajectory in self._items:
            grouped.setdefault(trajectory.problem_id, []).append(trajectory)
        return grouped

    def state_dict(self) -> dict[str, Any]:
        return {
            "problem_ids": [item.problem_id for item in self._items],
            "responses": join_ids([item.response_ids for item in self._items]),
            "rewards": np.array([item.reward for item in self._items], dtype=np.float64),
            "versions": np.array([item.version for item in self._items], dtype=np.int64),
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """The capacity stays the config's; a smaller one keeps the newest."""
        columns = (saved["problem_ids"], split_ids(saved["responses"]), saved["rewards"], saved["versions"])
        self._items.clear()
        self.add([Trajectory(pid, ids, float(reward), int(version)) for pid, ids, reward, version in zip(*columns)])


class TargetBuffer:
    """The newest `capacity` pairs (prefix, target value) that the critic is trained on."""

    def __init__(self, capacity: int):
        self._items: deque[CriticTarget] = deque(maxlen=capacity)

    def __len__(self) -> int:
        return len(self._items)

    def add(self, targets: Sequence[CriticTarget]) -> None:
        self._items.extend(targets)

    def sample(self, num_targets: int, rng: np.random.Generator) -> list[CriticTarget]:
        """Up to `num_targets` distinct entries, uniformly; all of them, in random order, if there are fewer."""
        count = min(num_targets, len(self._items))
        items = list(self._items)
        return [items[pick] for pick in rng.choice(len(items), count, replace=False)] if count else []

    def state_dict(self) -> dict[str, Any]:
        return {
            "problem_ids": [item.problem_id for item in self._items],
            "responses": join_ids([item.response_ids for item in self._items]),
            "values": np.array([item.value for item in self._items], dtype=np.float64),
            "tags": [item.tag for item in self._items],
            "versions": np.array([item.version for item in self._items], dtype=np.int64),
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """The capacity stays the config's; a smaller one keeps the newest."""
        responses = split_ids(saved["responses"])
        columns = (saved["problem_ids"], responses, saved["values"], saved["tags"], saved["versions"])
        self._items.clear()
        self.add([CriticTarget(pid, ids, float(value), tag, int(v)) for pid, ids, value, tag, v in zip(*columns)])
