"""Tiny random models of every family, on disk: few layers, and a vocabulary that must be padded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

_SIZES = dict(
    vocab_size=250, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=512, initializer_range=0.1, rms_norm_eps=1e-6,
    bos_token_id=None, eos_token_id=2, pad_token_id=None,
)  # fmt: skip
_ROPE = {"rope_type": "default", "rope_theta": 10_000.0}
_LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500_000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
_EIGHT_EXPERTS = dict(head_dim=32, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=32)
_NINE_HEADS = dict(hidden_size=144, num_attention_heads=9, num_key_value_heads=3, intermediate_size=96)


def qwen3(tied: bool, **changes: Any) -> Qwen3Config:
    """Four layers."""
    sizes = dict(
        vocab_size=250, hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=512, rms_norm_eps=1e-6, initializer_range=0.1,
        rope_parameters={"rope_type": "default", "rope_theta": 1_000_000.0},
    )  # fmt: skip
    return Qwen3Config(**sizes | changes, tie_word_embeddings=tied)


def configs() -> dict[str, PretrainedConfig]:
    """Of every other dense family, by name: two layers. Llama 3's scaling moves only angles that take 2,000 positions
    for a turn: little, at test lengths."""
    return {
        "qwen2_untied": Qwen2Config(**_SIZES | {"hidden_size": 128}, rope_parameters=_ROPE, tie_word_embeddings=False),
        "qwen2_tied": Qwen2Config(**_SIZES, rope_parameters=_ROPE, tie_word_embeddings=True),
        "llama3": LlamaConfig(**_SIZES | {"max_position_embeddings": 16384}, rope_parameters=_LLAMA3, head_dim=32),
        "smollm2": LlamaConfig(**_SIZES | _NINE_HEADS, rope_parameters=_ROPE, tie_word_embeddings=True),
    }


def expert_configs() -> dict[str, PretrainedConfig]:
    """Mixtures of experts: in every layer, their weights renormalised over the chosen; and in the last layer alone,
    weights as they are: the first of two pipeline stages has no expert."""
    every = Qwen3MoeConfig(**_SIZES, **_EIGHT_EXPERTS, rope_parameters=_ROPE, norm_topk_prob=True)
    last = Qwen3MoeConfig(
        **_SIZES | {"num_hidden_layers": 4}, **_EIGHT_EXPERTS, rope_parameters=_ROPE, norm_topk_prob=False,
        decoder_sparse_step=2, mlp_only_layers=[1], tie_word_embeddings=True,
    )  # fmt: skip
    return {"qwen3_moe": every, "qwen3_moe_last": last}


def write(name: str, folder: Path, seed: int = 0) -> Path:
    return write_model({**configs(), **expert_configs()}[name], folder, sum(name.encode()) + seed)


def write_model(config: PretrainedConfig, folder: Path, seed: int, noise: float = 0.3) -> Path:
    make_model(config, seed, noise).save_pretrained(folder)
    return folder


def make_model(config: PretrainedConfig, seed: int, noise: float) -> PreTrainedModel:
    """In fp32. Norms start at one and biases at zero, which would hide a mix-up: `noise` is added to them."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config)
        for name, parameter in model.named_parameters():
            if noise and ("norm" in name or name.endswith(".bias")):
                parameter.data.add_(noise * torch.randn_like(parameter))
    return model


def split_experts(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """By the names of transformers' modules, which hold a layer's experts in one tensor -> by those of published files,
    one tensor an expert and projection."""
    found = {}
    for name, tensor in tensors.items():
        base, _, kind = name.rpartition(".")
        if kind not in ("gate_up_proj", "down_proj"):
            found[name] = tensor
            continue
        for expert, matrix in enumerate(tensor):
            pieces = (
                {"down_proj": matrix} if kind == "down_proj" else dict(zip(("gate_proj", "up_proj"), matrix.chunk(2)))
            )
            found |= {f"{base}.{expert}.{part}.weight": piece for part, piece in pieces.items()}
    return found
