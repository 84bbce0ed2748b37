"""The two first-in-first-out buffers of a run (docs/ALGORITHM.md §2, §5). The same on every rank."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np

from megatron_ac2.algorithm.ragged import join_ids, split_ids
from megatron_ac2.types import CriticTarget, Trajectory, UserError

KINDS = ("rolling", "stale", "correct_only")


class ReplayBuffer:
    """Complete trajectories, at most `capacity`. Only fresh rollouts go in.

    rolling: the newest ones, right or wrong. stale: the last batch that was added, whole. correct_only: the newest ones
    of reward >= `correct_min_reward`. Raises UserError for an unknown kind.
    """

    def __init__(self, capacity: int, kind: str = "rolling", correct_min_reward: float = 6 / 7):
        if kind not in KINDS:
            raise UserError(f"replay.kind: found {kind!r}, accepted: {', '.join(KINDS)}")
        self.kind = kind
        self.correct_min_reward = correct_min_reward
        self._items: deque[Trajectory] = deque(maxlen=capacity)

    def __len__(self) -> int:
        return len(self._items)

    def add(self, trajectories: Sequence[Trajectory]) -> None:
        """An empty batch changes nothing. Raises UserError for a stale batch that is larger than the capacity."""
        if self.kind == "stale" and trajectories:
            if len(trajectories) > self._items.maxlen:
                raise UserError(
                    f"replay.capacity: found {self._items.maxlen}, but a stale buffer takes {len(trajectories)} "
                    "trajectories at once; accepted: at least as many"
                )
            self._items.clear()
        self._extend(trajectories)

    def _extend(self, trajectories: Sequence[Trajectory]) -> None:
        if self.kind == "correct_only":
            trajectories = [item for item in trajectories if item.reward >= self.correct_min_reward]
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
        """Capacity and kind stay the config's; a smaller capacity keeps the newest."""
        columns = (saved["problem_ids"], split_ids(saved["responses"]), saved["rewards"], saved["versions"])
        self._items.clear()
        self._extend([Trajectory(pid, ids, float(reward), int(version)) for pid, ids, reward, version in zip(*columns)])


class TargetBuffer:
    """The newest `capacity` pairs (prefix, target value) that the critic is trained on."""

    def __init__(self, capacity: int):
        self._items: deque[CriticTarget] = deque(maxlen=capacity)

    def __len__(self) -> int:
        return len(self._items)

    def add(self, targets: Sequence[CriticTarget]) -> None:
        self._items.extend(targets)

    def drop_older_than(self, version: int) -> int:
        """Drop the targets that weights before `version` gave; returns how many. For `replay.max_target_age`."""
        kept = [item for item in self._items if item.version >= version]
        num_dropped = len(self._items) - len(kept)
        self._items = deque(kept, maxlen=self._items.maxlen)
        return num_dropped

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
