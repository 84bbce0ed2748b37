"""The sections of a configuration that say how models are laid out and trained; config.py has the rest."""

from __future__ import annotations

import math
from dataclasses import dataclass, field


@dataclass
class ParallelConfig:
    tensor: int = 1
    pipeline: int = 1
    sequence: bool = False  # sequence parallel; needs tensor > 1
    expert: int = 1  # a model's experts are shared out over so many ranks, most of them data-parallel ones
    expert_tensor: int | None = None  # over how many ranks one expert is cut; null: as `tensor`
    context: int = 1  # ranks that share every sequence; the optimizer is sharded over them too
    virtual_pipeline: int | None = None  # chunks of layers a pipeline rank (interleaved pipeline); null: one
    # Sum gradients over data ranks during the backward pass, and with optimizer.distributed gather the new weights
    # during the next forward pass. The same numbers; helps where that communication takes long.
    overlap: bool = False


@dataclass
class Fp8Config:
    """Linear layers in FP8, of the actor and of the critic: Transformer Engine's recipes (docs of NVIDIA's, by name).

    They need a GPU: 8.9 (Ada) and newer for delayed and tensorwise, 9.0 (Hopper) with CUDA 12.9 for blockwise, 10.0
    (Blackwell) for mxfp8, in bfloat16. Refused where one would not run; `doctor` says which do. Frozen models too.
    """

    recipe: str = "none"  # none | delayed | tensorwise | blockwise | mxfp8
    # Round inputs, weights and gradients as the recipe would, and compute in fp32: on CPU, to study it. Not faster.
    emulate: bool = False
    format: str = "auto"  # auto | e4m3 | hybrid (gradients in e5m2); auto: hybrid for delayed and tensorwise, else e4m3
    keep_first_layers: int = 0  # layers at the start that stay in model.dtype; not with delayed
    keep_last_layers: int = 0
    # delayed only: the scale of a pass follows the amaxes of the training passes before it, and starts at 1
    margin: int = 0  # the scale is divided by 2^margin
    amax_history_len: int = 1024
    amax_algorithm: str = "max"  # max | most_recent


@dataclass
class OptimizerConfig:
    lr: float = 2e-6
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    grad_clip: float = 1.0
    distributed: bool = True  # shard the optimizer state over data-parallel ranks


@dataclass
class ImportanceConfig:
    """Detached weight on a token's loss for what the engine samples differently from the trainer: trainer / engine.

    The ratio's numerator is the surrogate's anchor: the proximal log-prob, or the current one for `policy_gradient`.
    """

    # none | token_is | token_tis | token_mis | sequence_tis | sequence_mis | geometric_rejection
    kind: str = "none"
    low: float | None = None  # null: the kind's own bounds (algorithm/importance.py)
    high: float | None = None


@dataclass
class ScoreCenteringConfig:
    """arXiv 2609.20807. Its weight f follows `actor.importance`: none, token_is, token_tis or token_mis."""

    enabled: bool = False
    top_k: int = 128  # the sampler's k most likely tokens, recorded at every position


@dataclass
class ReferenceKLConfig:
    """KL(policy || a frozen model), as a penalty in the loss."""

    coefficient: float = 0.0
    estimator: str = "k3"  # k1 | k2 | k3
    path: str | None = None  # null: the weights of model.path


@dataclass
class ActorConfig:
    optimizer: OptimizerConfig = field(
        default_factory=lambda: OptimizerConfig(lr=2e-6, weight_decay=0.01, grad_clip=0.3)
    )
    num_minibatches: int = 2
    max_tokens_per_microbatch: int = 65_536  # context ranks share them
    # Output layer and loss in one op, tile by tile: auto | torch | triton (CUDA); naive: its twin, with all logits
    loss_op: str = "auto"
    loss: str = "ppo"  # policy_gradient | ppo | cispo | gspo | asympo
    anchor: str = "proximal"  # proximal | behavior: what the ratio of ppo, cispo and gspo is taken against
    clip_low: float = 0.2
    clip_high: float = 0.28
    dual_clip: float | None = 3.0  # ppo only; null: none
    asympo_floor: float = 0.01  # nats; the least mean negative log-likelihood that a response is divided by
    aggregation: str = "token_mean"  # token_mean | sequence_mean | budget_mean (Dr.GRPO: / response_budget)
    entropy_bonus: float = 0.0
    importance: ImportanceConfig = field(default_factory=ImportanceConfig)
    score_centering: ScoreCenteringConfig = field(default_factory=ScoreCenteringConfig)
    reference_kl: ReferenceKLConfig = field(default_factory=ReferenceKLConfig)
    # Mixtures of experts (R3, arXiv 2510.11370): score and train with the experts that the engine chose for each token;
    # how much each counts, and its gradient, are the trainer's. The choice stays as it was sampled, under all of a
    # step's updates and where the engine's weights are older (engine.publish_every): ratios are those of policies that
    # share it. The reference model and critics choose for themselves.
    router_replay: bool = False


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
    # value_head: a critic checkpoint in HF form, of any size or family with the actor's tokenizer; null: it starts
    # from the actor's trunk
    path: str | None = None
    parallel: ParallelConfig | None = None  # value_head: a layout of its own over the same processes; null: the actor's
    use_references: bool = True
    reference_prompts: str = "both"  # both (weight 1/2 each) | reference_only, where a problem has a reference
    value: str = "greedy"  # generative: greedy | soft, the mean over the grid under the model's own probabilities
    head: str = "bce"  # value_head: bce (bounded scalar) | two_hot (distribution over the grid) | mse (clipped)
    value_clip: float | None = 0.5  # mse: how far a value may move from its old one within an update; null: no clip
    # What the critic is fitted to under estimator.kind group and singleton; gae and brace have targets of their own.
    fit: str = "group_mean"  # group_mean | nstep (value_head: every chunk boundary of this step's trajectories)
    nstep_max: int = 5  # chunks that an N-step target looks ahead
    snapshot_every: int = 20  # updates between refreshes of the frozen critic that nstep bootstraps from
    optimizer: OptimizerConfig = field(
        default_factory=lambda: OptimizerConfig(lr=2 * math.sqrt(2) * 1e-6, grad_clip=0.2)
    )
    lr_min: float = 5 * math.sqrt(2) * 1e-7
    # halve after `lr_patience` steps with an update-norm ratio above this; null: only after a loss that is not finite
    lr_ratio_limit: float | None = math.sqrt(2)
    lr_patience: int = 2
    batch_size: int = 768
    updates_per_step: int = 1  # the paper: 1
    max_tokens_per_microbatch: int = 65_536
    max_context_len: int | None = None  # longer contexts are skipped; null: the engine's / model's limit
    max_value_tokens: int = 4  # generative: decoded greedily after the answer stem
