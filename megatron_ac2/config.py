"""The whole configuration as closed, inert dataclasses. Defaults are the paper's 4B recipe (docs/ALGORITHM.md §3).

Extra Megatron and vLLM options pass through the open sections `megatron` and `engine.options`. See config_file.py for
how a file and overrides fill it, and for what is refused.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any


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
