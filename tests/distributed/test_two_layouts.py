"""Actor and critic of different sizes, families and layouts in the same processes: as in one layout for both."""

from __future__ import annotations

from pathlib import Path

from transformers import Qwen2Config

from tests.distributed.fork_server import ForkServer
from tests.distributed.tiny_families import write_model
from tests.distributed.training_reference import write_policy

CASES = Path(__file__).with_name("two_layouts_cases.py")


def write_critic(folder: Path) -> Path:
    """Wider, deeper, of another family, and with a longer vocabulary than the actor's 448."""
    config = Qwen2Config(
        vocab_size=512, hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, rope_parameters={"rope_type": "default", "rope_theta": 1e4},
        tie_word_embeddings=False, initializer_range=0.15,
    )  # fmt: skip
    return write_model(config, folder, seed=29, noise=0)


def test_a_critic_in_a_layout_of_its_own_is_the_same_critic(server: ForkServer, tmp_path: Path) -> None:
    actor, critic = write_policy(tmp_path / "actor", tied=True), write_critic(tmp_path / "critic")
    output = server.run(CASES, 2, actor, critic, tmp_path, timeout=300).passed().output
    assert output.count("passed ") == 3 and output.count("done") == 2
