"""Which code makes chunk_loss.py's tiles: Triton on an NVIDIA GPU that can take it, torch's operators elsewhere."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Literal, TypeAlias

import torch
from torch import Tensor

from megatron_ac2.kernels.chunk_loss_tiled import VocabTile

if TYPE_CHECKING:
    from megatron_ac2.kernels.chunk_loss_triton import TritonTile

Tile: TypeAlias = "VocabTile | TritonTile"
Backend = Literal["auto", "torch", "triton"]
TRITON_DTYPES = (torch.bfloat16, torch.float32)
_TILE_BYTES = {"cpu": 144 << 20, "cuda": 1 << 30}  # a GPU reads and writes all of d(weight) once a tile
_MIN_CAPABILITY = (8, 0)  # bf16 tensor cores


def default_tile_bytes(device: torch.device) -> int:
    return _TILE_BYTES.get(device.type, _TILE_BYTES["cuda"])


def uses_triton(weight: Tensor, backend: Backend) -> bool:
    """Raises ValueError where Triton is asked for and cannot serve; "auto" then means torch."""
    if backend == "torch":
        return False
    reason = _obstacle(weight, asked_for=backend == "triton")
    if reason is not None and backend == "triton":
        raise ValueError(f"backend 'triton': {reason}")
    return reason is None


def new_tile(
    backend: Backend, weight: Tensor, columns: int, temperature: float, num_rows: int, *, gradients: bool,
    keep_logits: bool = False,
) -> Tile:  # fmt: skip
    """A tile for up to `num_rows` tokens at once; gradients: they follow the scores."""
    if not uses_triton(weight, backend):
        return VocabTile(weight, columns, temperature, num_rows, keep_logits)
    from megatron_ac2.kernels.chunk_loss_triton import TritonTile

    return TritonTile(weight, columns, temperature, num_rows if gradients else 0)


def _obstacle(weight: Tensor, asked_for: bool) -> str | None:
    """Why Triton cannot serve. Its interpreter, for tests, serves CPU tensors when asked for by name."""
    if not weight.is_cuda and not asked_for:
        return "is for GPUs"
    if find_spec("triton") is None:
        return "triton is not installed"
    if weight.dtype not in TRITON_DTYPES:
        return f"takes bfloat16 and float32, found {weight.dtype}"
    if not weight.is_cuda:
        import triton

        if triton.knobs.runtime.interpret:
            return None
        return f"needs a CUDA tensor, or TRITON_INTERPRET=1 before triton is imported; found one on {weight.device}"
    if torch.version.cuda is None:
        return "is written for NVIDIA GPUs"
    capability = torch.cuda.get_device_capability(weight.device)
    if capability < _MIN_CAPABILITY:
        return f"needs compute capability 8.0, found {capability[0]}.{capability[1]}"
    return None
