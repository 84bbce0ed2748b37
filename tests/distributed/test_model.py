"""Every layout of the model against transformers and against one process."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3ForCausalLM

from tests.distributed.launch import torchrun

CASES = Path(__file__).with_name("model_cases.py")
LENGTHS = [
    [7, 12, 5],
    [16],
    [3, 9],
]  # of the sequences of each microbatch; the totals divide by 2, as sequence parallel asks


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory, tiny_untied: Path, tiny_tied: Path) -> Path:
    """Logits from transformers and values from a hand-made head, one sequence at a time, nothing packed."""
    rng = np.random.default_rng(3)
    microbatches = [[torch.from_numpy(rng.integers(0, 250, n)) for n in lengths] for lengths in LENGTHS]
    head = torch.randn(1, 64, generator=torch.Generator().manual_seed(5)) / 64
    answers = {}
    for folder in (tiny_untied, tiny_tied):
        model = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32)
        logits, values = [], []
        with torch.no_grad():
            for sequences in microbatches:
                logits.append(torch.cat([model(ids[None]).logits[0] for ids in sequences]))
                hidden = torch.cat([model.model(ids[None]).last_hidden_state[0] for ids in sequences])
                values.append((hidden @ head.T)[:, 0])
        answers[folder.name] = {"microbatches": microbatches, "logits": logits, "values": values}
    file = tmp_path_factory.mktemp("reference") / "reference.pt"
    torch.save(answers, file)
    return file


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


@pytest.mark.parametrize("nproc", [2, 4])
def test_every_layout_is_the_same_model(
    nproc: int, reference: Path, tiny_untied: Path, tiny_tied: Path, tmp_path: Path
) -> None:
    make_odd_folders(tiny_untied, tmp_path)
    output = torchrun(CASES, nproc, reference, tiny_untied, tiny_tied, tmp_path, timeout=600)
    assert output.count("passed untied") == output.count("passed tied") >= 3
    assert output.count("done") == nproc
