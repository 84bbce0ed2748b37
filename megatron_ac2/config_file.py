"""YAML and dotted overrides -> a checked configuration; every error at once, before any rank starts."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from megatron_ac2.config import Config
from megatron_ac2.types import UserError

_CHOICES = {
    "model.dtype": ("bfloat16", "float32"),
    "critic.kind": ("generative", "value_head"),
    "sampling.routing": ("ac2", "prefix_grpo", "grpo"),
}
_POSITIVE = (
    "run.num_steps", "run.keep_checkpoints", "run.timeout_minutes", "parallel.tensor", "parallel.pipeline",
    "actor.num_minibatches", "actor.max_tokens_per_microbatch", "actor.optimizer.lr", "critic.optimizer.lr",
    "critic.batch_size", "critic.updates_per_step", "critic.max_tokens_per_microbatch", "critic.max_value_tokens",
    "sampling.num_fresh", "sampling.num_prefixes", "sampling.group_size", "sampling.response_budget",
    "sampling.chunk_len", "sampling.cut_grid", "sampling.temperature", "replay.capacity", "replay.target_capacity",
    "replay.min_valid_for_target", "readiness.window", "engine.tensor_parallel", "engine.max_num_seqs",
    "engine.block_size", "evaluation.samples_per_problem", "data.grading_timeout",
)  # fmt: skip
_FRACTIONS = ("sampling.audit_fraction", "sampling.cut_max_fraction", "engine.gpu_memory_utilization",
              "readiness.reference_min_reward")  # fmt: skip


def load_config(path: str | Path, overrides: list[str] | None = None, schema: type = Config) -> Any:
    """YAML file + dotted overrides ("actor.optimizer.lr=1e-6") -> a checked `schema` instance.

    Raises `UserError` listing every unknown key, bad type, missing value and impossible combination found.
    """
    path = Path(path)
    if not path.is_file():
        raise UserError(f"config file not found: {path}")
    try:
        tree = OmegaConf.load(path)
        changes = OmegaConf.from_dotlist(list(overrides or []))
    except Exception as error:  # yaml's own message names the line
        raise UserError(f"{path}: cannot be read as YAML: {error}") from error
    if not isinstance(tree, DictConfig):
        raise UserError(f"{path}: expected a mapping of sections at the top, found {type(tree).__name__}")
    base = OmegaConf.structured(schema)
    problems = _merge_errors(base, tree, str(path)) + _merge_errors(base, changes, "command line")
    if problems:
        raise UserError(problems)
    merged = OmegaConf.merge(base, tree, changes)
    missing = sorted(OmegaConf.missing_keys(merged))
    if missing:
        raise UserError([f"{key}: required, but {path} does not set it" for key in missing])
    config = OmegaConf.to_object(merged)
    problems = check_config(config) if isinstance(config, Config) else []
    if problems:
        raise UserError(problems)
    return config


def _merge_errors(base: DictConfig, changes: DictConfig, origin: str) -> list[str]:
    """Merge leaf by leaf, so that one bad key does not hide the next."""
    problems = []
    for key, value in _leaves(changes):
        try:
            OmegaConf.merge(base, _nest(key, value))
        except OmegaConfBaseException as error:
            reason = str(error).splitlines()[0]
            problems.append(f"{key}: {reason} (found {value!r}, in {origin})")
    return problems


def _leaves(tree: DictConfig, prefix: str = "") -> list[tuple[str, Any]]:
    raw = OmegaConf.to_container(tree, resolve=False)
    found: list[tuple[str, Any]] = []

    def walk(node: Any, key: str) -> None:
        if isinstance(node, dict) and node:
            for name, child in node.items():
                walk(child, f"{key}.{name}" if key else str(name))
        elif key:
            found.append((key, node))

    walk(raw, prefix)
    return found


def _nest(key: str, value: Any) -> DictConfig:
    for part in reversed(key.split(".")):
        value = {part: value}
    return OmegaConf.create(value)


def get(config: Any, key: str) -> Any:
    """`get(config, "actor.optimizer.lr")`."""
    for part in key.split("."):
        config = getattr(config, part)
    return config


def check_config(config: Config) -> list[str]:
    """Every impossible value or combination that needs no file and no model to see, as messages."""
    problems = [
        f"{key}: found {get(config, key)!r}, accepted: {', '.join(choices)}"
        for key, choices in _CHOICES.items()
        if get(config, key) not in choices
    ]
    problems += [f"{key}: found {get(config, key)!r}, must be > 0" for key in _POSITIVE if not get(config, key) > 0]
    problems += [
        f"{key}: found {get(config, key)!r}, accepted: 0 to 1" for key in _FRACTIONS if not 0 <= get(config, key) <= 1
    ]
    sampling, critic, actor = config.sampling, config.critic, config.actor
    if sampling.chunk_len > sampling.response_budget:
        problems.append(
            f"sampling.chunk_len: found {sampling.chunk_len}, longer than sampling.response_budget "
            f"({sampling.response_budget}); a chunk must fit into the budget"
        )
    if sampling.num_prefixes % actor.num_minibatches:
        problems.append(
            f"sampling.num_prefixes: found {sampling.num_prefixes}, must be a multiple of "
            f"actor.num_minibatches ({actor.num_minibatches})"
        )
    if config.replay.min_valid_for_target > sampling.group_size:
        problems.append(
            f"replay.min_valid_for_target: found {config.replay.min_valid_for_target}, more than "
            f"sampling.group_size ({sampling.group_size}): no critic target could ever be made"
        )
    k_low, k_high = (config.entropy.k_min, config.entropy.k_max) if config.entropy.enabled else (0.0, 0.0)
    if actor.clip_high + k_low < 0:
        problems.append(f"actor.clip_high: found {actor.clip_high}, below 0 with entropy.k_min ({k_low}) added")
    if actor.dual_clip <= 1 + actor.clip_high + k_high:
        problems.append(
            f"actor.dual_clip: found {actor.dual_clip}, must be above 1 + actor.clip_high + entropy.k_max "
            f"({1 + actor.clip_high + k_high:g})"
        )
    if config.parallel.sequence and config.parallel.tensor == 1:
        problems.append("parallel.sequence: found true with parallel.tensor 1; sequence parallel needs tensor > 1")
    if critic.lr_min > critic.optimizer.lr:
        problems.append(f"critic.lr_min: found {critic.lr_min}, above critic.optimizer.lr ({critic.optimizer.lr})")
    if critic.kind == "generative" and critic.path is not None:
        problems.append("critic.path: found a path with critic.kind generative, which is the actor itself; set null")
    if config.engine.block_size % 32:
        problems.append(f"engine.block_size: found {config.engine.block_size}, must be a multiple of 32")
    return problems


def warnings_for(config: Config) -> list[str]:
    """What is legal but deserves a word at start."""
    found = []
    if config.sampling.routing == "ac2" and config.sampling.audit_fraction == 0:
        found.append(
            "sampling.audit_fraction is 0: no unbiased measure of the critic's error on ready problems is left"
        )
    if config.run.checkpoint_every == 0:
        found.append("run.checkpoint_every is 0: a crash loses the whole run")
    return found


def to_yaml(config: Any) -> str:
    """The resolved configuration, as it is printed and saved with the run."""
    return OmegaConf.to_yaml(OmegaConf.structured(config), resolve=True)


def to_dict(config: Any) -> dict[str, Any]:
    return dataclasses.asdict(config)
