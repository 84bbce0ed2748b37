"""Weights rounded to eight bits and back, on their way to the engine."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ac2.engine.rounding import RoundingError, is_rounded, quantise_dequantise, round_weights
from megatron_ac2.types import UserError

KINDS = ("int8", "fp8_e4m3")


def matrix(rows: int = 6, columns: int = 40, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Rows of very different sizes: a scale for the whole matrix would show."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.logspace(-6, 4, rows, dtype=torch.float64)[:, None]
    return (torch.randn(rows, columns, generator=generator, dtype=torch.float64) * sizes).to(dtype)


def test_int8_hand_worked():
    # max 2.54, scale 2.54 / 127 = 0.02: 1.0 / 0.02 = 50; 0.333 / 0.02 = 16.65 -> 17; -0.009 / 0.02 = -0.45 -> 0
    row = torch.tensor([[2.54, 1.0, 0.333, -0.009, -2.54]], dtype=torch.float64)
    expected = torch.tensor([[2.54, 1.0, 0.34, 0.0, -2.54]], dtype=torch.float64)
    torch.testing.assert_close(quantise_dequantise(row, "int8"), expected, rtol=0, atol=1e-12)


def test_fp8_hand_worked():
    # max 448, scale 1. Four significant bits: 300 lies between 288 and 320, 1.06 between 1 and 1.125, 17 half-way
    # between 16 and 18 and goes to the even code, 16. Below 2^-6 steps of 2^-9: 0.0048 -> 2 / 512, -0.0009 -> 0.
    row = torch.tensor([[448.0, -300.0, 1.06, 17.0, 0.0048, -0.0009]])
    expected = torch.tensor([[448.0, -288.0, 1.0, 16.0, 2 / 512, 0.0]])
    torch.testing.assert_close(quantise_dequantise(row, "fp8_e4m3"), expected, rtol=1e-6, atol=0)
    torch.testing.assert_close(quantise_dequantise(row / 1000, "fp8_e4m3"), expected / 1000, rtol=1e-6, atol=0)


def test_int8_is_at_most_half_a_step_off_and_takes_one_of_255_values():
    exact = matrix(dtype=torch.float64)
    scale = exact.abs().amax(1, keepdim=True) / 127
    rounded = quantise_dequantise(exact, "int8")
    assert ((rounded - exact).abs() <= scale * (0.5 + 1e-9)).all()
    codes = rounded / scale
    torch.testing.assert_close(codes, codes.round(), rtol=0, atol=1e-9)
    assert not torch.equal(rounded, exact)


def test_fp8_is_at_most_a_sixteenth_off():
    exact = matrix(dtype=torch.float64)
    scale = exact.abs().amax(1, keepdim=True) / 448
    rounded = quantise_dequantise(exact, "fp8_e4m3")
    normal = exact.abs() >= scale * 2**-6
    error = (rounded - exact).abs()
    assert (error[normal] <= exact.abs()[normal] * (2**-4 + 1e-9)).all()
    assert (error <= torch.maximum(exact.abs() * 2**-4, scale * 2**-10) * (1 + 1e-6)).all()
    assert (error[normal] / exact.abs()[normal]).max() > 0.05, "three bits of mantissa round more than that"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@settings(max_examples=15)
@given(seed=st.integers(0, 2**31))
def test_rounding_twice_is_rounding_once(kind, dtype, seed):
    exact = (matrix(seed=seed) * 0.5).to(dtype)
    once = quantise_dequantise(exact, kind)
    assert once.dtype == dtype and once.shape == exact.shape
    torch.testing.assert_close(quantise_dequantise(once, kind), once, rtol=0, atol=0)
    assert torch.equal(once.abs().amax(1), exact.abs().amax(1)), "the largest of a row is its scale, and stays"


@pytest.mark.parametrize("kind", KINDS)
def test_each_output_channel_is_rounded_by_itself(kind):
    exact = matrix()
    alone = torch.cat([quantise_dequantise(row[None], kind) for row in exact])
    assert torch.equal(alone, quantise_dequantise(exact, kind))
    assert torch.equal(quantise_dequantise(-exact, kind), -quantise_dequantise(exact, kind))


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_zeros_subnormals_and_infinities(kind):
    exact = torch.tensor(
        [[0.0, 0.0, 0.0], [1e-44, -1e-44, 0.0], [math.inf, 1.0, 0.3], [1.0, math.nan, 0.3], [3e38, 1, 0]]
    )
    rounded = quantise_dequantise(exact, kind)
    torch.testing.assert_close(rounded[:4], exact[:4], rtol=0, atol=0, equal_nan=True)
    assert rounded[4].tolist() == [exact[4, 0].item(), 0.0, 0.0]


def test_only_matrices_of_linear_layers_are_rounded():
    names = ["model.layers.0.self_attn.q_proj.weight", "model.layers.3.mlp.down_proj.weight"]
    kept = ["model.embed_tokens.weight", "lm_head.weight"]
    norms = ["model.norm.weight", "model.layers.0.input_layernorm.weight", "model.layers.0.self_attn.q_norm.weight"]
    tensors = [(name, matrix()) for name in names + kept] + [(name, matrix()[0]) for name in norms]
    found = dict(round_weights(iter(tensors), "int8"))
    assert list(found) == names + kept + norms
    for name, tensor in tensors:
        assert is_rounded(name, tensor) == (name in names)
        assert torch.equal(found[name], quantise_dequantise(tensor, "int8") if name in names else tensor)
    assert torch.equal(tensors[0][1], matrix()), "the trainer's own tensor must not change"


def test_the_error_is_over_the_rounded_matrices_alone():
    # int8, max 1.27, scale 0.01: 0.004 -> 0 and 1.0 stays. Error 0.004, norm sqrt(1.27^2 + 1 + 0.004^2) = 1.616452
    row = torch.tensor([[1.27, 1.0, 0.004]], dtype=torch.float64)
    error = RoundingError()
    list(
        round_weights(iter([("a.weight", row), ("lm_head.weight", row * 100), ("norm.weight", row[0])]), "int8", error)
    )
    assert error.relative == pytest.approx(0.004 / 1.616452, rel=1e-5)
    list(round_weights(iter([("b.weight", row)]), "int8", error))
    assert error.relative == pytest.approx(0.004 / 1.616452, rel=1e-5)
    assert RoundingError().relative == 0


def test_none_passes_everything_through():
    tensors = [("a.weight", matrix())]
    ((name, tensor),) = round_weights(iter(tensors), "none")
    assert name == "a.weight" and tensor is tensors[0][1]


def test_an_unknown_kind_is_refused_before_anything_is_drawn():
    def stream():
        raise AssertionError("drawn")
        yield

    with pytest.raises(UserError, match="engine.rounding: found 'fp4', accepted: none, fp8_e4m3, int8"):
        round_weights(stream(), "fp4")
