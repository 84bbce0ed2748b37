"""The whole configuration: closed dataclasses, filled from YAML and dotted overrides, checked before any rank starts.

Defaults are the paper's 4B recipe (docs/ALGORITHM.md §3). Extra Megatron and vLLM options pass through the open
sections `megatron` and `engine.options`. `load_config` reports every error at once as one `UserError`.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from megatron_ac2.types import UserError


@dataclass
class RunConfig:
    name: str = "run"
    dir: str = "runs/${run.name}"
    seed: int = 0
    num_steps: int = 200
    checkpoint_every: int = 10  # 0: only at the end
    keep_checkpoints: int = 2
    resume: bool = True  # go on from the latest checkpoint in `dir`, if there is one
    timeout_minutes: float = 60.0  # a collective that waits longer ends the job
    tensorboard: bool = True
    wandb: bool = False


@dataclass
class ModelConfig:
    path: str = "???"  # Hugging Face folder: config.json, safetensors, tokenizer
    dtype: str = "bfloat16"  # bfloat16 | float32


@dataclass
class ParallelConfig:
    tensor: int = 1
    pipeline: int = 1
    sequence: bool = False  # sequence parallel; needs tensor > 1


@dataclass
class OptimizerConfig:
    lr: float = 2e-6
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    grad_clip: float = 1.0
    distributed: bool = True  # shard the optimizer state over data-parallel ranks


@dataclass
class ActorConfig:
    optimizer: OptimizerConfig = field(
        default_factory=lambda: OptimizerConfig(lr=2e-6, weight_decay=0.01, grad_clip=0.3)
    )
    num_minibatches: int = 2
    max_tokens_per_microbatch: int = 65_536
    clip_low: float = 0.2
    clip_high: float = 0.28
    dual_clip: float = 3.0


@dataclass
class EntropyConfig:
    """Entropy-driven upper clip: k <- clip(k + step sign(target - H), k_min, k_max); clip_high + k is used."""

    enabled: bool = True
    target: float = 0.28
    step: float = 0.02
    k_init: float = 0.06
    k_min: float = -0.08
    k_max: float = 0.08


@dataclass
class CriticConfig:
    kind: str = "generative"  # generative | value_head
    path: str | None = None  # value_head: a critic checkpoint in HF form; null starts from the actor's trunk
    use_references: bool = True
    optimizer: OptimizerConfig = field(
        default_factory=lambda: OptimizerConfig(lr=2 * math.sqrt(2) * 1e-6, grad_clip=0.2)
    )
    lr_min: float = 5 * math.sqrt(2) * 1e-7
    lr_ratio_limit: float = math.sqrt(2)  # halve after `lr_patience` steps with update-norm ratio above this
    lr_patience: int = 2
    batch_size: int = 768
    updates_per_step: int = 1  # the paper: 1
    max_tokens_per_microbatch: int = 65_536
    max_context_len: int | None = None  # longer contexts are skipped; null: the engine's / model's limit
    max_value_tokens: int = 4  # generative: decoded greedily after the answer stem


@dataclass
class SamplingConfig:
    routing: str = "ac2"  # ac2 | prefix_grpo | grpo
    num_fresh: int = 192
    num_prefixes: int = 192
    group_size: int = 16
    response_budget: int = 50_000
    chunk_len: int = 10_000
    cut_grid: int = 10_000
    cut_max_fraction: float = 0.9
    temperature: float = 0.8
    audit_fraction: float = 0.25


@dataclass
class ReplayConfig:
    capacity: int = 256
    target_capacity: int = 1920
    min_valid_for_target: int = 8


@dataclass
class ReadinessConfig:
    global_threshold: float = 0.20
    local_threshold: float = 0.18
    window: int = 5  # complete steps
    reference_min_reward: float = 6 / 7


@dataclass
class DataConfig:
    train: str = "???"  # JSONL or Parquet of problems
    validation: str | None = None
    shuffle: bool = True
    grading_timeout: float = 10.0  # seconds an answer


@dataclass
class EngineConfig:
    tensor_parallel: int = 1
    max_num_seqs: int = 256
    max_model_len: int | None = None  # null: prompt + response budget of the data, rounded up
    gpu_memory_utilization: float = 0.6
    block_size: int = 32
    kv_cache_gib: float = 1.0  # CPU only
    verify_weights: bool = True  # checksum of every tensor after each reshard
    options: dict[str, Any] = field(default_factory=dict)  # any other vLLM engine argument


@dataclass
class EvaluationConfig:
    every: int = 10  # steps; 0: only before the first and after the last
    num_problems: int | None = None  # null: the whole validation set
    samples_per_problem: int = 16
    temperature: float = 0.8


@dataclass
class Config:
    run: RunConfig = field(default_factory=RunConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    actor: ActorConfig = field(default_factory=ActorConfig)
    entropy: EntropyConfig = field(default_factory=EntropyConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    replay: ReplayConfig = field(default_factory=ReplayConfig)
    readiness: ReadinessConfig = field(default_factory=ReadinessConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    megatron: dict[str, Any] = field(default_factory=dict)  # any other TransformerConfig field


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
