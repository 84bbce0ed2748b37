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
    return torch.ops.mkldnn._linear_pointwise(left, right.t(), bias, "none", [], "")
