"""A checksum of a tensor's bits by position, which adds up over blocks of columns."""

from __future__ import annotations

import torch

_MASK = (1 << 64) - 1
_BLOCK = 1 << 20  # elements widened to int64 at a time
_BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}


def checksum(tensor: torch.Tensor, first_column: int = 0) -> int:
    """Sum over elements of bits[n, k] * row[n] * column[first_column + k], modulo 2^64, for a [N] or [N, K] tensor.

    The factors are odd and pseudo-random, so one changed element always changes the sum, and swapped elements, rows or
    columns change it but for a chance of about 2^-60. Zeros of either sign and subnormal numbers count as zero, because
    a matrix unit may flush them. Raises TypeError for a dtype other than float32, bfloat16 and float16.
    """
    if tensor.dtype not in _BITS:
        raise TypeError(f"checksum: found dtype {tensor.dtype}, accepted: {', '.join(map(str, _BITS))}")
    matrix = tensor.detach().reshape(tensor.shape[0], -1)
    num_rows, num_columns = matrix.shape
    rows = _factors(0, num_rows, 1, matrix.device)
    columns = _factors(first_column, num_columns, 2, matrix.device)
    tiny = torch.finfo(tensor.dtype).tiny
    total = torch.zeros((), dtype=torch.int64, device=matrix.device)
    step = max(1, _BLOCK // max(1, num_columns))
    for start in range(0, num_rows, step):
        block = matrix[start : start + step].contiguous()
        block = block.masked_fill(block.abs() < tiny, 0.0)
        bits = block.view(_BITS[tensor.dtype]).to(torch.int64)
        total += (bits.mul_(columns).sum(1) * rows[start : start + step]).sum()
    return int(total) & _MASK


def add(first: int, second: int) -> int:
    """The checksum of two blocks together."""
    return (first + second) & _MASK


def _factors(start: int, length: int, salt: int, device: torch.device) -> torch.Tensor:
    """Odd int64 factors of positions start ... start + length - 1: two rounds of multiply and xor-shift."""
    x = torch.arange(start + 1, start + length + 1, dtype=torch.int64, device=device)
    x = (x + (salt << 40)) * -0x61C8864680B583EB
    x = (x ^ (x >> 30)) * -0x40A7B892E31B1A47
    return (x ^ (x >> 27)) | 1
