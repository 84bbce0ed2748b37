"""What a resume needs beyond weights and optimizers (docs/ALGORITHM.md §2). Equal on every rank at every step."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from megatron_ac2.algorithm.controllers import CriticLearningRate, EntropyClip
from megatron_ac2.algorithm.readiness import Readiness
from megatron_ac2.algorithm.references import ReferenceBank
from megatron_ac2.algorithm.replay import ReplayBuffer, TargetBuffer
from megatron_ac2.algorithm.rfpo import Calibration
from megatron_ac2.config import Config, critic_kind
from megatron_ac2.data.problems import ProblemStream, describe_problems
from megatron_ac2.types import Problem


@dataclass(slots=True)
class Counters:
    """Running totals that a report or a plot needs across restarts."""

    decoding_flops: float = 0.0
    generated_tokens: int = 0
    prefill_tokens: int = 0


@dataclass(slots=True)
class RunState:
    stream: ProblemStream
    replay: ReplayBuffer
    targets: TargetBuffer
    references: ReferenceBank
    readiness: Readiness
    entropy_clip: EntropyClip
    critic_lr: CriticLearningRate
    counters: Counters
    calibration: Calibration | None = None  # of RFPO's frozen critic, fitted once
    next_step: int = 0

    @classmethod
    def fresh(cls, config: Config, problems: Sequence[Problem]) -> RunState:
        entropy, critic = config.entropy, config.critic
        return cls(
            stream=ProblemStream(problems, seed=config.run.seed, shuffle=config.data.shuffle),
            replay=ReplayBuffer(config.replay.capacity, config.replay.kind, config.replay.correct_min_reward),
            targets=TargetBuffer(config.replay.target_capacity),
            references=ReferenceBank(),
            readiness=Readiness(
                config.readiness.global_threshold, config.readiness.local_threshold, config.readiness.window,
                kind=config.readiness.kind, demote_threshold=config.readiness.demote_threshold,
            ),
            entropy_clip=EntropyClip(entropy.k_init, entropy.step, entropy.target, entropy.k_min, entropy.k_max),
            critic_lr=CriticLearningRate(
                critic.optimizer.lr, critic.lr_min, critic.lr_ratio_limit or math.inf, critic.lr_patience
            ),
            counters=Counters(),
        )  # fmt: skip

    def state_dict(self) -> dict[str, Any]:
        parts = {name: getattr(self, name).state_dict() for name in _STATEFUL}
        counters = {f.name: getattr(self.counters, f.name) for f in fields(Counters)}
        calibration = {} if self.calibration is None else self.calibration.state_dict()
        return {**parts, "counters": counters, "calibration": calibration, "next_step": self.next_step}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        for name in _STATEFUL:
            getattr(self, name).load_state_dict(saved[name])
        self.counters = Counters(**saved["counters"])
        self.calibration = Calibration.from_state(saved["calibration"]) if saved["calibration"] else None
        self.next_step = int(saved["next_step"])


_STATEFUL = ("stream", "replay", "targets", "references", "readiness", "entropy_clip", "critic_lr")


def identity(
    config: Config,
    hf_config: Any,
    tokenizer: Any,
    prompt_hash: str,
    train: Sequence[Problem],
    critic_hf_config: Any | None = None,
    reference: str = "none",
) -> dict[str, str]:
    """What must not change between a checkpoint and the run that loads it; compared key by key.

    `critic_hf_config` is that of a critic with a model of its own; `reference` tells the frozen weights of
    actor.reference_kl, which no checkpoint holds, from others.
    """
    template = hashlib.sha256(str(tokenizer.chat_template).encode()).hexdigest()[:16]
    kind = critic_kind(config)
    return {
        "data.train": describe_problems(train),
        "model": _architecture(hf_config),
        "tokenizer": _tokenizer(tokenizer),
        "chat_template": template,
        "critic.kind": kind,
        "critic.head": config.critic.head if kind == "value_head" else "none",
        "critic.model": "none" if critic_hf_config is None else _architecture(critic_hf_config),
        "actor.reference_kl.path": reference,
        "value_prompt": prompt_hash,
        "run.seed": str(config.run.seed),
    }


# Digits, spaces, signs and scripts that tokenizers of one vocabulary may still cut in different ways.
_PROBE = 'In 1024 the 7th said:\n\n\t"It\'s x_{i+1} = \\frac{22}{7}..."  ¿Qué? 日本語 Ünïcödé <|im_end|>'


def _tokenizer(tokenizer: Any) -> str:
    """Vocabulary, how text is cut, where a response ends."""
    parts = (sorted(tokenizer.get_vocab().items()), list(tokenizer.encode(_PROBE, add_special_tokens=False)))
    digest = hashlib.sha256(repr(parts).encode()).hexdigest()[:16]
    return f"{len(tokenizer)} tokens, {digest}, end of sequence {tokenizer.eos_token_id}"


_ARCHITECTURE = (
    "model_type", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "intermediate_size", "num_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob",
    "decoder_sparse_step", "mlp_only_layers", "vocab_size", "rms_norm_eps", "tie_word_embeddings",
)  # fmt: skip


def _architecture(hf_config: Any) -> str:
    """What decides weights' shapes and the forward pass; families have not all of it."""
    rope = getattr(hf_config, "rope_parameters", None) or {}
    found = {key: getattr(hf_config, key, None) for key in _ARCHITECTURE}
    found["rope_theta"] = rope.get("rope_theta", getattr(hf_config, "rope_theta", None))
    if rope.get("rope_type", "default") != "default":  # positions are scaled
        found |= {f"rope.{key}": value for key, value in sorted(rope.items()) if key != "rope_theta"}
    return ", ".join(f"{key}={value}" for key, value in found.items() if value is not None)
