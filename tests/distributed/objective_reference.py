"""Other objectives than AC2's default, all parts in use: the objective in float64 on transformers' log-probs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from transformers import Qwen3ForCausalLM

from megatron_ac2.algorithm.objective import PolicyTokens, aggregation_weights, policy_loss
from megatron_ac2.config import Config
from megatron_ac2.training.actor import objective_of
from megatron_ac2.types import TrainSequence
from tests.distributed import training_reference as case

NUM_RECORDED, FILTER = 6, 4
OBJECTIVES: dict[str, dict[str, Any]] = {
    # a ratio a sequence, the mean over sequences, an entropy bonus, the distance to a frozen model
    "gspo": {
        "loss": "gspo", "aggregation": "sequence_mean", "clip_low": 0.05, "entropy_bonus": 0.02,
        "reference_kl.coefficient": 0.1, "reference_kl.estimator": "k1", "anchor": "behavior",
    },
    # the sampler's recorded tokens, weighed against the engine
    "centred": {
        "loss": "policy_gradient", "importance.kind": "token_tis", "score_centering.enabled": True,
        "score_centering.top_k": NUM_RECORDED,
    },
    # log-probs renormalised on what the sampler's filter left
    "filtered": {"loss": "ppo", "aggregation": "budget_mean", "anchor": "behavior"},
    "asympo": {"loss": "asympo", "aggregation": "sequence_mean"},
    # a token's own ratio, weighed by one of its whole sequence that truncates some of them
    "sequence_weights": {"loss": "cispo", "importance.kind": "sequence_tis", "importance.high": 1.5},
}  # fmt: skip


def make_config(name: str) -> Config:
    config = case.make_config()
    for field, value in OBJECTIVES[name].items():
        *path, last = field.split(".")
        setattr(getattr(config.actor, path[0]) if path else config.actor, last, value)
    if name == "filtered":
        config.sampling.top_k = FILTER
    return config


def num_recorded(name: str) -> int:
    """Under a filter, 16 more than its k: tokens that may tie with the last."""
    return {"centred": NUM_RECORDED, "filtered": FILTER + 16}.get(name, 0)


@torch.no_grad()
def recorded(model: Qwen3ForCausalLM, sequences: list[TrainSequence], name: str) -> list[TrainSequence]:
    """The sampled token and random others, log-probs somewhat off the trainer's; the filter left the first four."""
    k, rng, found = num_recorded(name), np.random.default_rng(7), []
    for sequence in sequences if k else ():
        exact = case.token_logprobs(model, sequence.token_ids, sequence.num_context, case.TEMPERATURE).numpy()
        top_ids = np.zeros((len(exact), k), dtype=np.int32)
        for row, label in zip(top_ids, sequence.token_ids[sequence.num_context :], strict=True):
            others = rng.choice(np.delete(np.arange(exact.shape[1]), label), k - 1, replace=False)
            row[:] = [label, *others]
        logprobs = np.take_along_axis(exact, top_ids, 1) + rng.normal(0, 0.2, top_ids.shape)
        if name == "filtered":
            logprobs[:, FILTER:] = -np.inf
        found.append(replace(sequence, top_ids=top_ids, top_logprobs=logprobs.astype(np.float32)))
    return found or sequences


def tokens_of(model: Qwen3ForCausalLM, sequences: list[TrainSequence], name: str) -> PolicyTokens:
    """All tokens of all sequences in one row, on-policy, with the frozen model's log-probs equal to the policy's."""
    columns: dict[str, list[torch.Tensor]] = {field: [] for field in PolicyTokens.__dataclass_fields__}
    for index, s in enumerate(sequences):
        logp = case.token_logprobs(model, s.token_ids, s.num_context, case.TEMPERATURE)
        current, count = case.chosen(logp, s.token_ids[s.num_context :]), len(s.advantages)
        columns["entropy"].append(-(logp.exp() * logp).sum(-1))
        if s.top_ids is not None:
            top = logp.gather(-1, torch.from_numpy(s.top_ids.astype(np.int64)))
            behavior = torch.from_numpy(s.top_logprobs).double()
            if name == "filtered":
                log_mass = top[:, :FILTER].logsumexp(-1)
                current, top = current - log_mass, top - log_mass[:, None]
            columns["top_current"].append(top)
            columns["top_behavior"].append(behavior)
        columns["current"].append(current)
        columns["behavior"].append(torch.from_numpy(s.behavior_logprobs).double())
        columns["advantages"].append(torch.from_numpy(s.advantages).double())
        columns["mask"].append(torch.full((count,), s.weight, dtype=torch.float64))
        columns["sequence_ids"].append(torch.full((count,), index))
    joined = {field: torch.cat(parts) for field, parts in columns.items() if parts}
    current = joined["current"].detach()
    return PolicyTokens(**joined, proximal=current, reference=current, num_sequences=len(sequences))


def objective_reference(model: Qwen3ForCausalLM, sequences: list[TrainSequence], name: str) -> dict[str, Any]:
    """Loss, gradients, and metrics as means over tokens."""
    config, sequences = make_config(name), recorded(model, sequences, name)
    tokens = tokens_of(model, sequences, name)
    weights, units = aggregation_weights(
        config.actor.aggregation, tokens.sequence_ids, tokens.mask, tokens.num_sequences,
        budget=config.sampling.response_budget,
    )  # fmt: skip
    loss, sums = policy_loss(replace(tokens, mask=weights), objective_of(config.actor), units)
    metrics = {metric: (value / sums["tokens"]).item() for metric, value in sums.items() if metric != "tokens"}
    logprobs = tokens.current.detach().split([len(s.advantages) for s in sequences])
    return {
        "sequences": sequences,
        "metrics": metrics | {"loss": loss.item(), "num_tokens": sums["tokens"].item()},
        "logprobs": [part.float().numpy() for part in logprobs],
        "gradients": case.gradients_of(model, loss),
    }
