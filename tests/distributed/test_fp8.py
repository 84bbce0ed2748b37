"""Emulated FP8 rounds alike in every layout in which Transformer Engine would; see fp8_cases.py."""

from __future__ import annotations

from pathlib import Path

from tests.distributed import fp8_cases
from tests.distributed.fork_server import ForkServer


def test_emulated_fp8_in_every_layout(server: ForkServer, tmp_path: Path) -> None:
    output = server.run(Path(fp8_cases.__file__), 2, tmp_path, timeout=600).passed().output
    assert [output.count(f"passed {recipe} ") for recipe in fp8_cases.RECIPES] == [1] * len(fp8_cases.RECIPES)
    assert output.count("done") == 2
