"""The supervised stage on two ranks: it learns, and writes folders that other tools and a training run can read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from megatron_ac2.data.worked import load_worked
from tests.distributed.fork_server import ForkServer, Job
from tests.end_to_end.conftest import losses, sft


def test_policy_learns_and_its_folder_loads_in_transformers(inputs: Path, start: tuple[Path, Job]) -> None:
    folder, job = start
    found = losses(job)
    assert len(found) == 90 and found[0] > 5 and found[-1] < 0.8
    assert not losses(Job([], job.logs[1:], 0))  # rank 0 alone reports
    tokenizer = AutoTokenizer.from_pretrained(folder)
    row = load_worked(inputs / "worked.jsonl", tokenizer, tokenizer.eos_token_id)[0]
    ids = torch.from_numpy(row.token_ids).long()[None]
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(folder)(ids).logits[0, row.prompt_len - 1 : -1]
    loss = torch.nn.functional.cross_entropy(logits, ids[0, row.prompt_len :]).item()
    assert loss == pytest.approx(found[-1], abs=0.5)


@pytest.mark.parametrize(("stage", "head", "steps"), [("start", "lm", 90), ("critic", "value", 5)])
def test_cost_stands_beside_the_weights(stage: str, head: str, steps: int, request: pytest.FixtureRequest) -> None:
    folder, _ = request.getfixturevalue(stage)
    cost = json.loads((folder / "training_cost.json").read_text())
    assert (cost["head"], cost["steps"]) == (head, steps)
    assert cost["tokens"] > 32 * steps * 20 and cost["seconds"] > 0  # every row is longer than 20 tokens


def test_value_head_learns_on_the_policys_trunk(start: tuple[Path, Job], critic: tuple[Path, Job]) -> None:
    folder, job = critic
    found = losses(job)
    assert len(found) == 5 and found[-1] < found[0] < 2
    head = load_file(folder / "value_head.safetensors")
    assert sum(tensor.numel() for tensor in head.values()) >= 96
    before, after = (load_file(path / "model.safetensors") for path in (start[0], folder))
    name = "model.layers.0.mlp.down_proj.weight"
    assert before[name].shape == after[name].shape and not torch.equal(before[name], after[name])


def test_fp8_rounds_the_same_step(
    server: ForkServer, inputs: Path, start: tuple[Path, Job], critic: tuple[Path, Job], tmp_path: Path
) -> None:
    """Sequence parallel, whose ranks' shares of the tokens are padded to whole blocks; the critic's first step."""
    changes = ("sft.head=value", "sft.num_steps=1", "parallel.tensor=2", "parallel.sequence=true")
    emulated = ("fp8.recipe=blockwise", "fp8.emulate=true")
    rounded = sft(server, inputs / "worked.jsonl", start[0], tmp_path / "critic", *changes, *emulated)
    (found,), expected = losses(rounded), losses(critic[1])[0]
    assert found == pytest.approx(expected, abs=0.05)
    assert found != expected
