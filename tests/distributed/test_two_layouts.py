"""Actor and critic of different sizes, families and layouts in the same processes: as in one layout for both."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from tests.distributed.launch import torchrun
from tests.distributed.training_reference import write_model

CASES = Path(__file__).with_name("two_layouts_cases.py")


def write_critic(folder: Path) -> Path:
    """Wider, deeper, of another family, and with a longer vocabulary than the actor's 448."""
    config = Qwen2Config(
        vocab_size=512, hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, rope_parameters={"rope_type": "default", "rope_theta": 1e4},
        tie_word_embeddings=False, initializer_range=0.15,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(29)
        Qwen2ForCausalLM(config).save_pretrained(folder)
    return folder


def test_a_critic_in_a_layout_of_its_own_is_the_same_critic(tmp_path: Path) -> None:
    actor, critic = write_model(tmp_path / "actor", tied=True), write_critic(tmp_path / "critic")
    output = torchrun(CASES, 2, actor, critic, tmp_path, timeout=300)
    assert output.count("passed ") == 5 and output.count("done") == 2
