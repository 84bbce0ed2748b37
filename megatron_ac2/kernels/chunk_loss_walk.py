"""A head over a vocabulary in shards, and the walk over its tokens: tiles of rows, scores shared between ranks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_ac2.kernels.chunk_loss_backend import Backend, Tile, default_tile_bytes, new_tile
from megatron_ac2.kernels.vocab_logprobs import TokenLogprobs
from megatron_ac2.kernels.vocab_shards import RowSums, combine, own_columns, share

_ROW_MULTIPLE = 32


@dataclass(frozen=True, slots=True)
class Head:
    """From hidden states to probabilities: softmax(hidden @ weight^T / temperature) over `vocab_size` tokens.

    weight [V / tp, H]: this tensor rank's rows, rank after rank; rows from `vocab_size` on are padding: probability 0,
    gradient 0. tp_group None: all of the vocabulary is here.
    """

    weight: Tensor
    vocab_size: int
    temperature: float = 1.0
    tp_group: dist.ProcessGroup | None = None


class Walk:
    """The tiles of one call and what every step on them needs."""

    def __init__(
        self, hidden: Tensor, head: Head, labels: Tensor, top_ids: Tensor | None, rows: Tensor | None,
        tile_bytes: int | None, backend: Backend,
    ):  # fmt: skip
        self.hidden, self.head, self.rows, self.backend = hidden, head, rows, backend
        self.has_top = top_ids is not None
        self.columns, first = own_columns(len(head.weight), head.tp_group, head.vocab_size)
        ids = labels[:, None] if top_ids is None else torch.cat([labels[:, None], top_ids], 1)
        ids = (ids if rows is None else ids[rows]) - first
        self.ids = ids.masked_fill_((ids < 0) | (ids >= self.columns), self.columns)
        tile_bytes = default_tile_bytes(hidden.device) if tile_bytes is None else tile_bytes
        # Of the shard with its padding, which is the same on every tensor rank: so are the tiles and their messages.
        self.parts = _parts(len(ids), tile_rows(len(head.weight), hidden.dtype, tile_bytes))

    def tile(self, gradients: bool, keep_logits: bool = False) -> Tile:
        num_rows = self.parts[0].stop if self.parts else 0
        return new_tile(
            self.backend, self.head.weight.detach(), self.columns, self.head.temperature, num_rows,
            gradients=gradients, keep_logits=keep_logits and gradients,
        )  # fmt: skip

    def inputs(self, part: slice | Tensor) -> Tensor:
        return self.hidden[part] if self.rows is None else self.hidden[self.rows[part]]

    def score(self, tile: Tile, part: slice) -> tuple[TokenLogprobs, RowSums]:
        statistics, logits = tile.scores(self.inputs(part), self.ids[part])
        statistics, logits = share(statistics, logits, self.head.tp_group)
        sums = combine(statistics)
        logprobs = sums.logprobs(logits)
        return TokenLogprobs(logprobs[:, 0], sums.entropy, logprobs[:, 1:] if self.has_top else None), sums


def tile_rows(columns: int, dtype: torch.dtype, tile_bytes: int) -> int:
    """The most tokens whose logits, in `dtype`, are a tile of `tile_bytes`: a multiple of _ROW_MULTIPLE if it can."""
    most = max(1, tile_bytes // ((columns + 1) * dtype.itemsize))
    return most - most % _ROW_MULTIPLE if most > _ROW_MULTIPLE else most


def _parts(num_rows: int, most: int) -> list[slice]:
    """Slices of about equal size, at most `most`, multiples of _ROW_MULTIPLE where that allows it."""
    count = -(-num_rows // most)
    size = -(-num_rows // max(count, 1))
    size = min(most, -(-size // _ROW_MULTIPLE) * _ROW_MULTIPLE)
    return [slice(start, min(start + size, num_rows)) for start in range(0, num_rows, max(size, 1))]
