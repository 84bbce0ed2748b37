"""Fewer key-value heads than tensor ranks; see shared_groups_cases.py."""

from __future__ import annotations

from pathlib import Path

from transformers import Qwen2Config, Qwen3Config

from tests.distributed import shared_groups_cases
from tests.distributed.fork_server import ForkServer
from tests.distributed.model_reference import write_reference
from tests.distributed.tiny_families import write_model

SIZES = dict(
    vocab_size=250, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=8,
    max_position_embeddings=512, initializer_range=0.1, tie_word_embeddings=False,
    rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
)  # fmt: skip


def test_tensor_ranks_share_key_value_heads(server: ForkServer, tmp_path: Path) -> None:
    """One head with biases over 2 and 4 ranks; two heads with q and k norms over 4."""
    one = write_model(Qwen2Config(**SIZES, num_key_value_heads=1), tmp_path / "one_group", seed=1)
    two = write_model(Qwen3Config(**SIZES, num_key_value_heads=2, head_dim=32), tmp_path / "two_groups", seed=2)
    reference = write_reference(tmp_path / "reference.pt", [one, two], [[7, 12, 5], [16]])
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    job = server.run(Path(shared_groups_cases.__file__), 4, reference, scratch, one, two, timeout=600)
    output = job.passed().output
    assert output.count("passed one_group") == 2 and output.count("passed two_groups") == 1
    assert output.count("passed resharded") == 2 and output.count("done") == 4
