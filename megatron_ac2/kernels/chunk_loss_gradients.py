"""From an objective's slopes by the scores to d(hidden) and d(weight), tile by tile, handed out once to autograd."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_ac2.kernels.chunk_loss_backend import Tile
from megatron_ac2.kernels.chunk_loss_walk import Walk
from megatron_ac2.kernels.vocab_logprobs import TokenLogprobs
from megatron_ac2.kernels.vocab_shards import RowSums, accumulator_of

_NARROWED_AT_ONCE = 1 << 22  # elements
_DENSE = 0.7  # share of a tile's rows with a slope from which on leaving the others out costs more than it spares


class Gradients:
    """d loss / d hidden and d loss / d weight, filled tile by tile, then finished, and handed out once."""

    def __init__(self, hidden: Tensor, weight: Tensor, dtype: torch.dtype | None, num_tiles: int):
        dtype = dtype or (accumulator_of(weight) if num_tiles > 1 else weight.dtype)
        self.hidden = torch.zeros_like(hidden) if hidden.requires_grad else None
        # A first tile writes what the others add to: zeros would be another pass over [V, H].
        self.weight = torch.empty_like(weight, dtype=dtype) if weight.requires_grad else None
        self._written = 0  # rows of `weight`

    def add(self, walk: Walk, tile: Tile, live: Live, scores: TokenLogprobs, sums: RowSums, slopes: Slopes) -> None:
        """Of the live rows, which the tile holds; scores, sums and slopes are of all rows of the part."""
        kept, where = live.kept, live.where
        gradient = tile.gradients(
            walk.inputs(where), walk.ids[where], slopes.logprobs[kept], slopes.entropy[kept],
            (sums.reference[kept], sums.log_mass[kept]), scores.entropy[kept], self.weight, self.hidden is not None,
            is_first=not self._written,
        )  # fmt: skip
        self._written = walk.columns
        if gradient is not None:
            self.hidden[where if walk.rows is None else walk.rows[where]] = gradient

    def finish(self) -> Gradients:
        """After all tiles: rows of `weight` that none has written, of padding or of a loss without slopes, are 0."""
        if self.weight is not None:
            self.weight[self._written :] = 0
        return self


@dataclass(frozen=True, slots=True)
class Live:
    """The rows of a part that have a slope, or all where it has few others: among the part's, and among all."""

    kept: slice | Tensor
    where: slice | Tensor


@dataclass(frozen=True, slots=True)
class Slopes:
    """d loss / d scores."""

    logprobs: Tensor  # [n, 1 + k]
    entropy: Tensor  # [n]

    def live(self, part: slice) -> Live | None:
        """Of slopes that are the part's; None where all are 0."""
        rows = (self.logprobs.any(1) | self.entropy.bool()).nonzero().squeeze(1)
        if len(rows) >= _DENSE * len(self.entropy):
            return Live(slice(None), part) if len(rows) else None
        return Live(rows, part.start + rows) if len(rows) else None

    def __getitem__(self, part: slice) -> Slopes:
        return Slopes(self.logprobs[part], self.entropy[part])


class Attached(torch.autograd.Function):
    """The loss that was computed, with the gradients that were. They are handed out once, lest they be held twice."""

    @staticmethod
    def forward(ctx, hidden, weight, loss, gradients):  # type: ignore[no-untyped-def]
        ctx.gradients, ctx.dtypes = gradients, (hidden.dtype, weight.dtype)
        return loss.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx, scale):  # type: ignore[no-untyped-def]
        if ctx.gradients is None:
            raise RuntimeError("the gradients of a chunk loss are gone after one backward pass: call chunk_loss again")
        found, ctx.gradients = (ctx.gradients.hidden, ctx.gradients.weight), None
        return *(_scaled(x, scale, dtype) for x, dtype in zip(found, ctx.dtypes, strict=True)), None, None


def _scaled(gradient: Tensor | None, scale: Tensor, dtype: torch.dtype) -> Tensor | None:
    """gradient * scale in `dtype`, in the gradient's own memory: there is none for a second d(weight)."""
    if gradient is None:
        return None
    if gradient.dtype == dtype or gradient.element_size() < dtype.itemsize:
        # Looking at a number stalls a GPU, and spares a CPU a pass over [V, H].
        is_one = scale.device.type == "cpu" and scale.item() == 1
        return (gradient if is_one else gradient.mul_(scale)).to(dtype)
    wide = gradient.view(-1)
    narrow = wide.view(dtype)[: wide.numel()]
    for start in range(0, wide.numel(), _NARROWED_AT_ONCE):
        part = slice(start, start + _NARROWED_AT_ONCE)
        narrow[part] = (wide[part] * scale).to(dtype)  # later elements of `wide` lie behind all of this
    return narrow.view(gradient.shape)
