"""Sequences -> microbatches balanced over data-parallel ranks -> packed tensors. Pure and deterministic."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from megatron_ac2.types import PackedBatch


def plan_microbatches(
    lengths: Sequence[int], num_ranks: int, max_tokens: int, multiple: int = 1
) -> list[list[list[int]]]:
    """[rank][microbatch] -> indices into `lengths`. Lengths in tokens.

    Every index appears exactly once. Every rank gets equally many microbatches, at least one and a multiple of
    `multiple` (short ranks end with empty ones), because each runs the same collectives. A microbatch holds at most
    `max_tokens`, except that a longer sequence has one to itself. Ranks are balanced by tokens: longest first, each to
    the least loaded rank, which is at most 4/3 of the best possible load. Raises ValueError for sizes below 1.
    """
    if min(num_ranks, max_tokens, multiple, *lengths) < 1:
        sizes = f"num_ranks {num_ranks}, max_tokens {max_tokens}, multiple {multiple}"
        raise ValueError(f"plan_microbatches: {sizes} and lengths must be >= 1")
    longest_first = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
    shares: list[list[int]] = [[] for _ in range(num_ranks)]
    loads = [0] * num_ranks
    for index in longest_first:
        rank = loads.index(min(loads))
        shares[rank].append(index)
        loads[rank] += lengths[index]
    plan = [_fill_bins(share, lengths, max_tokens) for share in shares]
    num_microbatches = math.ceil(max([1, *(len(bins) for bins in plan)]) / multiple) * multiple
    return [bins + [[] for _ in range(num_microbatches - len(bins))] for bins in plan]


def _fill_bins(longest_first: Sequence[int], lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """First fit, longest first; a bin over the limit (one long sequence) takes nothing else."""
    bins: list[list[int]] = []
    loads: list[int] = []
    for index in longest_first:
        chosen = next((b for b, load in enumerate(loads) if load + lengths[index] <= max_tokens), None)
        if chosen is None:
            bins.append([])
            loads.append(0)
            chosen = len(bins) - 1
        bins[chosen].append(index)
        loads[chosen] += lengths[index]
    return [sorted(members) for members in bins]


def pack(
    sequences: Sequence[np.ndarray],
    fields: Mapping[str, Sequence[np.ndarray]],
    loss_starts: Sequence[int],
    align: int,
    pad_id: int,
    templates: Mapping[str, np.ndarray] | None = None,
    length_multiple: int = 1,
    filler: np.ndarray | None = None,
) -> PackedBatch:
    """Lay sequences int[L_i] end to end and pad to a multiple of `align` tokens.

    Padding repeats the longest one's start, as a sequence of its own without loss. Its activations are those of the
    tokens it repeats, so that no amax of a quantised tensor sees anything new; a padding token's could be the largest.

    Before that each sequence is padded to a multiple of `length_multiple`, which context parallel asks for, and this
    padding is counted to it: the sequence begins anew behind its end. No token attends to it and it carries no loss,
    but it reads the sequence, so that its activations are new ones. A context rank may hold the repeat of a token that
    another one holds: what it sees is then in the batch, if not in its own part of it.

    Tokens from `loss_starts[i]` (>= 1) on carry loss; `fields[name][i]` is [L_i - loss_starts[i], ...], one value or
    row for each of them, placed at the position whose logits predict it: loss_starts[i] - 1 ... L_i - 2. A field
    becomes [1, T, ...], float32 of floats, int64 of integers and booleans, 0 where it has no value.

    No sequence gives one all-masked batch of the least length that still has every field: float32 [1, T], or after
    `templates[name]`, an array [0, ...] of the field's row shape and dtype. It is padding alone, which repeats the
    start of `filler` (see `longest`), or the padding token where there is none. Raises ValueError for lengths, row
    shapes or kinds of numbers that do not match.
    """
    _check_lengths(sequences, fields, loss_starts, align)
    filled = [np.resize(ids, _round_up(len(ids), length_multiple)) for ids in sequences]
    total = sum(map(len, filled))
    padded = _round_up(max(total, 1), math.lcm(align, length_multiple))
    repeated = filled if filled or filler is None else [np.resize(filler, _round_up(len(filler), length_multiple))]
    filled += _padding(repeated, padded - total, pad_id)
    segments = [len(ids) for ids in filled]
    starts = np.concatenate([[0], np.cumsum(segments)]).astype(np.int32)
    token_ids = np.concatenate(filled).astype(np.int64)
    labels = np.full(padded, pad_id, dtype=np.int64)
    loss_mask = np.zeros(padded, dtype=np.float32)
    columns = _empty_columns(fields, templates or {}, padded)
    for i, ids in enumerate(sequences):
        start, end = int(starts[i]), int(starts[i]) + len(ids)
        labels[start : end - 1] = ids[1:]
        predicting = slice(start + loss_starts[i] - 1, end - 1)
        loss_mask[predicting] = 1.0
        for name, column in columns.items():
            column[predicting] = fields[name][i]
    return PackedBatch(
        token_ids=_row(token_ids),
        position_ids=_row(np.concatenate([np.arange(length, dtype=np.int64) for length in segments])),
        labels=_row(labels),
        loss_mask=_row(loss_mask),
        cu_seqlens=torch.from_numpy(starts),
        max_seq_len=max(segments),
        fields={name: _row(column) for name, column in columns.items()},
    )


def longest(sequences: Sequence[np.ndarray]) -> np.ndarray | None:
    """The filler of the empty microbatches among which `plan_microbatches` has laid `sequences`: of all ranks.

    It is in rank 0's first one. An amax over data ranks has thus seen what an empty microbatch repeats, at the latest
    when that comes; a padding token's activations could be the largest, and would stay in delayed scaling's history.
    """
    return max(sequences, key=len, default=None)


def num_sequences(batch: PackedBatch) -> int:
    """S, each repeat that pads the end counted as one more sequence; no wait for the device."""
    return batch.cu_seqlens.shape[0] - 1


def sequence_ids(batch: PackedBatch) -> torch.Tensor:
    """int64[1, T]: which sequence each position belongs to, 0 .. S - 1; of the positions here, where the batch was cut.

    On the device of the batch, without a wait.

    A position carries the loss of the token after it, which is of the same sequence wherever `loss_mask` is not 0.
    """
    lengths = batch.cu_seqlens.diff().long() // batch.context
    indices = torch.arange(num_sequences(batch), device=lengths.device)
    return torch.repeat_interleave(indices, lengths, output_size=batch.token_ids.shape[1]).unsqueeze(0)


def _padding(sequences: Sequence[np.ndarray], num_tokens: int, pad_id: int) -> list[np.ndarray]:
    """Sequences of `num_tokens` tokens in all; see `pack`. The padding token where there is nothing to repeat."""
    longest = max(sequences, key=len, default=np.full(num_tokens, pad_id, dtype=np.int64))
    cuts = range(0, num_tokens, max(len(longest), 1))
    return [longest[: num_tokens - cut] for cut in cuts]


def _round_up(length: int, multiple: int) -> int:
    return -(-length // multiple) * multiple


def _row(values: np.ndarray) -> torch.Tensor:
    """[T, ...] -> [1, T, ...]: Megatron's batch axis."""
    return torch.from_numpy(values).unsqueeze(0)


