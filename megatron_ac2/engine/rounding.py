"""Weights as a quantised engine would compute with them: quantised and dequantised on their way to it.

A real rounding to eight bits, one scale an output channel (the row's largest magnitude), as weight-only int8 and fp8
serving does. It makes the sampler differ from the trainer on purpose: docs/ALGORITHM.md §6, examples/mismatch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch

from megatron_ac2.model.fp8_rounding import largest, round_codes
from megatron_ac2.model.hf_table import LM_HEAD
from megatron_ac2.types import UserError

NamedTensors = Iterator[tuple[str, torch.Tensor]]
KINDS = ("none", "fp8_e4m3", "int8")

_LARGEST = {"fp8_e4m3": largest(torch.float8_e4m3fn), "int8": 127.0}
_KEPT = frozenset({"model.embed_tokens.weight", LM_HEAD})  # look-up table and output layer stay in full precision
_ROUTER = ".mlp.gate.weight"  # so does what chooses experts, in int8 and fp8 serving too


class RoundingError:
    """Relative Frobenius error over every matrix that was rounded: ||rounded - exact|| / ||exact||."""

    def __init__(self) -> None:
        self._squared_error = self._squared_norm = 0.0

    def add(self, exact: torch.Tensor, rounded: torch.Tensor) -> None:
        exact = exact.double()
        self._squared_error += (rounded.double() - exact).square().sum().item()
        self._squared_norm += exact.square().sum().item()

    @property
    def relative(self) -> float:
        return math.sqrt(self._squared_error / self._squared_norm) if self._squared_norm else 0.0


def is_rounded(name: str, tensor: torch.Tensor) -> bool:
    """Whether a Hugging Face tensor is a linear layer's matrix: norms are vectors; the vocabulary's and routers' are
    kept."""
    return tensor.dim() == 2 and name not in _KEPT and not name.endswith(_ROUTER)


def round_weights(named_tensors: NamedTensors, kind: str, error: RoundingError | None = None) -> NamedTensors:
    """The stream with q, k, v, o, gate, up and down projections rounded; the rest passes as it is.

    `error` takes note of what the rounding changed. Raises `UserError` for an unknown kind, before the first tensor is
    drawn: a stream that runs collectives would hang the ranks that did draw.
    """
    if kind not in KINDS:
        raise UserError(f"engine.rounding: found {kind!r}, accepted: {', '.join(KINDS)}")
    return named_tensors if kind == "none" else _rounded(named_tensors, kind, error)


def _rounded(named_tensors: NamedTensors, kind: str, error: RoundingError | None) -> NamedTensors:
    for name, tensor in named_tensors:
        if is_rounded(name, tensor):
            rounded = quantise_dequantise(tensor, kind)
            if error is not None:
                error.add(tensor, rounded)
            tensor = rounded
        yield name, tensor


def quantise_dequantise(matrix: torch.Tensor, kind: str) -> torch.Tensor:
    """[output, input] -> the same shape, dtype and device, rounded to `kind` ("int8" or "fp8_e4m3") and back.

    With scale = max |row| / 127 (int8, symmetric) or / 448 (torch.float8_e4m3fn): at most scale / 2 off for int8, a
    relative 2^-4 or scale 2^-10 for fp8. Rounding twice changes nothing more. Rows of zeros stay, and so do rows with
    an inf or NaN: a diverged trainer must not look healthy in its engine.
    """
    exact = matrix if matrix.dtype == torch.float64 else matrix.float()
    largest_code = _LARGEST[kind]
    row_max = exact.abs().amax(dim=1, keepdim=True)
    usable = (row_max > 0) & row_max.isfinite()
    divisor = torch.where(usable, row_max, torch.ones_like(row_max))
    # Not / (row_max / 127): that scale is zero for rows of subnormals, and rounds, so that twice were not once.
    codes = torch.where(usable, exact / divisor, torch.zeros_like(exact)) * largest_code
    rounded = _CODES[kind](codes).to(exact.dtype) / largest_code * divisor
    return torch.where(usable, rounded, exact).to(matrix.dtype)


_CODES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "int8": lambda codes: codes.round().to(torch.int8),
    "fp8_e4m3": lambda codes: round_codes(codes, torch.float8_e4m3fn),
}
