"""Tiny Qwen3 models on disk. The vocabulary (250) does not divide by any tensor degree used, so padding is at work."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch


def write_tiny_qwen3(folder: Path, tied: bool, dtype: torch.dtype = torch.float32) -> Path:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=250,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        rope_parameters={"rope_type": "default", "rope_theta": 1_000_000.0},
        rms_norm_eps=1e-6,
        tie_word_embeddings=tied,
        initializer_range=0.1,
    )
    with torch.random.fork_rng():
        torch.manual_seed(11 + tied)
        model = Qwen3ForCausalLM(config)
        for name, parameter in model.named_parameters():
            if "norm" in name:  # they start at one, which would hide a mix-up
                parameter.data.add_(0.1 * torch.randn_like(parameter))
    model.to(dtype).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_untied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_qwen3(tmp_path_factory.mktemp("qwen3") / "untied", tied=False)


@pytest.fixture(scope="session")
def tiny_tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_qwen3(tmp_path_factory.mktemp("qwen3") / "tied", tied=True)
