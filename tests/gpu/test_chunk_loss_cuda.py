"""The chunk loss on a GPU: its Triton kernels, which are chosen there, and torch's operators, against float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from megatron_ac2.kernels.chunk_loss_backend import uses_triton
from tests.unit.chunk_loss_triton_cases import CASES, Inputs, errors, too_large

pytestmark = pytest.mark.gpu
# Several blocks and several tiles, with overhang in each direction.
LARGE = {"tokens": 700, "vocab": 5003, "width": 5120, "hidden": 520, "tile_rows": 288}
FLOAT64_OF_FP32 = 3e-5  # longer sums than those of the small cases


@pytest.mark.parametrize("name", CASES)
def test_triton_equals_float64(name):
    assert uses_triton(Inputs(CASES[name], "cuda").weight, "auto")
    assert not too_large(CASES[name], errors(CASES[name], "auto", "cuda"))


@pytest.mark.parametrize("name", ["default", "score centering", "entropy", "two walks", "some rows"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_triton_equals_float64_in_whole_blocks(name, dtype):
    found = errors(replace(CASES[name], dtype=dtype, **LARGE), "auto", "cuda")
    bound = {torch.float32: FLOAT64_OF_FP32, torch.bfloat16: 1e-2}[dtype]
    assert not {what: error for what, error in found.items() if not error < bound}


@pytest.mark.parametrize("name", ["default", "score centering", "entropy", "two walks", "some rows"])
def test_torch_equals_float64(name):
    assert not too_large(CASES[name], errors(CASES[name], "torch", "cuda"))


def test_memory_is_flat_in_tokens():
    peaks = []
    for tokens in (1000, 4000):
        inputs = Inputs(replace(CASES["default, bf16"], **(LARGE | {"tokens": tokens})), "cuda")
        inputs.fused("triton")  # compiles
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        inputs.fused("triton")
        own = 3 * inputs.hidden.numel() * inputs.hidden.element_size()  # a copy, its gradient, one more
        peaks.append(torch.cuda.max_memory_allocated() - before - own)
    logits = 5003 * 3000 * 2
    assert peaks[1] - peaks[0] < 0.1 * logits
