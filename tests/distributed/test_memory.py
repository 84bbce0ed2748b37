"""A memory plan's bytes are those that real models, optimizers and forward passes take."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.launch import torchrun

CASES = Path(__file__).with_name("memory_cases.py")


@pytest.mark.parametrize(("nproc", "layouts"), [(1, 1), (2, 7)])
def test_planned_bytes_are_counted_bytes(nproc: int, layouts: int) -> None:
    assert torchrun(CASES, nproc, timeout=240).count("passed") == nproc * layouts
