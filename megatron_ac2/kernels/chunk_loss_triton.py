"""chunk_loss.py's tiles in Triton, for CUDA: the first of the three matrix products carries the exp and the row sums.

Scoring stores no logits at all: a program multiplies a block of tokens with a block of the vocabulary and leaves three
numbers a token; they are merged like those of tensor ranks. When gradients follow, the same program also stores
w = e^(z - c), from fp32 and rounded once; c is a guess of the row's maximum (the largest of a sample of the logits and
the label's), and where it is far off the tile is stored again. d loss / d z = q (w + a few corrections): q, a number a
row, is folded into the skinny operands of the two products that are left to cuBLAS. Only an entropy gradient takes
another pass over the tile; log w is z - c to 2^-9 even in bf16, which is why w serves there as well.

The entries of picked ids are made from their own fp32 logits: of a sure token, e^(z - c) and its slope all but cancel.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from megatron_ac2.kernels.chunk_loss_tiled import merge_repeated
from megatron_ac2.kernels.chunk_loss_triton_kernels import INTERPRETED, entropy_kernel, logits_kernel, pick_kernel
from megatron_ac2.kernels.vocab_shards import NO_COLUMNS, NUM_STATISTICS, merged

_SAMPLE = 256  # logits a row that the reference c is taken from
_MAX_EXCESS = 34.0  # of the maximum over c, in nats: beyond, c was a poor guess
_ALIGN = 64  # elements between rows of the tile: cuBLAS wants them aligned, whatever the vocabulary
_MOVED_AT_ONCE = 512  # rows of the tile
_ELEMENTS = 4096  # of the tile, a program of the entropy pass


@dataclass(frozen=True, slots=True)
class Blocks:
    """How the product of hidden states and weight is cut: [tokens, vocabulary, hidden], and a program's resources."""

    tokens: int
    vocab: int
    hidden: int
    warps: int
    stages: int
    group: int = 16  # blocks of tokens that share a block of the vocabulary while it is in the cache


HOPPER = Blocks(128, 256, 64, 8, 3)  # 144 KiB of shared memory: Blackwell's data centre chips have it too
SMALLER = Blocks(128, 128, 32, 8, 3)
FULL_PRECISION = Blocks(64, 128, 32, 8, 2)  # no tensor cores
INTERPRETER = Blocks(16, 16, 16, 1, 1, 2)


def blocks_for(weight: Tensor) -> Blocks:
    if not weight.is_cuda:
        return INTERPRETER
    if weight.dtype == torch.float32:
        return FULL_PRECISION
    return HOPPER if torch.cuda.get_device_capability(weight.device)[0] in (9, 10) else SMALLER


