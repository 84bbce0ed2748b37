"""Optimizer states, gradients and weights that leave the device between steps change no bit of training."""

from __future__ import annotations

from pathlib import Path

from tests.distributed.fork_server import ForkServer

CASES = Path(__file__).with_name("offload_cases.py")


def test_training_with_offload_is_training_without(
    server: ForkServer, tiny_untied: Path, tiny_tied: Path, tmp_path: Path
) -> None:
    output = server.run(CASES, 2, tiny_untied, tiny_tied, tmp_path, timeout=300).passed().output
    assert output.count("passed ") == 6 and output.count("done") == 2
