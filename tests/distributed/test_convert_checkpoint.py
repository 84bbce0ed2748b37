"""Hugging Face -> Megatron -> Hugging Face, each way in another layout, bit for bit; failures leave nothing behind."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.distributed import tiny_families
from tests.distributed.fork_server import ForkServer, Job
from tests.distributed.launch import ROOT, torchrun

CASES = Path(__file__).with_name("conversion_cases.py")
TOOL = ROOT / "tools" / "convert_checkpoint.py"


@pytest.fixture(scope="module")
def megatron_untied(tmp_path_factory: pytest.TempPathFactory, tiny_untied: Path) -> Path:
    """By a process of its own, as a user would start it, with no launcher."""
    out = tmp_path_factory.mktemp("converted") / "megatron"
    command = [sys.executable, "-W", "ignore", str(TOOL), "to-megatron", str(tiny_untied), str(out), "--verify"]
    env = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=env, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert "verified bit for bit, logits as transformers' to" in done.stdout
    return out


def assert_same_tensors(found: Path, expected: Path) -> None:
    found_tensors, expected_tensors = load_file(found), load_file(expected)
    assert found_tensors.keys() == expected_tensors.keys()
    for name, tensor in expected_tensors.items():
        assert found_tensors[name].dtype == tensor.dtype and torch.equal(found_tensors[name], tensor), name


def test_one_process_in_two_by_two_out(server: ForkServer, megatron_untied: Path, tiny_untied: Path, tmp_path: Path):
    layout = ("--tensor", 2, "--pipeline", 2)
    server.run(TOOL, 4, "to-hf", megatron_untied, tmp_path / "hf", *layout, "--verify").passed()
    assert_same_tensors(tmp_path / "hf" / "model.safetensors", tiny_untied / "model.safetensors")
    config, original = (json.loads((folder / "config.json").read_text()) for folder in (tmp_path / "hf", tiny_untied))
    assert config == original
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_two_ranks_in_one_process_out_tied_bf16_with_value_head(server: ForkServer, tiny_tied: Path, tmp_path: Path):
    """The two ranks under torchrun itself."""
    source = tmp_path / "source"
    shutil.copytree(tiny_tied, source)
    tensors = {name: tensor.bfloat16() for name, tensor in load_file(source / "model.safetensors").items()}
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    save_file({"value_head.weight": torch.randn(11, 64)}, source / "value_head.safetensors")
    (source / "tokenizer.json").write_text("{}")
    chunks = ("--pipeline", 2, "--virtual-pipeline", 2)
    torchrun(TOOL, 2, "to-megatron", source, tmp_path / "megatron", *chunks, "--verify")
    server.run(TOOL, 1, "to-hf", tmp_path / "megatron", tmp_path / "hf", "--verify").passed()
    for name in ("model.safetensors", "value_head.safetensors"):
        assert_same_tensors(tmp_path / "hf" / name, source / name)
    assert (tmp_path / "hf" / "tokenizer.json").read_text() == "{}"


@pytest.mark.parametrize(("nproc", "passed"), [(1, 5), (2, 12)])
def test_one_conversion_after_another_leaves_no_state(
    nproc: int, passed: int, server: ForkServer, tiny_untied: Path, tiny_tied: Path, tmp_path: Path
):
    """Tied and untied, with a value head and with experts; each way in another layout, in the same processes."""
    critic = tmp_path / "critic"
    shutil.copytree(tiny_tied, critic)
    save_file({"value_head.weight": torch.randn(1, 64)}, critic / "value_head.safetensors")
    experts = [tiny_families.write(name, tmp_path / name) for name in tiny_families.expert_configs()]
    (tmp_path / "scratch").mkdir()
    folders = (tiny_untied, tiny_tied, critic, *experts)
    output = server.run(CASES, nproc, tmp_path / "scratch", *folders, timeout=300).passed().output
    assert output.count("passed") == passed and output.count("done") == nproc, output


def assert_refused(job: Job, words: str):
    assert job.statuses == [1] and words in job.output and "Traceback" not in job.output, job.output


def test_a_damaged_checkpoint_leaves_nothing(server: ForkServer, megatron_untied: Path, tmp_path: Path):
    damaged = tmp_path / "damaged"
    shutil.copytree(megatron_untied, damaged)
    next(damaged.glob("*.distcp")).write_bytes(b"")
    job = server.run(TOOL, 1, "to-hf", damaged, tmp_path / "hf")
    assert_refused(job, "cannot be loaded as a Megatron checkpoint")
    assert [path.name for path in tmp_path.iterdir()] == ["damaged"]


def test_mistakes_are_named(server: ForkServer, megatron_untied: Path, tiny_untied: Path, tmp_path: Path):
    broken = tmp_path / "broken"
    shutil.copytree(tiny_untied, broken)
    tensors = load_file(broken / "model.safetensors")
    del tensors["model.layers.2.mlp.up_proj.weight"]
    save_file(tensors, broken / "model.safetensors")
    for arguments, words in [
        (("to-megatron", broken, tmp_path / "out"), "model.layers.2.mlp.up_proj.weight: missing"),
        (("to-megatron", tiny_untied, megatron_untied), "exists already"),
        (("to-hf", tiny_untied, tmp_path / "out", "--tensor", 3), "no conversion.json"),
    ]:
        assert_refused(server.run(TOOL, 1, *arguments), words)
    assert [path.name for path in tmp_path.iterdir()] == ["broken"]
