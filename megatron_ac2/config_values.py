"""What a field of the configuration may hold by itself: choices and ranges."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from megatron_ac2.config import Config

CHOICES = {
    "run.offload": ("none", "optimizer", "all"),
    "model.dtype": ("bfloat16", "float32"),
    "fp8.recipe": ("none", "delayed", "tensorwise", "blockwise", "mxfp8"),
    "fp8.format": ("auto", "e4m3", "hybrid"),
    "fp8.amax_algorithm": ("max", "most_recent"),
    "actor.loss_op": ("auto", "torch", "triton", "naive"),
    "actor.loss": ("policy_gradient", "ppo", "cispo", "gspo", "asympo"),
    "actor.anchor": ("proximal", "behavior"),
    "actor.aggregation": ("token_mean", "sequence_mean", "budget_mean"),
    "actor.importance.kind": ("none", "token_is", "token_tis", "token_mis", "sequence_tis", "sequence_mis",
                              "geometric_rejection"),
    "actor.reference_kl.estimator": ("k1", "k2", "k3"),
    "critic.kind": ("generative", "value_head"),
    "critic.reference_prompts": ("both", "reference_only"),
    "critic.value": ("greedy", "soft"),
    "critic.head": ("bce", "two_hot", "mse"),
    "critic.fit": ("group_mean", "nstep"),
    "sampling.routing": ("ac2", "prefix_grpo", "grpo"),
    "estimator.kind": ("group", "singleton", "gae", "brace", "rfpo"),
    "estimator.baseline": ("mean", "leave_one_out"),
    "replay.kind": ("rolling", "stale", "correct_only"),
    "readiness.kind": ("local", "global_only", "terminal_only"),
    "engine.rounding": ("none", "fp8_e4m3", "int8"),
}  # fmt: skip
# A field that is null has no range.
_POSITIVE = (
    "run.num_steps", "run.keep_checkpoints", "run.timeout_minutes", "parallel.tensor", "parallel.pipeline",
    "parallel.expert", "parallel.expert_tensor", "parallel.virtual_pipeline", "fp8.amax_history_len",
    "actor.num_minibatches", "actor.max_tokens_per_microbatch", "actor.optimizer.lr", "actor.asympo_floor",
    "actor.score_centering.top_k", "critic.optimizer.lr", "critic.batch_size", "critic.updates_per_step",
    "critic.max_tokens_per_microbatch", "critic.max_value_tokens", "critic.value_clip", "critic.nstep_max",
    "critic.snapshot_every", "critic.max_context_len", "estimator.brace_rho_max", "estimator.brace_c_max",
    "estimator.rfpo_num_labelled", "sampling.num_fresh", "sampling.num_prefixes", "parallel.context",
    "sampling.group_size", "sampling.response_budget", "sampling.chunk_len", "sampling.cut_grid",
    "sampling.temperature", "sampling.top_p", "sampling.top_k", "sampling.dynamic_max_rounds", "replay.stale_every",
    "replay.capacity", "replay.target_capacity", "replay.min_valid_for_target", "readiness.window",
    "engine.tensor_parallel", "engine.max_num_seqs", "engine.max_model_len", "engine.block_size",
    "engine.publish_every", "evaluation.num_problems", "evaluation.samples_per_problem", "data.grading_timeout",
)  # fmt: skip
_NOT_NEGATIVE = (
    "run.checkpoint_every", "run.keep_every", "fp8.keep_first_layers", "fp8.keep_last_layers", "fp8.margin",
    "actor.clip_high", "actor.entropy_bonus",
    "actor.reference_kl.coefficient", "estimator.brace_horizon", "sampling.overlong_cache", "replay.max_target_age",
    "evaluation.every", "evaluation.temperature",
)  # fmt: skip
_AT_LEAST_ONE = ("actor.importance.high", "estimator.brace_product_max")
_FRACTIONS = (
    "actor.clip_low", "actor.importance.low", "estimator.gamma", "estimator.gae_lambda", "estimator.brace_lambda",
    "estimator.rfpo_label_fraction", "sampling.audit_fraction", "sampling.cut_max_fraction", "sampling.top_p",
    "replay.correct_min_reward", "readiness.demote_threshold", "readiness.reference_min_reward",
    "engine.gpu_memory_utilization",
)  # fmt: skip
_RANGES: tuple[tuple[tuple[str, ...], Callable[[float], bool], str], ...] = (
    (_POSITIVE, lambda value: value > 0, "must be > 0"),
    (_NOT_NEGATIVE, lambda value: 0 <= value < math.inf, "must be >= 0 and finite"),
    (_AT_LEAST_ONE, lambda value: value >= 1, "must be >= 1"),
    (_FRACTIONS, lambda value: 0 <= value <= 1, "accepted: 0 to 1"),
)


def get(config: Any, key: str) -> Any:
    """`get(config, "actor.optimizer.lr")`."""
    for part in key.split("."):
        config = getattr(config, part)
    return config


def value_problems(config: Config) -> list[str]:
    """Every field that holds what it never may, as messages."""
    problems = [
        f"{key}: found {get(config, key)!r}, accepted: {', '.join(choices)}"
        for key, choices in CHOICES.items()
        if get(config, key) not in choices
    ]
    return problems + [
        f"{key}: found {value!r}, {accepted}"
        for keys, holds, accepted in _RANGES
        for key in keys
        if (value := get(config, key)) is not None and not holds(value)
    ]
