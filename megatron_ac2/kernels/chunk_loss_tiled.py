"""chunk_loss.py's tiles with torch's own operators: GEMMs, and one exp a logit in place, in blocks that stay in cache.

A tile is [columns + 1, n]: the vocabulary runs down, tokens run along, so that a block of the vocabulary is contiguous
and a token's numbers broadcast along it. The tile first holds y = z - c, where the GEMM itself subtracts a reference c
near the row's maximum: half precision then rounds small numbers where the probability is. c is the largest of a
sample of the logits and the label's, thus never above the maximum: sum e^y >= 1, and an overflow is seen afterwards
and repaired. d loss / d z = q (e^y + a few corrections): q a number a row, and row factors are folded into the skinny
operands of the next two GEMMs, [n, H], in place of a pass over the tile.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from megatron_ac2.kernels import onednn_products
from megatron_ac2.kernels.vocab_shards import NO_COLUMNS, NUM_STATISTICS, accumulator_of

BLOCK_ROWS = {"cpu": 1024, "cuda": 16384}  # of the vocabulary, at once
_SAMPLE = 256  # logits a row that the reference c is taken from
_MAX_MASS = 1e15  # of sum e^y: beyond, c was a poor guess and the tile is computed again


class VocabTile:
    """Logits of up to `num_rows` tokens over this rank's `columns`, rebuilt for one tile of tokens after the other.

    keep_logits: the entropy has a gradient, d H / dz = -p (log p + H), which needs y itself beside its exp.
    """

    def __init__(self, weight: Tensor, columns: int, temperature: float, num_rows: int, keep_logits: bool = False):
        self.weight = weight[:columns]
        self.columns = columns
        self.temperature = temperature
        self.keep_logits = keep_logits
        self.accumulator = accumulator_of(weight)
        self._buffer = weight.new_empty((columns + 1) * num_rows)
        self._step = BLOCK_ROWS.get(weight.device.type, BLOCK_ROWS["cuda"])
        self._sample = self.weight[:: max(1, columns // _SAMPLE)]

    def scores(self, hidden: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        """hidden [n, H], local ids [n, K] (`columns` for one elsewhere; the label first) -> this rank's numbers of
        each row for vocab_shards.share, [n, 3] and [n, K]. The tile is left as `gradients` wants it."""
        statistics = torch.zeros(len(hidden), NUM_STATISTICS, dtype=self.accumulator, device=hidden.device)
        picked = statistics.new_zeros(ids.shape)
        statistics[:, 0] = NO_COLUMNS
        if not self.columns or not len(hidden):
            return statistics, picked
        label = self._label_logits(hidden, ids[:, 0])
        reference = ((self._sample @ hidden.t()) / self.temperature).amax(0)
        reference = torch.maximum(reference, label.to(hidden.dtype))
        picked, mass, moment = self._weigh(hidden, reference, ids)
        if bool((mass > _MAX_MASS).any()):
            reference = reference + self._fill(hidden, reference)[: self.columns].amax(0)
            picked, mass, moment = self._weigh(hidden, reference, ids)
        self._reference = reference.to(self.accumulator)
        picked.add_(self._reference[:, None])
        picked[:, 0] = label
        picked.masked_fill_(ids == self.columns, 0.0)
        return torch.stack([self._reference, mass, moment], 1), picked

    def refill(self, hidden: Tensor, log_norm: Tensor) -> None:
        """As `scores` leaves the tile, where the rows' log sum e^z is known."""
        if not self.columns or not len(hidden):
            return
        reference = log_norm.to(hidden.dtype)
        self._reference = reference.to(self.accumulator)
        tile = self._fill(hidden, reference)
        if not self.keep_logits:
            tile[: self.columns].exp_()

    def keep(self, rows: Tensor) -> None:
        """Leave only these of the tile's rows, ascending, int64[m]: `gradients` is then about them."""
        if not self.columns:
            return
        wide, narrow = self._tile(len(self._reference)), self._tile(len(rows))
        for block in [*self._blocks(), slice(self.columns, self.columns + 1)]:
            narrow[block] = wide[block].index_select(1, rows)  # what it overwrites has been moved before
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
        offset = (self._reference - log_norm[0]) - log_norm[1]  # log p = y + offset
        tile = self._tile(len(hidden))
        if self.keep_logits:
            self._entropy_gradient(tile, offset, slopes.sum(1), entropy_slopes, entropy)
            factor = torch.ones_like(offset)
        else:
            factor = self._factor(slopes, offset)
        self._correct(tile, ids, slopes, factor)
        factor = factor / self.temperature
        if weight_gradient is not None:
            scaled = (hidden.to(self.accumulator) * factor[:, None]).to(hidden.dtype)
            self._add_weight_gradient(weight_gradient, tile, scaled, is_first)
        if not need_hidden:
            return None
        gradient = self._hidden_gradient(tile).to(self.accumulator)
        return gradient.mul_(factor[:, None]).to(hidden.dtype)

    def _tile(self, num_rows: int) -> Tensor:
        return self._buffer[: (self.columns + 1) * num_rows].view(self.columns + 1, num_rows)

    def _blocks(self) -> list[slice]:
        return [slice(i, min(i + self._step, self.columns)) for i in range(0, self.columns, self._step)]

    def _label_logits(self, hidden: Tensor, local: Tensor) -> Tensor:
        rows = self.weight[local.clamp(max=self.columns - 1)].to(self.accumulator)
        logits = rows.mul_(hidden).sum(1) / self.temperature
        return logits.masked_fill_(local == self.columns, NO_COLUMNS)

    def _weigh(self, hidden: Tensor, reference: Tensor, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """y of the ids, [n, K], and sum e^y and sum e^y y, [n] each; the tile holds e^y from then on, or y where logits
        are kept. Where neither they nor other ids than the label's are asked for (whose y is not read: 0), a block of
        y never leaves the cache."""
        tile, logits_of = self._tile(len(hidden)), self._logits(hidden, reference)
        picked = torch.zeros_like(ids, dtype=self.accumulator)
        filled = self.keep_logits or ids.shape[1] > 1
        if filled:
            picked = self._pick(self._fill(hidden, reference), ids)
        mass, moment = torch.zeros(2, len(hidden), dtype=self.accumulator, device=tile.device)
        scratch = tile.new_empty(2, min(self._step, self.columns), len(hidden))
        # A CPU's sum of half precision widens a copy first: into memory that is there, or it faults in fresh pages.
        wide = torch.empty_like(scratch[0], dtype=self.accumulator) if tile.device.type == "cpu" else None
        for block in self._blocks():
            own, (spare, products) = tile[block], scratch[:, : block.stop - block.start]
            if self.keep_logits:
                logits, weights = own, spare
            else:
                logits, weights = spare.copy_(own) if filled else logits_of(block, spare), own
            self._exponentiate(logits, weights, products, wide, mass, moment)
        return picked, mass, moment

    def _exponentiate(
        self, logits: Tensor, weights: Tensor, products: Tensor, wide: Tensor | None, mass: Tensor, moment: Tensor
    ) -> None:
        """e^y into `weights`, its sum and that of e^y y added to `mass` and `moment`; the others are scratch."""
        torch.exp(logits, out=weights)
        mass += self._column_sums(weights, wide)
        moment += self._column_sums(torch.mul(weights, logits, out=products), wide)

    def _fill(self, hidden: Tensor, reference: Tensor) -> Tensor:
        tile, logits_of = self._tile(len(hidden)), self._logits(hidden, reference)
        for block in self._blocks():
            own = tile[block]
            own.copy_(logits_of(block, own))  # of itself, where it is there already: nothing
        return tile

    def _logits(self, hidden: Tensor, reference: Tensor) -> Callable[[slice, Tensor], Tensor]:
        """(block of the vocabulary, room for it) -> its y, in that room or in memory of its own."""
        weight, scale = self.weight, 1 / self.temperature
        if self._by_onednn(len(hidden)):
            scaled, negated = (hidden * scale).t(), -reference
            return lambda block, room: onednn_products.product(weight[block], scaled, negated)
        turned = hidden.t()
        return lambda block, room: torch.addmm(reference, weight[block], turned, beta=-1, alpha=scale, out=room)

    def _column_sums(self, block: Tensor, wide: Tensor | None) -> Tensor:
        if wide is not None and block.dtype != wide.dtype:
            block = wide[: len(block)].copy_(block)
        return block.sum(0, dtype=self.accumulator)

    def _pick(self, tile: Tensor, ids: Tensor) -> Tensor:
        return tile[ids, _positions(ids)].to(self.accumulator)

    def _factor(self, slopes: Tensor, offset: Tensor) -> Tensor:
        """q of d loss / d z = q (e^y + corrections): -sum of the slopes / sum e^y, kept away from 0, for the
        corrections are divided by it. What that adds is below rounding."""
        total = slopes.sum(1)
        least = slopes.abs().amax(1) * (torch.finfo(self.accumulator).eps / 8)
        total = torch.where(total.abs() < least, least, total)
        return -total * offset.exp()

    def _correct(self, tile: Tensor, ids: Tensor, slopes: Tensor, factor: Tensor) -> None:
        """Add slope / q to the ids' own entries, in full precision: for a sure token the two all but cancel."""
        ids, slopes = merge_repeated(ids, slopes)
        corrections = (slopes / factor[:, None]).masked_fill_((factor == 0)[:, None], 0.0)
        # Not scatter_, which copies the whole of a half-precision tile to fp32 on CPU.
        tile[ids, _positions(ids)] = corrections.add_(self._pick(tile, ids)).to(tile.dtype)

    def _entropy_gradient(
        self, tile: Tensor, offset: Tensor, total: Tensor, entropy_slopes: Tensor, entropy: Tensor
    ) -> None:
        """y -> -p (total + entropy_slope (log p + entropy)), in place."""
        constant = -(total + entropy_slopes * entropy)
        for block in self._blocks():
            logp = tile[block].to(self.accumulator).add_(offset)
            p = logp.exp()
            tile[block] = p.mul_(logp.mul_(-entropy_slopes).add_(constant))

    def _add_weight_gradient(self, gradient: Tensor, tile: Tensor, scaled: Tensor, is_first: bool) -> None:
        by_onednn = self._by_onednn(len(scaled))
        for block in self._blocks():
            if gradient.dtype == tile.dtype and not by_onednn:
                torch.addmm(gradient[block], tile[block], scaled, beta=0 if is_first else 1, out=gradient[block])
                continue
            product = onednn_products.product(tile[block], scaled) if by_onednn else tile[block] @ scaled
            gradient[block].copy_(product) if is_first else gradient[block].add_(product)

    def _hidden_gradient(self, tile: Tensor) -> Tensor:
        if not self._by_onednn(tile.shape[1]):
            return tile[: self.columns].t() @ self.weight
        gradient = tile.new_zeros(tile.shape[1], self.weight.shape[1])
        for block in self._blocks():
            gradient += onednn_products.product(tile[block].t(), self.weight[block])
        return gradient

    def _by_onednn(self, rows: int) -> bool:
        return onednn_products.suits(rows, self.weight[: self._step])


def _positions(ids: Tensor) -> Tensor:
    return torch.arange(len(ids), device=ids.device)[:, None]


def merge_repeated(ids: Tensor, slopes: Tensor) -> tuple[Tensor, Tensor]:
    """Per row, ids [n, K] sorted, each with the sum of the slopes of all its occurrences."""
    if ids.shape[1] == 1:
        return ids, slopes
    ids, order = ids.sort(dim=1, stable=True)
    groups = torch.zeros_like(ids)
    groups[:, 1:] = (ids[:, 1:] != ids[:, :-1]).cumsum(1)
    sums = torch.zeros_like(slopes).scatter_add_(1, groups, slopes.gather(1, order))
    return ids, sums.gather(1, groups)
