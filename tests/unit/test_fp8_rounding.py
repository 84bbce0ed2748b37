"""FP8 rounding against hand-worked numbers, and against torch's own casts."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ac2.model.fp8_rounding import (
    BLOCKS,
    largest,
    round_blocks,
    round_codes,
    round_operand,
    round_scaled,
    round_tensor,
    scale_for,
)

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
INF, NAN = math.inf, math.nan


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("dtype", "values", "expected"),
    [
        # Four significant bits: 300 lies between 288 and 320, 17 half-way between 16 and 18 goes to the even code.
        (E4M3, [300.0, -1.06, 17.0, 19.0, 448.0], [288.0, -1.0, 16.0, 20.0, 448.0]),
        # Beyond the largest: to it. torch's own cast would give NaN.
        (E4M3, [449.0, 1e30, -470.0], [448.0, 448.0, -448.0]),
        # Below 2^-6 steps of 2^-9 = 0.001953125; half a step goes to the even code, 0.
        (E4M3, [0.0048, 2**-10, 2**-10 * 1.01, 0.0], [2 * 2**-9, 0.0, 2**-9, 0.0]),
        # Three significant bits; subnormals below 2^-14 in steps of 2^-16.
        (E5M2, [9.0, 11.0, 57344.0, 60000.0, 1e9], [8.0, 12.0, 57344.0, 57344.0, 57344.0]),
        (E5M2, [2**-16, 1.4 * 2**-16, 2**-17], [2**-16, 2**-16, 0.0]),
    ],
)
def test_codes_hand_worked(dtype: torch.dtype, values: list[float], expected: list[float]) -> None:
    assert round_codes(torch.tensor(values), dtype).tolist() == expected


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_nan_and_inf_stay_what_they_are(dtype: torch.dtype) -> None:
    rounded = round_codes(torch.tensor([INF, -INF, NAN, 1.0]), dtype)
    assert rounded[[0, 1, 3]].tolist() == [INF, -INF, 1.0] and rounded[2].isnan()
    for rounding in (
        lambda x: round_tensor(x, dtype),
        lambda x: round_blocks(x, (1, 2), dtype),
        lambda x: round_scaled(x, torch.tensor(0.25), dtype),
    ):
        rounded = rounding(torch.tensor([[INF, 1.0], [NAN, 2.0], [-INF, 4.0]]))
        assert rounded[:, 1].tolist() == [1.0, 2.0, 4.0]
        assert rounded[0, 0] == INF and rounded[1, 0].isnan() and rounded[2, 0] == -INF


def test_scales_hand_worked() -> None:
    amax = torch.tensor([2.0, 448.0, 3.0, 0.0, INF, NAN, 1e-45])
    expected = [224.0, 1.0, 448 / 3, 1.0, 1.0, 1.0, torch.finfo(torch.float32).max]
    torch.testing.assert_close(scale_for(amax, E4M3), torch.tensor(expected), rtol=1e-7, atol=0)
    # The largest power of two up to it: 224 -> 128, 1 -> 1, 149.3 -> 128. Of fp32's largest: 2^127.
    assert scale_for(amax, E4M3, power_of_two=True).tolist() == [128.0, 1.0, 128.0, 1.0, 1.0, 1.0, 2.0**127]
    assert scale_for(torch.tensor([7.0]), E5M2).tolist() == [8192.0]


@given(st.floats(2**-100, 2**100))
@settings(max_examples=200)
def test_a_power_of_two_scale_is_the_e8m0_one(amax: float) -> None:
    """OCP microscaling: the stored exponent is that of amax / largest, rounded up, so that nothing saturates."""
    amax = torch.tensor(amax).item()
    scale = scale_for(torch.tensor(amax), E4M3, power_of_two=True).item()
    assert scale == 2.0 ** -math.ceil(math.log2(amax / 448)) or math.isclose(math.log2(amax / 448) % 1, 0, abs_tol=1e-6)
    assert 224 * (1 - 1e-6) < amax * scale <= 448


def test_a_tensor_hand_worked() -> None:
    # amax 7, scale 64: 7 -> 448; 1.03 -> 65.92 -> 64 -> 1; -0.1 -> -6.4 -> -6.5 -> -0.1015625; 1e-5 -> 6.4e-4 -> 0
    found = round_tensor(torch.tensor([7.0, 1.03, -0.1, 1e-5]), E4M3)
    assert found.tolist() == [7.0, 1.0, -0.1015625, 0.0]
    assert round_tensor(torch.zeros(2, 3), E4M3).eq(0).all() and round_tensor(torch.zeros(0, 4), E4M3).shape == (0, 4)


def test_a_delayed_scale_saturates_what_outgrew_it() -> None:
    assert round_scaled(torch.tensor([1.0, 10.0, -20.0]), torch.tensor(64.0), E4M3).tolist() == [1.0, 7.0, -7.0]


def test_blocks_hand_worked() -> None:
    """1 x 2 blocks: [1, 300] has scale 1 and [1, 0.3] 256, though one is beside the other."""
    matrix = torch.tensor([[1.03, 300.0, 1.03, 0.3]])
    # scale 1: 1.03 -> 1, 300 -> 288. amax 1.03, scale 2^floor(log2 434.95) = 256: 263.68 -> 256; 76.8 -> 80 -> 0.3125
    assert round_blocks(matrix, (1, 2), E4M3).tolist() == [[1.0, 288.0, 1.0, 0.3125]]


@pytest.mark.parametrize("block", [(1, 128), (128, 1), (128, 128), (1, 32), (32, 1)])
@pytest.mark.parametrize("shape", [(128, 256), (130, 100), (5, 7)])
def test_blocks_are_rounded_on_their_own(block: tuple[int, int], shape: tuple[int, int]) -> None:
    """Against torch's cast, block by block; sizes that blocks do not divide included."""
    matrix = normal(*shape) * torch.logspace(-4, 3, shape[1])
    expected = torch.empty_like(matrix)
    for top in range(0, shape[0], block[0]):
        for left in range(0, shape[1], block[1]):
            piece = matrix[top : top + block[0], left : left + block[1]]
            exponent = math.ceil(math.log2(piece.abs().max().item() / 448))
            codes = (piece * 2.0**-exponent).to(E4M3)
            expected[top : top + block[0], left : left + block[1]] = codes.float() * 2.0**exponent
    assert torch.equal(round_blocks(matrix, block, E4M3), expected)


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_a_tensor_against_torch(dtype: torch.dtype) -> None:
    matrix = normal(40, 30) * torch.logspace(-5, 1, 30)
    scale = largest(dtype) / matrix.abs().max()
    expected = (matrix * scale).clamp(-largest(dtype), largest(dtype)).to(dtype).float() * scale.reciprocal()
    assert torch.equal(round_tensor(matrix, dtype), expected)
    assert round_tensor(matrix.bfloat16(), dtype).dtype == torch.float32


