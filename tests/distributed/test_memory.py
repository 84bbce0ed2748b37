"""A memory plan's bytes are those that real models, optimizers and forward passes take."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.fork_server import ForkServer

CASES = Path(__file__).with_name("memory_cases.py")


@pytest.mark.parametrize(("nproc", "layouts"), [(1, 1), (2, 7)])
def test_planned_bytes_are_counted_bytes(server: ForkServer, nproc: int, layouts: int) -> None:
    output = server.run(CASES, nproc, timeout=240).passed().output
    assert output.count("passed ") == layouts and output.count("done") == nproc
