"""The actor's objective as a function of log-probs: what its loss op (training/token_head.py) evaluates."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.distributed as dist

from megatron_ac2.algorithm.objective import PolicyTokens, policy_loss
from megatron_ac2.algorithm.objective_parts import PolicyObjective
from megatron_ac2.config_training import ActorConfig
from megatron_ac2.data.packing import num_sequences, sequence_ids
from megatron_ac2.kernels.chunk_loss import Objective
from megatron_ac2.kernels.vocab_logprobs import TokenLogprobs, restricted_logprobs
from megatron_ac2.training.context_parallel import count_once, whole_tokens
from megatron_ac2.training.mismatch import largest
from megatron_ac2.types import PackedBatch


def objective_of(config: ActorConfig) -> PolicyObjective:
    """The actor's loss as plain values, without what changes from step to step."""
    return PolicyObjective(
        loss=config.loss,
        anchor=config.anchor,
        clip_low=config.clip_low,
        clip_high=config.clip_high,
        dual_clip=config.dual_clip,
        asympo_floor=config.asympo_floor,
        entropy_bonus=config.entropy_bonus,
        importance_kind=config.importance.kind,
        importance_low=config.importance.low,
        importance_high=config.importance.high,
        score_centering=config.score_centering.enabled,
        kl_coefficient=config.reference_kl.coefficient,
        kl_estimator=config.reference_kl.estimator,
    )


def evaluation(
    batch: PackedBatch, rows: torch.Tensor, objective: PolicyObjective, is_filtered: bool, cp_group: dist.ProcessGroup
) -> Objective:
    """The objective over `rows` int64[R] of a packed batch, weighed by fields["loss_weights"], or over a slice of them.

    It gives the SUM of the losses (the division by the job's units is Megatron's, training/step.py) and metric sums.
    Where it looks at whole sequences of a batch that was cut, context ranks evaluate it together, over all of their
    rows. `is_filtered`: the sampler had a top-p or top-k filter, so that log-probs are those of what it left.
    """
    fields = {name: field[0, rows] for name, field in batch.fields.items()}
    ids, count = sequence_ids(batch)[0, rows], num_sequences(batch)
    is_shared = batch.context > 1 and not objective.is_token_local

    def evaluate(scores: TokenLogprobs, part: slice) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        def column(name: str) -> torch.Tensor | None:
            return fields[name][part] if name in fields else None

        if is_filtered:
            scores = filtered(scores, fields["top_behavior"][part])
        tokens = PolicyTokens(
            current=scores.labels,
            proximal=fields["proximal_logprobs"][part],
            behavior=fields["behavior_logprobs"][part],
            advantages=fields["advantages"][part],
            mask=fields["loss_weights"][part],
            sequence_ids=ids[part],
            num_sequences=count,
            entropy=scores.entropy,
            reference=column("reference_logprobs"),
            top_current=scores.top,
            top_behavior=column("top_behavior"),
        )
        error = (scores.labels.detach() - tokens.proximal).abs()
        if is_shared:
            loss, metrics = policy_loss(whole_tokens(tokens, rows, batch, cp_group), objective, 1.0)
            loss, metrics = count_once(loss, metrics, cp_group)
        else:
            loss, metrics = policy_loss(tokens, objective, 1.0)
        return loss, metrics | {"log_ratio_error_max": largest(error)}

    return evaluate


def filtered(scores: TokenLogprobs, top_behavior: torch.Tensor) -> TokenLogprobs:
    """Renormalised on what the sampler's filter left: the recorded tokens whose log-prob [R, k] is not -inf."""
    labels, top = restricted_logprobs(scores.labels, scores.top, top_behavior.isfinite())
    return replace(scores, labels=labels, top=top)