@pytest.mark.parametrize("recipe", ["tensorwise", "blockwise", "mxfp8"])
@pytest.mark.parametrize("operand", ["input", "weight", "gradient"])
def test_an_operand_is_rounded_for_both_of_its_products(recipe: str, operand: str) -> None:
    """Along what each product contracts; and rounding what is rounded changes nothing."""
    matrix = normal(64, 256) * torch.logspace(-3, 3, 256) * torch.logspace(-2, 2, 64)[:, None]
    first, second = round_operand(matrix, operand, recipe, E4M3)
    if recipe == "tensorwise":
        assert first is second and torch.equal(first, round_tensor(matrix, E4M3))
        return
    for copy, block in zip((first, second), BLOCKS[recipe][operand], strict=True):
        assert torch.equal(copy, round_blocks(matrix, block, E4M3)) and torch.equal(
            copy, round_blocks(copy, block, E4M3)
        )
    assert (first is second) == (recipe == "blockwise" and operand == "weight")


def test_the_error_is_what_the_format_allows() -> None:
    """e4m3: half a unit of the last of 4 bits, 2^-4, of normal values; a 128 x 128 block hurts small rows more."""
    matrix = normal(128, 128) * torch.logspace(-6, 2, 128)[:, None]
    error = {block: (round_blocks(matrix, block, E4M3) - matrix).abs() for block in ((1, 128), (128, 128))}
    amax = matrix.abs().amax(dim=1, keepdim=True)
    assert (error[1, 128] <= (matrix.abs() * 2**-4).clamp(min=amax * 2**-17)).all()
    assert error[128, 128][0].mean() > 3 * error[1, 128][0].mean()
