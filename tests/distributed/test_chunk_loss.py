"""The vocabulary on several tensor ranks gives the values and gradients of the vocabulary on one."""

from __future__ import annotations

from pathlib import Path

from tests.distributed.fork_server import ForkServer

CASES = Path(__file__).with_name("chunk_loss_cases.py")


def test_tensor_parallel_equals_one_process(server: ForkServer) -> None:
    output = server.run(CASES, 4).passed().output
    assert "passed 2" in output and "passed 4" in output
