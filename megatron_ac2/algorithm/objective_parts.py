"""Which parts an objective is made of, and which of them go together."""

from __future__ import annotations

import math
from dataclasses import dataclass

from megatron_ac2.algorithm.importance import KINDS, TOKEN_KINDS, importance_problems
from megatron_ac2.algorithm.policy_losses import KL_ESTIMATORS

RATIO_LOSSES = ("ppo", "cispo", "gspo")
SEQUENCE_LOSSES = ("gspo", "asympo")
LOSSES = ("policy_gradient", *RATIO_LOSSES, "asympo")
ANCHORS = ("proximal", "behavior")


@dataclass(frozen=True, slots=True)
class PolicyObjective:
    """Which loss, with what around it: the section `actor` of the configuration, as plain values."""

    loss: str = "ppo"
    anchor: str = "proximal"
    clip_low: float = 0.2
    clip_high: float = 0.28
    dual_clip: float | None = 3.0
    asympo_floor: float = 0.01
    entropy_bonus: float = 0.0
    importance_kind: str = "none"
    importance_low: float | None = None
    importance_high: float | None = None
    score_centering: bool = False
    kl_coefficient: float = 0.0
    kl_estimator: str = "k3"

    @property
    def is_token_local(self) -> bool:
        """Whether a token's loss needs no other token of its sequence."""
        return self.loss not in SEQUENCE_LOSSES and self.importance_kind in TOKEN_KINDS

    @property
    def importance(self) -> tuple[str, float | None, float | None]:
        """Kind, low and high."""
        return self.importance_kind, self.importance_low, self.importance_high


def objective_problems(objective: PolicyObjective) -> list[str]:
    """Every value and combination that makes no sense, as messages that name the configuration's fields."""
    problems = [
        f"{name}: found {found!r}, accepted: {', '.join(accepted)}"
        for name, found, accepted in (
            ("actor.loss", objective.loss, LOSSES),
            ("actor.anchor", objective.anchor, ANCHORS),
            ("actor.reference_kl.estimator", objective.kl_estimator, KL_ESTIMATORS),
        )
        if found not in accepted
    ]
    for name, found in (
        ("actor.entropy_bonus", objective.entropy_bonus),
        ("actor.reference_kl.coefficient", objective.kl_coefficient),
    ):
        if not 0 <= found < math.inf:
            problems.append(f"{name}: found {found}, must be >= 0 and finite")
    if objective.loss == "asympo" and not 0 < objective.asympo_floor < math.inf:
        problems.append(f"actor.asympo_floor: found {objective.asympo_floor}, must be > 0 and finite")
    return problems + _clip_problems(objective) + importance_problems(*objective.importance) + _clashes(objective)


def _clip_problems(objective: PolicyObjective) -> list[str]:
    if objective.loss not in RATIO_LOSSES:
        return []
    low, high, dual = objective.clip_low, objective.clip_high, objective.dual_clip
    problems = []
    if objective.loss == "cispo":
        if not 0 <= low <= 1:
            problems.append(f"actor.clip_low: found {low}, accepted: from 0 to 1 (1: no lower bound)")
    elif not 0 <= low < 1:
        problems.append(f"actor.clip_low: found {low}, accepted: from 0 to below 1")
    if not high >= 0:
        problems.append(f"actor.clip_high: found {high}, must be >= 0")
    if objective.loss == "ppo" and dual is not None and not dual > 1 + high:
        problems.append(f"actor.dual_clip: found {dual}, must be null or above 1 + actor.clip_high ({1 + high:g})")
    return problems


def _clashes(objective: PolicyObjective) -> list[str]:
    loss, kind = objective.loss, objective.importance_kind
    problems = []
    if objective.anchor == "behavior" and loss in LOSSES and loss not in RATIO_LOSSES:
        problems.append(f"actor.anchor: found behavior, but actor.loss {loss} takes no ratio; accepted: proximal")
    if loss == "asympo" and kind != "none":
        problems.append(
            f"actor.importance.kind: found {kind}, but actor.loss asympo reads no engine log-probs; set none"
        )
    if loss in RATIO_LOSSES and objective.anchor == "behavior" and kind != "none":
        problems.append(
            f"actor.importance.kind: found {kind}, but with actor.anchor behavior the loss's own ratio is the "
            "one against the engine already; set none, or actor.anchor proximal"
        )
    if not objective.score_centering:
        return problems
    if loss == "asympo":
        problems.append("actor.score_centering.enabled: found true, but actor.loss asympo reads no engine log-probs")
    if loss in RATIO_LOSSES and objective.anchor == "behavior":
        problems.append(
            "actor.score_centering.enabled: found true, but with actor.anchor behavior the loss's own ratio already "
            "weighs for the engine; set actor.anchor proximal"
        )
    if kind in KINDS and kind not in TOKEN_KINDS:
        problems.append(
            f"actor.score_centering.enabled: found true with actor.importance.kind {kind}; accepted with: "
            f"{', '.join(TOKEN_KINDS)}"
        )
    return problems
