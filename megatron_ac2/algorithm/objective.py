"""The actor's objective: a policy loss, its importance weights, score centering, entropy bonus and reference KL."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron_ac2.algorithm import policy_losses
from megatron_ac2.algorithm.importance import importance_weights
from megatron_ac2.algorithm.objective_parts import RATIO_LOSSES, PolicyObjective, objective_problems
from megatron_ac2.algorithm.ratios import sequence_sums, to_tokens, wide
from megatron_ac2.algorithm.score_centering import score_centering
from megatron_ac2.types import UserError

AGGREGATIONS = ("token_mean", "sequence_mean", "budget_mean")


@dataclass(frozen=True, slots=True)
class PolicyTokens:
    """All that a policy loss reads, [..., T] each; sequences whole. Nothing is read where mask is 0.

    Log-probs of the sampled tokens, in nats at the sampling temperature: `current` is differentiable, `proximal` is of
    the weights before this step's updates, `behavior` is the engine's.
    """

    current: Tensor
    proximal: Tensor
    behavior: Tensor
    advantages: Tensor
    mask: Tensor  # 0: no token of the loss; else its weight in the aggregate
    sequence_ids: Tensor  # int64, in [0, num_sequences), any value where mask is 0
    num_sequences: int
    entropy: Tensor | None = None  # nats, differentiable
    reference: Tensor | None = None  # a frozen model's log-probs
    top_current: Tensor | None = None  # [..., T, k], differentiable
    top_behavior: Tensor | None = None  # [..., T, k], -inf outside of what the sampler could draw


def policy_loss(
    tokens: PolicyTokens, objective: PolicyObjective, num_units: int | float | Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """sum_t mask_t (w_t loss_t + A_t C_t - entropy_bonus H_t + kl_coefficient KL_t) / max(num_units, 1), a scalar.

    num_units: what the job's tokens are averaged over (see `aggregation_weights`). The importance ratio is
    proximal / behavior for the ratio losses (decoupled PPO, AReaL, arXiv 2505.24298) and current / behavior, detached,
    for `policy_gradient`. Gradients reach current, entropy and top_current only.
    Second, detached SUMS over unmasked tokens, each counted once whatever the mask holds: "tokens", their number, and
    the signals of the parts that the objective has.
    Raises UserError for an objective that makes no sense, ValueError where it needs a tensor that `tokens` lacks.
    """
    problems = objective_problems(objective)
    if problems:
        raise UserError(problems)
    _require(tokens, objective)
    tokens = _cleaned(tokens)
    keep = tokens.mask != 0
    terms, signals = _surrogate(tokens, objective)
    if objective.importance_kind != "none":
        weights, found = _importance(tokens, objective)
        terms, signals = weights * terms, signals | found
    if objective.score_centering:
        centre, found = score_centering(tokens.top_current, tokens.top_behavior, *objective.importance)
        terms, signals = terms + tokens.advantages * centre, signals | found
    if objective.entropy_bonus:
        terms = terms - objective.entropy_bonus * tokens.entropy
    if objective.kl_coefficient:
        kl = policy_losses.reference_kl(tokens.current, tokens.reference, objective.kl_estimator)
        terms, signals = terms + objective.kl_coefficient * kl, signals | {"reference_kl": kl.detach()}
    sums = {name: signal.masked_fill(~keep, 0).sum(dtype=terms.dtype) for name, signal in signals.items()}
    sums["tokens"] = keep.sum(dtype=terms.dtype)
    return (terms * tokens.mask).sum() / _at_least_one(num_units), sums


def aggregation_weights(
    aggregation: str, sequence_ids: Tensor, mask: Tensor, num_sequences: int, budget: int | None = None
) -> tuple[Tensor, Tensor]:
    """Token weights [..., T], the mask times the aggregation's own, and the number of units that these tokens make.

    token_mean: 1 a token, tokens are counted (DAPO, arXiv 2503.14476). sequence_mean: 1 / length, sequences are counted
    (GRPO, GSPO). budget_mean: 1 / budget, sequences are counted (Dr.GRPO, arXiv 2503.20783). The loss is the weighted
    sum over the whole job, divided by the sum of the counts. Lengths and counts are of unmasked tokens and of sequences
    that have one; sequences whole. The count is int64[].
    Raises UserError for an unknown aggregation, and for budget_mean without a positive budget.
    """
    if aggregation not in AGGREGATIONS:
        raise UserError(f"actor.aggregation: found {aggregation!r}, accepted: {', '.join(AGGREGATIONS)}")
    if aggregation == "budget_mean" and not (budget and budget > 0):
        raise UserError(f"sampling.response_budget: found {budget}, must be > 0 for actor.aggregation budget_mean")
    keep = mask != 0
    weights = wide(mask).masked_fill(~keep, 0.0)
    if aggregation == "token_mean":
        return weights, keep.sum()
    lengths = sequence_sums(keep.double(), sequence_ids, num_sequences, mask)
    if aggregation == "budget_mean":
        return weights / budget, (lengths > 0).sum()
    return weights * to_tokens(1.0 / lengths.clamp(min=1), sequence_ids, mask, weights.dtype), (lengths > 0).sum()


def _surrogate(tokens: PolicyTokens, objective: PolicyObjective) -> tuple[Tensor, policy_losses.Signals]:
    current, advantages = tokens.current, tokens.advantages
    sequences = (tokens.sequence_ids, tokens.num_sequences, tokens.mask)
    clip = {"clip_low": objective.clip_low, "clip_high": objective.clip_high}
    if objective.loss == "policy_gradient":
        return policy_losses.policy_gradient(current, advantages)
    if objective.loss == "asympo":
        return policy_losses.asympo(current, advantages, *sequences, floor=objective.asympo_floor)
    anchor = tokens.proximal if objective.anchor == "proximal" else tokens.behavior
    if objective.loss == "cispo":
        return policy_losses.cispo(current, anchor, advantages, **clip)
    if objective.loss == "gspo":
        return policy_losses.gspo(current, anchor, advantages, *sequences, **clip)
    return policy_losses.ppo(current, anchor, advantages, **clip, dual_clip=objective.dual_clip)


def _importance(tokens: PolicyTokens, objective: PolicyObjective) -> tuple[Tensor, dict[str, Tensor]]:
    kind, low, high = objective.importance
    trainer = tokens.proximal if objective.loss in RATIO_LOSSES else tokens.current
    log_rho = trainer - tokens.behavior
    return importance_weights(kind, log_rho, tokens.mask, tokens.sequence_ids, tokens.num_sequences, low, high)


def _require(tokens: PolicyTokens, objective: PolicyObjective) -> None:
    needed = {
        "entropy": bool(objective.entropy_bonus),
        "reference": bool(objective.kl_coefficient),
        "top_current": objective.score_centering,
        "top_behavior": objective.score_centering,
    }
    missing = [name for name, need in needed.items() if need and getattr(tokens, name) is None]
    if missing:
        raise ValueError(f"the objective needs these of PolicyTokens, which are None: {', '.join(missing)}")


def _cleaned(tokens: PolicyTokens) -> PolicyTokens:
    """Masked positions filled, so that nothing downstream meets what they hold; half precision widened."""
    out = tokens.mask == 0

    def filled(name: str, value: float = 0.0) -> Tensor | None:
        tensor = getattr(tokens, name)
        if tensor is None:
            return None
        return wide(tensor).masked_fill(out.unsqueeze(-1) if name.startswith("top") else out, value)

    plain = ("current", "proximal", "behavior", "advantages", "mask", "entropy", "reference", "top_current")
    return replace(tokens, **{name: filled(name) for name in plain}, top_behavior=filled("top_behavior", -torch.inf))


def _at_least_one(num_units: int | float | Tensor) -> float | Tensor:
    """No unit anywhere must give 0 / 1, not 0 / 0."""
    return num_units.clamp(min=1) if isinstance(num_units, Tensor) else max(num_units, 1)
