"""Mixtures of experts in every layout against transformers; what differs from dense models. See test_model.py."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.distributed import replay_reference, tiny_families
from tests.distributed.fork_server import ForkServer
from tests.distributed.model_reference import write_reference
from tests.distributed.test_convert_checkpoint import TOOL, assert_same_tensors

CASES, TRAINING_CASES = (Path(__file__).with_name(f"expert{kind}_cases.py") for kind in ("", "_training"))
LENGTHS = [[7, 12, 5], [16], [2], [3, 9]]  # of each microbatch's sequences; of two tokens most experts get none
MASKED = 2  # the microbatch without loss


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    scratch = tmp_path_factory.mktemp("experts")
    return [tiny_families.write(name, scratch / name) for name in tiny_families.expert_configs()]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory, folders: list[Path]) -> Path:
    return write_reference(tmp_path_factory.mktemp("reference") / "reference.pt", folders, LENGTHS, masked=[MASKED])


def make_odd_folders(source: Path, scratch: Path) -> None:
    tensors = load_file(source / "model.safetensors")
    renamed = dict(tensors)
    renamed["model.layers.0.mlp.experts.8.up_proj.weight"] = renamed.pop("model.layers.1.mlp.experts.5.up_proj.weight")
    fused = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    fused["model.layers.0.mlp.experts.gate_up_proj"] = torch.zeros(8, 64, 64)
    for name, content in (("odd_experts", renamed), ("fused_experts", fused)):
        (scratch / name).mkdir()
        save_file(content, scratch / name / "model.safetensors")


@pytest.mark.parametrize("nproc,num_passed", [(1, [1, 1]), (2, [4, 2]), (4, [4, 4])])
def test_every_layout_of_experts(
    nproc: int, num_passed: list[int], server: ForkServer, reference: Path, folders: list[Path], tmp_path: Path
) -> None:
    make_odd_folders(folders[0], tmp_path)
    output = server.run(CASES, nproc, reference, tmp_path, *folders, timeout=600).passed().output
    assert [output.count(f"passed {folder.name} ") for folder in folders] == num_passed
    assert output.count("done") == nproc


@pytest.fixture(scope="module")
def replay(tmp_path_factory: pytest.TempPathFactory, folders: list[Path]) -> Path:
    file = tmp_path_factory.mktemp("replay") / "reference.pt"
    torch.save({folder.name: replay_reference.answers(folder) for folder in folders}, file)
    return file


@pytest.mark.parametrize("nproc,num_passed", [(2, 11), (4, 5)])
def test_optimizers_checkpoints_and_replay_of_experts(
    nproc: int, num_passed: int, server: ForkServer, folders: list[Path], replay: Path, tmp_path: Path
) -> None:
    output = server.run(TRAINING_CASES, nproc, *folders, tmp_path, replay, timeout=600).passed().output
    assert output.count("passed ") == num_passed and output.count("done") == nproc


def test_conversion_in_other_layouts(server: ForkServer, folders: list[Path], tmp_path: Path) -> None:
    """There with experts shared out over ranks, back with each cut over them: bit for bit."""
    server.run(TOOL, 2, "to-megatron", folders[0], tmp_path / "megatron", "--expert", 2, "--verify").passed()
    server.run(TOOL, 2, "to-hf", tmp_path / "megatron", tmp_path / "hf", "--tensor", 2, "--verify").passed()
    assert_same_tensors(tmp_path / "hf" / "model.safetensors", folders[0] / "model.safetensors")