def _empty_columns(
    fields: Mapping[str, Sequence[np.ndarray]], templates: Mapping[str, np.ndarray], length: int
) -> dict[str, np.ndarray]:
    """name -> zeros [length, ...] of the row shape and dtype that all of the field's arrays and its template share."""
    if unknown := sorted(set(templates) - set(fields)):
        raise ValueError(f"pack: templates for {unknown}, which are no fields; there are {sorted(fields)}")
    columns = {}
    for name, arrays in fields.items():
        template = [templates[name]] if name in templates else []
        rows = {(np.shape(array)[1:], _stored_dtype(name, array)) for array in [*arrays, *template]}
        if len(rows) > 1:
            found = ", ".join(sorted(f"{dtype.__name__}{list(shape)}" for shape, dtype in rows))
            raise ValueError(f"pack: {name} has rows of {found}; accepted: one shape, floats or integers")
        shape, dtype = rows.pop() if rows else ((), np.float32)
        columns[name] = np.zeros((length, *shape), dtype=dtype)
    return columns


def _stored_dtype(name: str, array: np.ndarray) -> type[np.float32] | type[np.int64]:
    kind = np.asarray(array).dtype.kind
    if kind == "f":
        return np.float32
    if kind in "iub":
        return np.int64
    raise ValueError(f"pack: {name} has values of {np.asarray(array).dtype}; accepted: floats, integers, booleans")


def _check_lengths(
    sequences: Sequence[np.ndarray],
    fields: Mapping[str, Sequence[np.ndarray]],
    loss_starts: Sequence[int],
    align: int,
) -> None:
    if align < 1:
        raise ValueError(f"pack: align {align}, must be >= 1")
    for name, column in {"loss_starts": loss_starts, **fields}.items():
        if len(column) != len(sequences):
            raise ValueError(f"pack: {name} has {len(column)} entries for {len(sequences)} sequences")
    for i, (ids, start) in enumerate(zip(sequences, loss_starts)):
        if not 1 <= start <= len(ids):
            raise ValueError(f"pack: loss_starts[{i}] is {start}, accepted: 1 to {len(ids)}, the sequence's length")
        for name, column in fields.items():
            if len(column[i]) != len(ids) - start:
                raise ValueError(f"pack: {name}[{i}] has {len(column[i])} values for {len(ids) - start} loss tokens")
