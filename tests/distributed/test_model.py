"""Every layout of the model against transformers and against one process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.distributed import tiny_families
from tests.distributed.fork_server import ForkServer
from tests.distributed.model_reference import write_reference

CASES = Path(__file__).with_name("model_cases.py")
LENGTHS = [
    [7, 12, 5],
    [16],
    [3, 9],
    [2, 4],
]  # of the sequences of each microbatch; totals divide by 2, as sequence parallel asks, and so do microbatches


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory, tiny_untied: Path, tiny_tied: Path) -> list[Path]:
    """One model of each family and kind; Qwen3's have 4 layers, the others 2."""
    scratch = tmp_path_factory.mktemp("families")
    others = [tiny_families.write(name, scratch / name) for name in tiny_families.configs()]
    return [tiny_untied, tiny_tied, *others]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory, folders: list[Path]) -> Path:
    return write_reference(tmp_path_factory.mktemp("reference") / "reference.pt", folders, LENGTHS)


def make_odd_folders(source: Path, scratch: Path) -> None:
    """Copies of a model: one with a tensor gone and one too many, one with a tensor of another shape."""
    (scratch / "a_file").touch()
    for name in ("odd_names", "odd_shape"):
        (scratch / name).mkdir()
    tensors = load_file(source / "model.safetensors")
    renamed = {**tensors, "surprise.weight": torch.zeros(2)}
    del renamed["model.norm.weight"]
    save_file(renamed, scratch / "odd_names" / "model.safetensors")
    reshaped = {**tensors, "model.layers.3.self_attn.k_proj.weight": torch.zeros(32, 64)}
    save_file(reshaped, scratch / "odd_shape" / "model.safetensors")


def make_odd_biases(source: Path, scratch: Path) -> None:
    """A Qwen2 model with a bias gone, and one where it has none."""
    (scratch / "odd_biases").mkdir()
    tensors = load_file(source / "model.safetensors")
    del tensors["model.layers.1.self_attn.q_proj.bias"]
    tensors["model.layers.0.self_attn.o_proj.bias"] = torch.zeros(64)
    save_file(tensors, scratch / "odd_biases" / "model.safetensors")


@pytest.mark.parametrize(("nproc", "num_passed"), [(1, [1] * 6), (2, [4, 4, 3, 3, 3, 1]), (4, [6, 6, 3, 3, 3, 0])])
def test_every_layout_is_the_same_model(
    nproc: int, num_passed: list[int], server: ForkServer, reference: Path, folders: list[Path], tmp_path: Path
) -> None:
    """`num_passed`: layouts that fit the model; two layers make no four stages, nor three groups two shards."""
    by_name = {folder.name: folder for folder in folders}
    make_odd_folders(by_name["untied"], tmp_path)
    make_odd_biases(by_name["qwen2_untied"], tmp_path)
    output = server.run(CASES, nproc, reference, tmp_path, *folders, timeout=600).passed().output
    assert [output.count(f"passed {name} ") for name in by_name] == num_passed
    assert output.count("done") == nproc


def test_llama3_scaling_shows_at_these_lengths(reference: Path, folders: list[Path]) -> None:
    """Unscaled angles give other logits by a hundred times the tolerance: the match above is no accident."""
    expected = torch.load(reference)["llama3"]
    folder = next(folder for folder in folders if folder.name == "llama3")
    unscaled = {"rope_type": "default", "rope_theta": 500_000.0}
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, rope_parameters=unscaled)
    with torch.no_grad():
        found = torch.cat([model(ids[None]).logits[0] for ids in expected["microbatches"][0]])
    assert (found - expected["logits"][0]).abs().max() > 1e-3
