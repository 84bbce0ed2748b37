"""Tiny Qwen3 models on disk, and the process that ranks are forked from. The vocabulary (250) does not divide by any
tensor degree used, so padding is at work."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.distributed import tiny_families
from tests.distributed.fork_server import ForkServer

HERE = Path(__file__).parent
FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe")  # transformers loads a model's own module late


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkServer]:
    programs = [f"tests.distributed.{path.stem}" for path in sorted(HERE.glob("*_cases.py"))]
    models = [f"transformers.models.{name}.modeling_{name}" for name in FAMILIES]
    with ForkServer(tmp_path_factory.mktemp("jobs"), [*programs, "tools.convert_checkpoint", *models]) as server:
        yield server


@pytest.fixture(scope="session")
def tiny_untied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("qwen3") / "untied"
    return tiny_families.write_model(tiny_families.qwen3(tied=False), folder, seed=11, noise=0.1)


@pytest.fixture(scope="session")
def tiny_tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("qwen3") / "tied"
    return tiny_families.write_model(tiny_families.qwen3(tied=True), folder, seed=12, noise=0.1)
