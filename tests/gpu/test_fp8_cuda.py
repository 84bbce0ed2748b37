"""FP8 on a GPU: every recipe that it runs, against bfloat16, and what the emulation says of it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import Qwen3Config

from megatron_ac2.config_training import Fp8Config, ParallelConfig
from megatron_ac2.model.build import transformer_config
from megatron_ac2.model.fp8 import RECIPES, backward_format, why_unsupported
from megatron_ac2.model.fp8_rounding import round_operand
from tests.distributed.launch import torchrun
from tests.unit.test_fp8_linear import uneven

pytestmark = pytest.mark.gpu
MODEL = Qwen3Config(
    vocab_size=250, hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=64, initializer_range=0.1, architectures=["Qwen3ForCausalLM"],
    rope_parameters={"rope_type": "default", "rope_theta": 500.0},
)  # fmt: skip


def runs_here(recipe: str) -> None:
    if reason := why_unsupported(recipe):
        pytest.skip(f"{recipe}: {reason}")


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_step_in_fp8_is_near_one_in_bfloat16(recipe: str) -> None:
    runs_here(recipe)
    output = torchrun(Path(__file__).with_name("fp8_step.py"), 1, recipe, timeout=300)
    assert f"passed {recipe}" in output


@pytest.mark.parametrize("recipe", ["tensorwise", "blockwise", "mxfp8"])
def test_the_emulation_rounds_as_transformer_engine_does(recipe: str) -> None:
    """A linear layer's three products, up to their own bfloat16: the emulation explains what bfloat16 does not."""
    runs_here(recipe)
    from megatron.core.fp8_utils import get_fp8_recipe
    from transformer_engine.pytorch import Linear, fp8_autocast

    fp8 = Fp8Config(recipe)
    config = transformer_config(MODEL, ParallelConfig(), torch.bfloat16, fp8=fp8)
    inputs = uneven(256, 512, seed=1).to("cuda", torch.bfloat16).requires_grad_()
    gradient = uneven(256, 384, seed=2).to("cuda", torch.bfloat16)
    layer = Linear(512, 384, bias=False, params_dtype=torch.bfloat16, device="cuda")
    with fp8_autocast(enabled=True, fp8_recipe=get_fp8_recipe(config)):
        output = layer(inputs)
    output.backward(gradient)
    backward = torch.float8_e5m2 if backward_format(fp8) == "hybrid" else torch.float8_e4m3fn
    (x, x_wgrad), (w, w_dgrad), (g, g_wgrad) = (
        round_operand(tensor.detach(), operand, recipe, dtype)
        for tensor, operand, dtype in (
            (inputs, "input", torch.float8_e4m3fn),
            (layer.weight, "weight", torch.float8_e4m3fn),
            (gradient, "gradient", backward),
        )
    )
    exact = (inputs.detach().float() @ layer.weight.detach().float().T).double()
    for found, emulated in ((output, x @ w.T), (inputs.grad, g @ w_dgrad), (layer.weight.grad, g_wgrad.T @ x_wgrad)):
        assert (found.double() - emulated.double()).norm() < 5e-3 * emulated.double().norm()
    assert (output.double() - exact).norm() > 1e-2 * exact.norm()
