"""The chunk loss in Triton: in its interpreter against float64, and compiled for Hopper, neither on a GPU.

Triton reads TRITON_INTERPRET when it is imported, hence a process of its own for each.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from megatron_ac2.kernels.chunk_loss import Head, chunk_loss
from megatron_ac2.kernels.chunk_loss_backend import default_tile_bytes, uses_triton
from tests.unit.chunk_loss_triton_cases import CASES, too_large

ROOT = Path(__file__).resolve().parents[2]
CASES_SCRIPT = Path(__file__).with_name("chunk_loss_triton_cases.py")
COMPILING_SCRIPT = Path(__file__).with_name("chunk_loss_triton_compiled.py")
BENCH = ROOT / "tools" / "bench_chunk_loss_gpu.py"
HOPPER_SHARED_BYTES = 227 << 10

needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")


def run(script: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "0"} | environment
    command = [sys.executable, "-W", "ignore", str(script), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=environment)


def results(script: Path, **environment: str) -> dict:
    done = run(script, **environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def interpreted() -> dict[str, dict[str, float]]:
    return results(CASES_SCRIPT, TRITON_INTERPRET="1")


@needs_triton
@pytest.mark.parametrize("name", CASES)
def test_interpreted_equals_float64(interpreted, name):
    assert not too_large(CASES[name], interpreted[name])


@needs_triton
@pytest.mark.parametrize("name", ["zero slopes", "scoring"])
def test_interpreted_is_exact(interpreted, name):
    assert set(interpreted[name].values()) == {0.0}


@needs_triton
@pytest.mark.parametrize("name", ["shards", "torch"])
def test_shards_of_the_vocabulary_and_torch_on_the_same_inputs(interpreted, name):
    assert not {what: error for what, error in interpreted[name].items() if not error < 1e-5}


@needs_triton
def test_kernels_compile_for_hopper(tmp_path):
    """To machine code, with tensor-core products, within a program's shared memory."""
    found = results(COMPILING_SCRIPT, TRITON_CACHE_DIR=str(tmp_path))
    assert len(found) == 5 and all(kernel["bytes"] > 0 for kernel in found.values())
    assert all(kernel["shared"] <= HOPPER_SHARED_BYTES for kernel in found.values())
    assert all((kernel["wgmma"] > 0) == name.startswith("logits") for name, kernel in found.items())


def test_choice_of_backend():
    weight = torch.zeros(4, 2)
    assert not uses_triton(weight, "auto") and not uses_triton(weight, "torch")
    with pytest.raises(ValueError, match="backend 'triton'.*float64"):
        uses_triton(weight.double(), "triton")
    assert default_tile_bytes(torch.device("cuda")) > default_tile_bytes(torch.device("cpu"))


@needs_triton
@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="is interpreted")
def test_triton_on_cpu_tensors_needs_its_interpreter():
    hidden = torch.zeros(3, 2)
    with pytest.raises(ValueError, match="needs a CUDA tensor, or TRITON_INTERPRET=1"):
        chunk_loss(
            hidden,
            Head(torch.zeros(4, 2), 4),
            torch.zeros(3).long(),
            lambda s, p: (s.labels.sum(), {}),
            backend="triton",
        )


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_bench_says_that_it_needs_a_gpu():
    done = run(BENCH)
    assert done.returncode == 2 and "needs a CUDA device" in done.stderr and "Traceback" not in done.stderr
    usage = run(BENCH, "--help")
    assert usage.returncode == 0 and "--tokens" in usage.stdout
    unknown = run(BENCH, "--kinds", "magic")
    assert unknown.returncode == 2 and "magic" in unknown.stderr


@needs_triton
def test_bench_checks_and_measures():
    options = ("--device", "cpu", "--tokens", "6", "--vocab", "70", "--hidden", "40", "--repeats", "1")
    done = run(BENCH, *options, "--kinds", "triton", "tiled", "naive", "gemms", "--blocks", TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stdout + done.stderr
    checks, table = done.stdout.split("T, V, H = (6, 70, 40), bf16")
    assert checks.count("d(weight)") == 8 and "TOO LARGE" not in checks
    assert table.count(" ms ") == 4 and table.count("TFLOP/s") == 9  # five choices of blocks
