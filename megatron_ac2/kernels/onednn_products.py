"""fp32 matrix products by oneDNN, where torch's own operators would call a BLAS that leaves AVX-512 idle.

torch's x86 wheels multiply fp32 matrices with MKL, which takes its AVX-512 kernels on Intel's processors alone; oneDNN,
which is in the same wheels, asks the processor what it can do. torch reaches it through the operator that its compiler
emits for linear layers.
"""

from __future__ import annotations

import torch
from torch import Tensor

_LEAST = 1 << 26  # multiplications: below, making a kernel for a new shape (0.3 ms to 1 ms) costs what it gains


def suits(rows: int, like: Tensor) -> bool:
    """Whether `product` may take, and is the faster for, products of `rows` by `like` [V, H] and its transposed."""
    return (
        like.device.type == "cpu"
        and like.dtype == torch.float32
        and rows * like.numel() >= _LEAST
        and torch.backends.mkldnn.is_available()
        and torch.backends.mkldnn.enabled
        and torch.cpu._is_avx512_supported()
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    )


def product(left: Tensor, right: Tensor, bias: Tensor | None = None) -> Tensor:
    """left [m, k] @ right [k, n] + bias [n], accumulated in fp32; each of the two may be a transposed view."""
    return torch.ops.mkldnn._linear_pointwise(_rows_together(left), right.t(), bias, "none", [], "")


def _rows_together(matrix: Tensor) -> Tensor:
    """`matrix`, a contiguous copy if it is a transposed view: the operator would make one, but on one thread alone, as
    torch copies any transposed matrix. With a third dimension it takes all of them."""
    if matrix.is_contiguous() or matrix.shape[1] % 2:
        return matrix
    found = torch.empty(matrix.shape, dtype=matrix.dtype)
    found.unflatten(1, (2, -1)).copy_(matrix.unflatten(1, (2, -1)))
    return found