class TritonTile:
    """VocabTile's contract (chunk_loss_tiled.py). num_rows 0: scores only, of any number of rows, without a tile."""

    def __init__(self, weight: Tensor, columns: int, temperature: float, num_rows: int, blocks: Blocks | None = None):
        self.weight = weight[:columns]
        self.columns = columns
        self.temperature = temperature
        self.blocks = blocks or blocks_for(weight)
        self._stride = -(-(columns + 1) // _ALIGN) * _ALIGN  # beyond the columns: where ids of other ranks write
        self._buffer = weight.new_empty(num_rows, self._stride) if num_rows and columns else None
        self._reference = torch.empty(0)
        self._sample = self.weight[:: max(1, columns // _SAMPLE)]

    def scores(self, hidden: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        """hidden [n, H], local ids [n, K] (`columns` for one elsewhere; the label first) -> this rank's numbers of
        each row for vocab_shards.share, fp32[n, 3] and fp32[n, K]."""
        if not self.columns or not len(hidden):
            statistics = torch.zeros(len(hidden), NUM_STATISTICS, device=hidden.device)
            statistics[:, 0] = NO_COLUMNS
            return statistics, torch.zeros(ids.shape, device=hidden.device)
        hidden = hidden.contiguous()
        picked = self._pick(hidden, ids)
        if self._buffer is None:
            return self._multiply(hidden, None), picked
        self._reference = ((hidden @ self._sample.t()).float() / self.temperature).amax(1)
        label = picked[:, 0].masked_fill(ids[:, 0] == self.columns, NO_COLUMNS)
        self._reference = torch.maximum(self._reference, label)
        statistics = self._multiply(hidden, self._reference)
        if bool((statistics[:, 0] - self._reference > _MAX_EXCESS).any()):
            self._reference = statistics[:, 0].contiguous()
            self._multiply(hidden, self._reference)
        return statistics, picked

    def refill(self, hidden: Tensor, log_norm: Tensor) -> None:
        """As `scores` leaves the tile, where the rows' log sum e^z is known."""
        self._reference = log_norm.float()
        if self.columns and len(hidden):
            self._multiply(hidden.contiguous(), self._reference)

    def keep(self, rows: Tensor) -> None:
        """Leave only these of the tile's rows, ascending, int64[m]: `gradients` is then about them."""
        if not self.columns:
            return
        for start in range(0, len(rows), _MOVED_AT_ONCE):  # what it overwrites has been moved before
            moved = rows[start : start + _MOVED_AT_ONCE]
            self._buffer[start : start + len(moved)] = self._buffer[moved]
        self._reference = self._reference[rows]

    def gradients(
        self, hidden: Tensor, ids: Tensor, slopes: Tensor, entropy_slopes: Tensor, log_norm: tuple[Tensor, Tensor],
        entropy: Tensor, weight_gradient: Tensor | None, need_hidden: bool, is_first: bool = False,
    ) -> Tensor | None:  # fmt: skip
        """d loss / d hidden [n, H], this rank's part; d loss / d weight is added to `weight_gradient`, or written to
        its first `columns` rows if it is the first.

        slopes [n, K], entropy_slopes [n]: d loss / d log p of `ids` and d entropy. log_norm: log sum e^z over all
        ranks, as a sum of two numbers a row. Uses the tile up.
        """
        if not self.columns:
            return torch.zeros_like(hidden) if need_hidden else None
        hidden = hidden.contiguous()
        offset = (self._reference - log_norm[0]) - log_norm[1]  # log p = log w + offset
        entries, factor = self._differentiate(hidden, ids, slopes, entropy_slopes, offset, entropy)
        factor = (factor / self.temperature)[:, None]
        if weight_gradient is not None:
            if is_first:
                weight_gradient[: self.columns] = 0
            add_product(weight_gradient[: self.columns], entries.t(), (hidden.float() * factor).to(hidden.dtype))
        if not need_hidden:
            return None
        return (entries @ self.weight).float().mul_(factor).to(hidden.dtype)

    def _differentiate(
        self, hidden: Tensor, ids: Tensor, slopes: Tensor, entropy_slopes: Tensor, offset: Tensor, entropy: Tensor
    ) -> tuple[Tensor, Tensor]:
        """(tile [n, columns], factor [n]): d loss / d z = factor tile.

        Without an entropy gradient factor = -(sum of the slopes) e^offset, kept away from 0, since the corrections are
        divided by it; what that adds is below rounding.
        """
        total = slopes.sum(1)
        ids, slopes = merge_repeated(ids, slopes)
        logs = self._pick(hidden, ids) - self._reference[:, None]
        own = logs.exp()
        tile = self._buffer[: len(hidden)]
        if bool(entropy_slopes.any()):
            constants = total + entropy_slopes * (offset + entropy)
            self._add_entropy(tile, constants, entropy_slopes)
            own = own * (constants[:, None] + entropy_slopes[:, None] * logs)
            factor = -offset.exp()
        else:
            least = slopes.abs().amax(1) * (torch.finfo(torch.float32).eps / 8)
            factor = -torch.where(total.abs() < least, least, total) * offset.exp()
        corrections = (slopes / factor[:, None]).masked_fill_((factor == 0)[:, None], 0.0)
        tile.scatter_(1, ids, (own + corrections).to(tile.dtype))  # ids that repeat hold the same value
        return tile[:, : self.columns], factor

    def _multiply(self, hidden: Tensor, reference: Tensor | None) -> Tensor:
        """Statistics fp32[n, 3]; with a reference, e^(z - reference) in the tile."""
        blocks, (num_rows, width) = self.blocks, hidden.shape
        column_blocks = triton.cdiv(self.columns, blocks.vocab)
        partial = torch.empty(NUM_STATISTICS, column_blocks, num_rows, device=hidden.device)
        tile = partial if reference is None else self._buffer
        with torch.cuda.device_of(hidden):
            logits_kernel[(triton.cdiv(num_rows, blocks.tokens) * column_blocks,)](
                hidden, self.weight, partial if reference is None else reference, tile, partial, num_rows,
                self.columns, width, hidden.stride(0), self.weight.stride(0), self._stride, 1 / self.temperature,
                BLOCK_T=blocks.tokens, BLOCK_V=blocks.vocab, BLOCK_H=blocks.hidden, GROUP=blocks.group,
                EVEN_H=width % blocks.hidden == 0, STORE=reference is not None, WIDEN=INTERPRETED,
                num_warps=blocks.warps, num_stages=blocks.stages,
            )  # fmt: skip
        return merged(partial.permute(2, 1, 0))

    def _pick(self, hidden: Tensor, ids: Tensor) -> Tensor:
        picked = torch.empty(ids.shape, device=hidden.device)
        with torch.cuda.device_of(hidden):
            pick_kernel[(ids.numel(),)](
                hidden, self.weight, ids.contiguous(), picked, ids.shape[1], self.columns, hidden.shape[1],
                hidden.stride(0), self.weight.stride(0), 1 / self.temperature, BLOCK=1024, num_warps=4,
            )  # fmt: skip
        return picked

    def _add_entropy(self, tile: Tensor, constants: Tensor, slopes: Tensor) -> None:
        with torch.cuda.device_of(tile):
            entropy_kernel[(len(tile), triton.cdiv(self.columns, _ELEMENTS))](
                tile, constants.contiguous(), slopes.contiguous(), self.columns, self._stride, BLOCK=_ELEMENTS,
                num_warps=8,
            )  # fmt: skip


def add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left @ right, where cuBLAS may add a half-precision product to fp32 without rounding it first."""
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    elif total.is_cuda and total.dtype == torch.float32:
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:
        total += left @ right
