"""What a field of the configuration may hold by itself: choices, ranges of numbers, and text for names."""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

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
STAGE_CHOICES = {"sft.head": ("lm", "value"), "sft.labels": ("correct", "value")}  # of the supervised stage


@dataclass(frozen=True, slots=True)
class Range:
    """Numbers from `low` to `high`; `above`: without `low` itself. `accepted` replaces what a message says of them."""

    low: float
    high: float
    above: bool = False
    accepted: str = ""

    def problem(self, value: float) -> str | None:
        """What to say of a value outside; None of one inside."""
        if self.low < value <= self.high or (value == self.low and not self.above):
            return None
        if self.accepted:
            return self.accepted
        lowest = f"{'>' if self.above else '>='} {self.low:.12g}"
        if not abs(value) < math.inf:  # which takes integers of any length
            return f"must be finite and {lowest}"
        return f"must be <= {self.high:.12g}" if value > self.high else f"must be {lowest}"


INT32 = 2**31 - 1
LARGE = 1e12  # its square is still a finite float32
_COUNT, _COUNT_OR_NONE = Range(0, INT32, above=True), Range(0, INT32)
_SMALL_COUNT = Range(0, 65_536, above=True)  # arrays and process groups are made by it
_FRACTION = Range(0, 1, accepted="accepted: 0 to 1")
_POSITIVE, _NOT_NEGATIVE, _ANY = Range(0, LARGE, above=True), Range(0, LARGE), Range(-LARGE, LARGE)
_RATE = Range(0, 1000)
# Every number, by section and name: a section has the same ranges wherever it stands (critic.parallel, sft.optimizer).
# A field that is null has none.
RANGES: dict[str, Range] = {
    name: accepted
    for accepted, names in (
        (_COUNT, (
            "run.num_steps", "run.keep_checkpoints", "actor.num_minibatches", "actor.max_tokens_per_microbatch",
            "score_centering.top_k", "critic.batch_size", "critic.updates_per_step", "critic.lr_patience",
            "critic.max_tokens_per_microbatch", "critic.max_value_tokens", "critic.nstep_max",
            "critic.snapshot_every", "critic.max_context_len", "estimator.rfpo_num_labelled", "sampling.num_fresh",
            "sampling.num_prefixes", "sampling.group_size", "sampling.response_budget", "sampling.chunk_len",
            "sampling.cut_grid", "sampling.top_k", "sampling.dynamic_max_rounds", "replay.stale_every",
            "replay.capacity", "replay.target_capacity", "replay.min_valid_for_target", "readiness.window",
            "engine.max_model_len", "engine.publish_every", "evaluation.num_problems",
            "evaluation.samples_per_problem", "sft.num_steps", "sft.batch_size", "sft.max_tokens_per_microbatch",
            "sft.log_every",
        )),
        (_COUNT_OR_NONE, (
            "run.seed",  # Python, numpy, torch and vLLM are all seeded with it; numpy takes no more than 32 bits
            "run.checkpoint_every", "run.keep_every", "fp8.keep_first_layers", "fp8.keep_last_layers",
            "estimator.brace_horizon", "sampling.overlong_cache", "replay.max_target_age", "evaluation.every",
            "sft.warmup_steps",
        )),
        (_SMALL_COUNT, (
            "parallel.tensor", "parallel.pipeline", "parallel.expert", "parallel.expert_tensor", "parallel.context",
            "parallel.virtual_pipeline", "fp8.amax_history_len", "engine.tensor_parallel", "engine.max_num_seqs",
            "engine.block_size",
        )),
        (_FRACTION, (
            "actor.clip_low", "importance.low", "estimator.gamma", "estimator.gae_lambda", "estimator.brace_lambda",
            "estimator.rfpo_label_fraction", "sampling.audit_fraction", "sampling.cut_max_fraction",
            "replay.correct_min_reward", "readiness.demote_threshold", "readiness.reference_min_reward",
            "sft.min_lr_fraction",
        )),
        (Range(0, 1, above=True), ("sampling.top_p", "engine.gpu_memory_utilization")),
        (Range(0, _RATE.high, above=True), ("optimizer.lr",)),
        (_RATE, ("critic.lr_min",)),
        (_POSITIVE, (
            "actor.asympo_floor", "actor.dual_clip", "critic.value_clip", "critic.lr_ratio_limit",
            "estimator.brace_rho_max", "estimator.brace_c_max",
        )),
        (_NOT_NEGATIVE, (
            "optimizer.weight_decay", "optimizer.grad_clip", "actor.clip_high", "actor.entropy_bonus",
            "reference_kl.coefficient", "entropy.step",
        )),
        (_ANY, (
            "entropy.target", "entropy.k_init", "entropy.k_min", "entropy.k_max", "readiness.global_threshold",
            "readiness.local_threshold", "data.reward_range",
        )),
        (Range(1, LARGE), ("importance.high", "estimator.brace_product_max")),
        (Range(0, math.nextafter(1, 0), accepted="accepted: 0 to below 1"), ("optimizer.betas",)),
        (Range(1e-37, 1), ("optimizer.eps",)),  # 0 divides by nothing where no gradient has been, in float32
        (Range(0.01, 100), ("sampling.temperature",)),  # vLLM raises a lower one to 0.01, and the trainer would not
        (Range(0, 100), ("evaluation.temperature",)),
        (Range(0, 64), ("fp8.margin",)),
        (Range(0.01, 525_600), ("run.timeout_minutes",)),  # a year: libraries count nanoseconds in 64 bits
        (Range(0.001, 86_400), ("data.grading_timeout",)),
        (Range(0, 1024, above=True), ("data.grading_workers",)),
        (Range(0.001, 65_536), ("engine.kv_cache_gib",)),
    )
    for name in names
}  # fmt: skip
_LONGEST_NAME, _LONGEST_PATH = 255, 3000  # bytes: file systems' limit, and Linux's less what a run adds below


