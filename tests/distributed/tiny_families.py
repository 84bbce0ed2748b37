"""Tiny random models of every family but Qwen3, on disk: two layers, and a vocabulary that must be padded."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PretrainedConfig, Qwen2Config, Qwen2ForCausalLM

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
_NINE_HEADS = dict(hidden_size=144, num_attention_heads=9, num_key_value_heads=3, intermediate_size=96)


def configs() -> dict[str, PretrainedConfig]:
    """By name. Llama 3's scaling moves only angles that take 2,000 positions for a turn: little, at test lengths."""
    return {
        "qwen2_untied": Qwen2Config(**_SIZES | {"hidden_size": 128}, rope_parameters=_ROPE, tie_word_embeddings=False),
        "qwen2_tied": Qwen2Config(**_SIZES, rope_parameters=_ROPE, tie_word_embeddings=True),
        "llama3": LlamaConfig(**_SIZES | {"max_position_embeddings": 16384}, rope_parameters=_LLAMA3, head_dim=32),
        "smollm2": LlamaConfig(**_SIZES | _NINE_HEADS, rope_parameters=_ROPE, tie_word_embeddings=True),
    }


def write(name: str, folder: Path, seed: int = 0) -> Path:
    """No tensor keeps the zeros or ones that it starts with, which would hide a mix-up of biases or of norms."""
    config = configs()[name]
    kind = Qwen2ForCausalLM if isinstance(config, Qwen2Config) else LlamaForCausalLM
    with torch.random.fork_rng():
        torch.manual_seed(sum(name.encode()) + seed)
        model = kind(config)
        for parameter_name, parameter in model.named_parameters():
            if "norm" in parameter_name or parameter_name.endswith(".bias"):
                parameter.data.add_(0.3 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return folder
