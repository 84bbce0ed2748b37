"""FP8 rounding on any device: quantise and dequantise, with the scales that Transformer Engine computes. Pure.

Sources, in NVIDIA/TransformerEngine: scales from common/recipe/recipe_common.cuh (compute_scale_from_amax), blocks from
common/recipe/__init__.py (Float8BlockScaling: 1 x 128 for inputs and gradients, 128 x 128 for weights, powers of two;
MXFP8BlockScaling: 32 along the contraction, E8M0). A tensor that two matrix products contract along different dims is
rounded twice from its exact values, once for each. One difference, on purpose: hardware casts saturate an inf to the
largest code; here it stays an inf, for a diverged number must not look healthy. Results are fp32 (float64 of float64).
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F

Operand = Literal["input", "weight", "gradient"]
Block = tuple[int, int]  # rows x columns under one scale

# operand -> (block of the copy contracted along its columns, block of the one contracted along its rows).
# Inputs [tokens, in]: forward, weight gradient. Weights [out, in]: forward, input gradient. Gradients [tokens, out]:
# input gradient, weight gradient.
BLOCKS: dict[str, dict[Operand, tuple[Block, Block]]] = {
    "blockwise": {
        "input": ((1, 128), (128, 1)),
        "weight": ((128, 128), (128, 128)),
        "gradient": ((1, 128), (128, 1)),
    },
    "mxfp8": {
        "input": ((1, 32), (32, 1)),
        "weight": ((1, 32), (32, 1)),
        "gradient": ((1, 32), (32, 1)),
    },
}


def largest(dtype: torch.dtype) -> float:
    """448 for torch.float8_e4m3fn, 57344 for torch.float8_e5m2."""
    return torch.finfo(dtype).max


def round_codes(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Round to the nearest value of an FP8 dtype, ties to even; beyond the largest one to it; inf and NaN stay."""
    limit = largest(dtype)
    rounded = values.clamp(-limit, limit).float().to(dtype).to(values.dtype)
    return torch.where(values.isinf(), values, rounded)


def scale_for(amax: torch.Tensor, dtype: torch.dtype, power_of_two: bool = False) -> torch.Tensor:
    """What a tensor whose largest magnitude is `amax` (any shape) is multiplied by before it is rounded.

    largest / amax, or the largest power of two up to it, which is E8M0's 2^-ceil(log2(amax / largest)) as well. 1 where
    amax is 0 or not finite. The fp32 maximum where the quotient would be inf.
    """
    usable = amax.isfinite() & (amax > 0)
    # Two tensors, for torch divides a number by a tensor as number x reciprocal, which rounds twice.
    scale = torch.full_like(amax, largest(dtype)) / torch.where(usable, amax, torch.ones_like(amax))
    scale = scale.clamp(max=torch.finfo(torch.float32).max)
    if power_of_two:
        mantissa, exponent = torch.frexp(scale)  # scale = mantissa 2^exponent, mantissa in [1/2, 1)
        scale = torch.ldexp(torch.full_like(mantissa, 0.5), exponent)
    return torch.where(usable, scale, torch.ones_like(scale))


def round_scaled(values: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Rounded under a given scale, and back. Values beyond largest / scale become that."""
    return round_codes(_wide(values) * scale, dtype) * scale.reciprocal()


def round_tensor(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """One scale for the whole tensor, from its own largest magnitude (current scaling)."""
    return round_scaled(values, scale_for(largest_magnitude(values), dtype), dtype)


def largest_magnitude(values: torch.Tensor) -> torch.Tensor:
    """[]; 0 of no values."""
    values = _wide(values.detach())
    return values.abs().amax() if values.numel() else values.new_zeros(())


def round_blocks(matrix: torch.Tensor, block: Block, dtype: torch.dtype) -> torch.Tensor:
    """[rows, columns], a power-of-two scale for each block of `block` rows x columns; the last may be short."""
    rows, columns = matrix.shape
    height, width = block
    padded = F.pad(_wide(matrix), (0, -columns % width, 0, -rows % height))
    tiles = padded.unflatten(1, (-1, width)).unflatten(0, (-1, height))  # [row block, height, column block, width]
    scale = scale_for(tiles.abs().amax(dim=(1, 3), keepdim=True), dtype, power_of_two=True)
    return round_scaled(tiles, scale, dtype).flatten(2).flatten(0, 1)[:rows, :columns]


def round_operand(
    matrix: torch.Tensor, operand: Operand, recipe: str, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Copies of an operand [rows, columns] for its two matrix products, as `BLOCKS` lists them.

    `recipe`: tensorwise | blockwise | mxfp8.
    """
    if recipe == "tensorwise":
        rounded = round_tensor(matrix, dtype)
        return rounded, rounded
    along_columns, along_rows = BLOCKS[recipe][operand]
    first = round_blocks(matrix, along_columns, dtype)
    return first, first if along_rows == along_columns else round_blocks(matrix, along_rows, dtype)


def _wide(values: torch.Tensor) -> torch.Tensor:
    return values if values.dtype == torch.float64 else values.float()