def get(config: Any, key: str) -> Any:
    """`get(config, "actor.optimizer.lr")`."""
    for part in key.split("."):
        config = getattr(config, part)
    return config


def value_problems(config: Any) -> list[str]:
    """Every field of a schema's instance that holds what it never may, as messages."""
    problems = []
    for key, value, size in _leaves(config):
        if isinstance(value, dict):
            problems += _open_problems(key, value)
        elif problem := _problem(key, value, size):
            problems.append(f"{key}: found {shown(value)}, {problem}")
    return problems


def shown(value: Any) -> str:
    """For a message."""
    return cut(repr(value))


def cut(text: str) -> str:
    return text if len(text) <= 200 else f"{text[:200]}..."


def _leaves(config: Any, prefix: str = "") -> Iterator[tuple[str, Any, int]]:
    """Key, value, and of a tuple how many members it has by default; else 0."""
    for field in fields(config):
        key, value = f"{prefix}{field.name}", getattr(config, field.name)
        if is_dataclass(value):
            yield from _leaves(value, f"{key}.")
        else:
            yield key, value, len(field.default) if isinstance(field.default, tuple) else 0


def _problem(key: str, value: Any, size: int) -> str | None:
    accepted = RANGES.get(".".join(key.split(".")[-2:]))
    if choices := CHOICES.get(key) or STAGE_CHOICES.get(key):
        return None if value in choices else f"accepted: {', '.join(choices)}"
    if size:
        outside = filter(None, map(accepted.problem, value))
        return next(outside, None) if len(value) == size else f"accepted: {size} numbers"
    if value is None or isinstance(value, bool):
        return None
    return _name_problem(value) if isinstance(value, str) else accepted.problem(value)


def _open_problems(key: str, value: Any) -> Iterator[str]:
    """What keeps a value of an open section from being written to a file and read back, at any depth of it."""
    if isinstance(value, dict):
        for name, member in value.items():
            if not (isinstance(name, str) and name.isprintable() and name):
                yield f"{key}: found the name {shown(name)}, accepted: printable text"
            yield from _open_problems(f"{key}.{name}", member)
    elif isinstance(value, (list, tuple)):
        for member in value:
            yield from _open_problems(key, member)
    elif problem := _plain_problem(value):
        yield f"{key}: found {shown(value)}, {problem}"


def _plain_problem(value: Any) -> str | None:
    if isinstance(value, str):
        return _text_problem(value, "\n\t")
    if isinstance(value, int):
        return None if abs(value) < 2**63 else "accepted: whole numbers of 64 bits"
    if isinstance(value, float):
        return None if math.isfinite(value) else "must be finite"
    return None if value is None else "accepted: text, numbers, lists and mappings"


def _name_problem(text: str) -> str | None:
    """Of a field that names a file, a folder or the run, which names files."""
    if not text.strip():
        return "must not be empty"
    if problem := _text_problem(text):
        return problem
    if max(len(part.encode()) for part in text.split("/")) > _LONGEST_NAME or len(text.encode()) > _LONGEST_PATH:
        return f"accepted: at most {_LONGEST_NAME} bytes a name and {_LONGEST_PATH} in all"
    return None


def _text_problem(text: str, beside: str = "") -> str | None:
    strange = any(unicodedata.category(letter) in ("Cc", "Cs") and letter not in beside for letter in text)
    return "accepted: text without control characters and halves of surrogate pairs" if strange else None
