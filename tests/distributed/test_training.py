"""Gradients, metrics and values are the same in every layout, split and padding, and those of plain transformers."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from tests.distributed.fork_server import ForkServer
from tests.distributed.objective_reference import OBJECTIVES, objective_reference
from tests.distributed.training_reference import build_reference, load_reference_model, make_sequences, write_policy

CASES = Path(__file__).with_name("training_cases.py")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Where the references are, then the models; the deep ones have four layers, for longer pipelines."""
    root = tmp_path_factory.mktemp("training")
    kinds = {"untied": 2, "tied": 2, "deep_untied": 4, "deep_tied": 4}
    models = [write_policy(root / name, not name.endswith("untied"), layers) for name, layers in kinds.items()]
    for folder in models:
        model = load_reference_model(folder)
        objectives = {name: objective_reference(model, make_sequences(model), name) for name in OBJECTIVES}
        for found in objectives.values():
            found["sequences"] = [dataclasses.asdict(sequence) for sequence in found["sequences"]]
        torch.save(build_reference(folder) | {"objectives": objectives}, root / f"{folder.name}.pt")
    return [root, *models]


@pytest.mark.parametrize(
    "layouts,nproc,num_layouts", [("alone", 1, 1), ("four", 4, 6), ("context", 4, 4), ("deep", 4, 3)]
)
def test_every_layout_trains_alike(
    layouts: str, nproc: int, num_layouts: int, server: ForkServer, folders: list[Path]
) -> None:
    references, *models = folders
    chosen = [folder for folder in models if folder.name.startswith("deep") == (layouts == "deep")]
    output = server.run(CASES, nproc, layouts, references, *chosen, timeout=600).passed().output
    assert [output.count(f"passed {folder.name} ") for folder in chosen] == [num_layouts] * 2
    assert output.count("done") == nproc
