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
import triton.language as tl
from torch import Tensor

from megatron_ac2.kernels.chunk_loss_tiled import merge_repeated
from megatron_ac2.kernels.vocab_shards import NO_COLUMNS, NUM_STATISTICS, merged

INTERPRETED = triton.knobs.runtime.interpret  # TRITON_INTERPRET=1 when this module was imported: CPU tensors, for tests
_SAMPLE = 256  # logits a row that the reference c is taken from
_MAX_EXCESS = 34.0  # of the maximum over c, in nats: beyond, c was a poor guess
_ALIGN = 64  # elements between rows of the tile: cuBLAS wants them aligned, whatever the vocabulary
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


def blocks_for(weight: Tensor) -> Blocks:
    """For the tensor's device and type. 114 KiB of shared memory or more a program only where the chip has it."""
    if not weight.is_cuda:
        return Blocks(16, 16, 16, 1, 1, 2)
    if weight.dtype == torch.float32:
        return Blocks(64, 128, 32, 8, 2)
    major, _ = torch.cuda.get_device_capability(weight.device)
    return Blocks(128, 256, 64, 8, 3) if major in (9, 10) else Blocks(128, 128, 32, 8, 3)


@triton.jit
def _logits_kernel(
    hidden, weight, reference, tile, partial, num_rows, columns, width, hidden_stride, weight_stride, tile_stride,
    scale, BLOCK_T: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_H: tl.constexpr, GROUP: tl.constexpr,
    EVEN_H: tl.constexpr, STORE: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Of one block: maximum m, sum e^(z - m), sum e^(z - m) (z - m) of each row -> partial [3, vocabulary blocks, n];
    with STORE, e^(z - reference) -> tile [n, tile_stride]."""
    row_blocks = tl.cdiv(num_rows, BLOCK_T)
    column_blocks = tl.cdiv(columns, BLOCK_V)
    program = tl.program_id(0)
    first = program // (GROUP * column_blocks) * GROUP
    group = tl.minimum(row_blocks - first, GROUP)
    within = program % (GROUP * column_blocks)
    column_block = within // group
    rows = (first + within % group) * BLOCK_T + tl.arange(0, BLOCK_T)
    cols = column_block * BLOCK_V + tl.arange(0, BLOCK_V)
    depth = tl.arange(0, BLOCK_H)
    # Blocks that overhang read the last row again; what comes of it is masked below.
    left = hidden + tl.minimum(rows, num_rows - 1).to(tl.int64)[:, None] * hidden_stride + depth[None, :]
    right = weight + tl.minimum(cols, columns - 1).to(tl.int64)[:, None] * weight_stride + depth[None, :]
    logits = tl.zeros((BLOCK_T, BLOCK_V), dtype=tl.float32)
    for start in range(0, width, BLOCK_H):
        if EVEN_H:
            x = tl.load(left)
            y = tl.load(right)
        else:
            x = tl.load(left, mask=depth[None, :] < width - start, other=0.0)
            y = tl.load(right, mask=depth[None, :] < width - start, other=0.0)
        if WIDEN:  # The interpreter multiplies the bit patterns of bf16.
            x = x.to(tl.float32)
            y = y.to(tl.float32)
        logits = tl.dot(x, tl.trans(y), logits, input_precision="ieee")
        left += BLOCK_H
        right += BLOCK_H
    own_rows = rows < num_rows
    own_cols = cols < columns
    logits = tl.where(own_cols[None, :], logits * scale, float("-inf"))
    maximum = tl.max(logits, 1)
    logits -= maximum[:, None]
    weights = tl.exp(logits)
    place = partial + column_block * num_rows + rows
    tl.store(place, maximum, mask=own_rows)
    tl.store(place + column_blocks * num_rows, tl.sum(weights, 1), mask=own_rows)
    products = tl.where(own_cols[None, :], weights * logits, 0.0)
    tl.store(place + 2 * column_blocks * num_rows, tl.sum(products, 1), mask=own_rows)
    if STORE:
        shift = tl.exp(maximum - tl.load(reference + rows, mask=own_rows, other=0.0))
        where = tile + rows.to(tl.int64)[:, None] * tile_stride + cols[None, :]
        entries = (weights * shift[:, None]).to(tile.dtype.element_ty)
        tl.store(where, entries, mask=own_rows[:, None] & own_cols[None, :])


@triton.jit
def _pick_kernel(
    hidden, weight, ids, picked, num_ids, columns, width, hidden_stride, weight_stride, scale, BLOCK: tl.constexpr
):  # fmt: skip
    """The scaled logits of ids [n, K], 0 for those elsewhere: fp32 products and sums."""
    place = tl.program_id(0).to(tl.int64)
    row = tl.load(ids + place)
    left = hidden + place // num_ids * hidden_stride
    right = weight + tl.minimum(row, columns - 1) * weight_stride
    depth = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(0, width, BLOCK):
        mask = depth < width - start
        x = tl.load(left + start + depth, mask=mask, other=0.0).to(tl.float32)
        y = tl.load(right + start + depth, mask=mask, other=0.0).to(tl.float32)
        total += x * y
    logit = tl.sum(total, 0) * scale
    tl.store(picked + place, tl.where(row < columns, logit, 0.0))


@triton.jit
def _entropy_kernel(tile, constants, slopes, columns, tile_stride, BLOCK: tl.constexpr):
    """w -> w (constant + slope log w), in place: constant and slope are the row's."""
    row = tl.program_id(0)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < columns
    place = tile + row.to(tl.int64) * tile_stride + cols
    weights = tl.load(place, mask=mask, other=0.0).to(tl.float32)
    logs = tl.log(tl.where(weights > 0, weights, 1.0))
    found = weights * (tl.load(constants + row) + tl.load(slopes + row) * logs)
    tl.store(place, found.to(tile.dtype.element_ty), mask=mask)


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

    def gradients(
        self, hidden: Tensor, ids: Tensor, slopes: Tensor, entropy_slopes: Tensor, log_norm: tuple[Tensor, Tensor],
        entropy: Tensor, weight_gradient: Tensor | None, need_hidden: bool,
    ) -> Tensor | None:  # fmt: skip
        """d loss / d hidden [n, H], this rank's part; d loss / d weight is added to `weight_gradient`.

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
            _logits_kernel[(triton.cdiv(num_rows, blocks.tokens) * column_blocks,)](
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
            _pick_kernel[(ids.numel(),)](
                hidden, self.weight, ids.contiguous(), picked, ids.shape[1], self.columns, hidden.shape[1],
                hidden.stride(0), self.weight.stride(0), 1 / self.temperature, BLOCK=1024, num_warps=4,
            )  # fmt: skip
        return picked

    def _add_entropy(self, tile: Tensor, constants: Tensor, slopes: Tensor) -> None:
        with torch.cuda.device_of(tile):
            _entropy_kernel[(len(tile), triton.cdiv(self.columns, _ELEMENTS))](
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
