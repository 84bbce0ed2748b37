"""The feedback rules of a run: entropy-driven upper clip, critic learning rate (docs/ALGORITHM.md §3)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from megatron_ac2.types import UserError


class EntropyClip:
    """k <- clip(k + step * sign(target - H), k_min, k_max), once a step; the actor's upper clip is clip_high + k.

    Low entropy raises the bound (rare tokens may grow more), high entropy lowers it. Entropies in nats.
    """

    def __init__(self, k_init: float, step: float, target: float, k_min: float, k_max: float):
        if not k_min <= k_init <= k_max:
            raise UserError(f"entropy.k_init: found {k_init}, accepted: entropy.k_min ({k_min}) to k_max ({k_max})")
        self.k = k_init
        self.step = step
        self.target = target
        self.k_min = k_min
        self.k_max = k_max

    def update(self, mean_entropy: float) -> float:
        """Mean token entropy over empty-prefix responses -> the new k. NaN (no such token this step) leaves k alone."""
        sign = (mean_entropy < self.target) - (mean_entropy > self.target)
        self.k = min(max(self.k + self.step * sign, self.k_min), self.k_max)
        return self.k

    def state_dict(self) -> dict[str, Any]:
        return {"k": self.k}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """The bounds stay the config's."""
        self.k = min(max(float(saved["k"]), self.k_min), self.k_max)


class CriticLearningRate:
    """Halves the critic's learning rate, down to `lr_min`, when its updates outgrow the actor's.

    `patience` consecutive steps with ||d critic|| / sum ||d actor|| > `ratio_limit` halve it; the count starts anew.
    """

    def __init__(self, lr: float, lr_min: float, ratio_limit: float, patience: int):
        self.lr = lr
        self.lr_min = lr_min
        self.ratio_limit = ratio_limit
        self.patience = patience
        self.streak = 0

    def observe(self, critic_norm: float, actor_norms: Sequence[float]) -> float:
        """L2 norms of this step's parameter changes -> the learning rate of the next critic update.

        Where the actor did not move (or a norm is not finite) there is no ratio: neither streak nor rate changes.
        """
        actor_norm = float(sum(actor_norms))
        if not (math.isfinite(critic_norm) and math.isfinite(actor_norm) and actor_norm > 0):
            return self.lr
        self.streak = self.streak + 1 if critic_norm / actor_norm > self.ratio_limit else 0
        if self.streak >= self.patience:
            self._halve()
        return self.lr

    def observe_non_finite(self) -> float:
        """The critic's loss was not finite (its step was skipped): halve at once."""
        self._halve()
        return self.lr

    def _halve(self) -> None:
        self.lr = max(self.lr / 2, self.lr_min)
        self.streak = 0

    def state_dict(self) -> dict[str, Any]:
        return {"lr": self.lr, "streak": self.streak}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        self.lr = float(saved["lr"])
        self.streak = int(saved["streak"])
