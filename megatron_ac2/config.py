"""The whole configuration as closed, inert dataclasses. Defaults are the paper's 4B recipe (docs/ALGORITHM.md §3).

Extra Megatron and vLLM options pass through the open sections `megatron` and `engine.options`. See config_file.py for
how a file and overrides fill it, and for what is refused.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from megatron_ac2.config_training import (
    ActorConfig,
    CriticConfig,
    EntropyConfig,
    Fp8Config,
    ParallelConfig,
)


@dataclass
class RunConfig:
    name: str = "run"
    dir: str = "runs/${run.name}"
    seed: int = 0
    num_steps: int = 200
    checkpoint_every: int = 10  # 0: only at the end
    async_save: bool = True  # go on training while a checkpoint is written; needs host memory for a copy of it
    keep_checkpoints: int = 2  # the newest ones
    keep_every: int = 0  # besides, each of a step that is a multiple of it, for good; 0: none
    verify_checkpoint: bool = True  # hash every file before it is loaded; false: compare sizes alone
    resume: bool = True  # go on from the latest checkpoint in `dir`, if there is one
    # What of the trainer waits in host memory while the engine runs, which sleeps (on GPU) while the trainer computes:
    # none (both stay) | optimizer (its states; gradients are dropped) | all (weights too, frozen models' as well)
    offload: str = "none"
    timeout_minutes: float = 60.0  # a collective that waits longer ends the job
    tensorboard: bool = True
    wandb: bool = False


@dataclass
class ModelConfig:
    path: str = "???"  # Hugging Face folder: config.json, safetensors, tokenizer
    dtype: str = "bfloat16"  # bfloat16 | float32


@dataclass
class EstimatorConfig:
    """How endpoint values and token values become advantages (docs/ALGORITHM.md §5 and §6)."""

    # group | singleton (one chunk a prefix on ready problems, baseline V(s)) | gae | brace | rfpo
    kind: str = "group"
    baseline: str = "mean"  # group: mean | leave_one_out (RLOO)
    divide_by_std: bool = False  # group: GRPO's original normalisation
    gamma: float = 1.0  # gae and brace
    gae_lambda: float = 0.95
    brace_lambda: float = 1.0
    brace_horizon: int = 100  # k, policy tokens
    brace_rho_max: float = 1.2
    brace_c_max: float = 1.1
    # Ours: the product of up to k factors c may reach c_max^k (1.1^100 is 14,000), so it is cut here.
    brace_product_max: float = 10.0
    rfpo_num_labelled: int = 512  # rollouts that the frozen critic is calibrated on, once
    rfpo_label_fraction: float = 0.1  # p: a trajectory keeps its true label with this probability


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
    top_p: float = 1.0  # below 1: needs top_k, for the trainer renormalises over the recorded support
    top_k: int | None = None  # null: the whole vocabulary
    audit_fraction: float = 0.25
    dynamic: bool = False  # DAPO, routing grpo: replace groups whose rewards are all equal
    dynamic_max_rounds: int = 3
    overlong_cache: int = 0  # DAPO, routing grpo: last tokens of the budget, over which the reward falls by up to 1


@dataclass
class ReplayConfig:
    kind: str = "rolling"  # rolling | stale (all rollouts of `stale_every` steps at once) | correct_only
    stale_every: int = 10
    correct_min_reward: float = 6 / 7
    max_target_age: int | None = None  # versions; older critic targets are dropped
    capacity: int = 256
    target_capacity: int = 1920
    min_valid_for_target: int = 8


@dataclass
class ReadinessConfig:
    kind: str = "local"  # local | global_only (the open gate makes every problem ready) | terminal_only
    demote_threshold: float | None = None  # an audit whose error reaches it makes its problem unready; null: never
    global_threshold: float = 0.20
    local_threshold: float = 0.18
    window: int = 5  # complete steps
    reference_min_reward: float = 6 / 7


@dataclass
class DataConfig:
    train: str = "???"  # JSONL or Parquet of problems
    validation: str | None = None
    shuffle: bool = True
    reward_range: tuple[float, float] = (0.0, 1.0)  # what the grader gives, mapped onto [0, 1]
    grading_timeout: float = 10.0  # seconds an answer
    grading_workers: int | None = None  # processes a rank that grade; null: as many as cores fall to it, 8 at most
    # Answers are compared in processes that can reach no file, network or other process (docs/security.md). Where this
    # machine cannot hold that, a run is refused; false: grade there all the same.
    confine_answers: bool = True


@dataclass
class EngineConfig:
    tensor_parallel: int = 1
    max_num_seqs: int = 256
    max_model_len: int | None = None  # null: prompt + response budget of the data, rounded up
    gpu_memory_utilization: float = 0.6
    block_size: int = 32
    kv_cache_gib: float = 1.0  # CPU only
    publish_every: int = 1  # steps between reshards: the engine's weights are up to this minus 1 versions old
    rounding: str = "none"  # none | fp8_e4m3 | int8: quantise and dequantise matrices on their way to the engine
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
    fp8: Fp8Config = field(default_factory=Fp8Config)
    actor: ActorConfig = field(default_factory=ActorConfig)
    entropy: EntropyConfig = field(default_factory=EntropyConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    estimator: EstimatorConfig = field(default_factory=EstimatorConfig)
    replay: ReplayConfig = field(default_factory=ReplayConfig)
    readiness: ReadinessConfig = field(default_factory=ReadinessConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    megatron: dict[str, Any] = field(default_factory=dict)  # any other TransformerConfig field


def critic_parallel(config: Config) -> ParallelConfig:
    """The layout of a critic with a model of its own."""
    return config.critic.parallel or config.parallel


_TIED_TOKENS = 16  # the engine keeps every token that ties with the k-th: of 152k bf16 logits 5 at k = 128, 13 at most


def num_recorded_logprobs(config: Config, vocab_size: int) -> int:
    """How many of the sampler's tokens a position the loss needs: score centering's head, a filter's whole support."""
    head = config.actor.score_centering.top_k if config.actor.score_centering.enabled else 0
    support = config.sampling.top_k + _TIED_TOKENS if config.sampling.top_k else 0
    return min(max(head, support), vocab_size)


def critic_kind(config: Config) -> str:
    """generative, value_head, or none: the baselines without an estimator that reads values have no critic."""
    reads_values = config.sampling.routing == "ac2" or config.estimator.kind in ("gae", "brace", "rfpo")
    return config.critic.kind if reads_values else "none"
