"""A float64 double of an emulated linear layer, from torch's casts and loops alone."""

from __future__ import annotations

import math

import torch

E4M3 = torch.float8_e4m3fn


def cast(piece: torch.Tensor, scale: float, dtype: torch.dtype) -> torch.Tensor:
    limit = torch.finfo(dtype).max
    return (piece.float() * scale).clamp(-limit, limit).to(dtype).double() / scale


def rounded(matrix: torch.Tensor, block: tuple[int, int] | None, dtype: torch.dtype) -> torch.Tensor:
    """Block by block, or as one tensor; float64 of exact products with a power of two, else to fp32's precision."""
    limit = torch.finfo(dtype).max
    if block is None:
        amax = matrix.abs().max().item()
        return cast(matrix, limit / amax, dtype) if amax else matrix.double()
    result = torch.empty(matrix.shape, dtype=torch.float64)
    for top in range(0, matrix.shape[0], block[0]):
        for left in range(0, matrix.shape[1], block[1]):
            part = (slice(top, top + block[0]), slice(left, left + block[1]))
            amax = matrix[part].abs().max().item()
            scale = 2.0 ** math.floor(math.log2(limit / amax)) if amax else 1.0
            result[part] = cast(matrix[part], scale, dtype)
    return result


BLOCKS = {"tensorwise": (None, None, None), "blockwise": ((1, 128), (128, 128), (128, 1)),
          "mxfp8": ((1, 32), None, (32, 1))}  # fmt: skip


def linear(
    inputs: torch.Tensor, weight: torch.Tensor, gradient: torch.Tensor, recipe: str, backward: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """[T, in], [out, in], [T, out] -> output, gradient of the inputs, gradient of the weight; float64."""
    row, square, column = BLOCKS[recipe]
    forward_weight, dgrad_weight = (square, square) if recipe != "mxfp8" else (row, column)
    output = rounded(inputs, row, E4M3) @ rounded(weight, forward_weight, E4M3).T
    dgrad = rounded(gradient, row, backward) @ rounded(weight, dgrad_weight, E4M3)
    wgrad = rounded(gradient, column, backward).T @ rounded(inputs, column, E4M3)
    return output, dgrad, wgrad
