"""The cut of packed sequences over context ranks, by hand, against Transformer Engine's rule and Megatron's rotary."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.core.models.common.embeddings.rope_utils import _get_thd_freqs_on_this_cp_rank

from megatron_ac2.data.packing import num_sequences, pack, sequence_ids
from megatron_ac2.parallel.context import held_positions, length_multiple
from megatron_ac2.training import step
from megatron_ac2.training.context_parallel import held_part
from megatron_ac2.types import PackedBatch


def place(context: int, rank: int) -> SimpleNamespace:
    return SimpleNamespace(context=context, context_rank=rank, device=torch.device("cpu"))


def packed(lengths: list[int], context: int, align: int = 1) -> PackedBatch:
    """Tokens count up over the batch; each carries its own number as a field, from the second of a sequence on."""
    ends = np.cumsum([0, *lengths])
    ids = [np.arange(start, end) for start, end in zip(ends, ends[1:], strict=False)]
    rows = {"number": [x[1:].astype(np.float32) for x in ids]}
    return pack(ids, rows, [1] * len(ids), align, -1, length_multiple=length_multiple(context))


def test_two_ranks_hand_worked() -> None:
    """Eight tokens in four slices of two: rank 0 has the first and the last. One token makes a sequence of four."""
    whole = packed([8, 1], context=2)
    assert whole.cu_seqlens.tolist() == [0, 8, 12] and whole.max_seq_len == 8
    assert whole.position_ids[0, 8:].tolist() == [0, 1, 2, 3] and whole.token_ids[0, 8:].tolist() == [8, 8, 8, 8]
    first, second = (held_part(whole, place(2, rank)) for rank in range(2))
    assert first.token_ids.tolist() == [[0, 1, 6, 7, 8, 8]]
    assert second.token_ids.tolist() == [[2, 3, 4, 5, 8, 8]]
    assert first.position_ids.tolist() == [[0, 1, 6, 7, 0, 3]] and second.position_ids.tolist() == [[2, 3, 4, 5, 1, 2]]
    assert first.labels[0, :4].tolist() == [1, 2, 7, -1] and second.labels[0, :4].tolist() == [3, 4, 5, 6]
    assert first.loss_mask.tolist() == [[1, 1, 1, 0, 0, 0]] and second.loss_mask.tolist() == [[1, 1, 1, 1, 0, 0]]
    assert first.fields["number"].tolist() == [[1, 2, 7, 0, 0, 0]]
    for part in (first, second):
        assert part.context == 2 and part.cu_seqlens.tolist() == [0, 8, 12] and part.max_seq_len == 8
        assert sequence_ids(part).tolist() == [[0, 0, 0, 0, 1, 1]] and num_sequences(part) == 2


def partitioned_indices(bounds: list[int], context: int, rank: int) -> list[int]:
    """Transformer Engine's `thd_partition_indices_kernel`, token by token."""
    held = [bound // context for bound in bounds]
    found = []
    for token in range(held[-1]):
        sequence = next(i for i in range(len(held) - 1) if token < held[i + 1])
        length, index = held[sequence + 1] - held[sequence], token - held[sequence]
        offset = rank if index < length // 2 else (context - 1) * 2 - rank
        found.append(index + held[sequence] * context + length // 2 * offset)
    return found


SHAPES = dict(
    lengths=st.lists(st.integers(1, 23), max_size=5), context=st.sampled_from([2, 3, 4]), align=st.integers(1, 9)
)


@given(**SHAPES)
@settings(max_examples=60)
def test_every_rank_holds_what_transformer_engine_says(lengths, context, align) -> None:
    whole = packed(lengths, context, align)
    total = whole.token_ids.shape[1]
    assert total % align == 0 and not (whole.cu_seqlens % (2 * context)).any()
    held = held_positions(whole.cu_seqlens, context, total // context)
    for rank, positions in enumerate(held.tolist()):
        assert positions == partitioned_indices(whole.cu_seqlens.tolist(), context, rank)
    assert sorted(held.flatten().tolist()) == list(range(total))


@given(**SHAPES)
@settings(max_examples=60)
def test_megatron_rotates_by_the_positions_held(lengths, context, align) -> None:
    """Its rotary embedding picks rows of a table of angles by rank and length alone."""
    whole = packed(lengths, context, align)
    angles = torch.arange(whole.max_seq_len)
    for rank in range(context):
        part = held_part(whole, place(context, rank))
        pieces = part.position_ids[0].split((whole.cu_seqlens.diff() // context).tolist())
        for piece in pieces:
            assert piece.tolist() == _get_thd_freqs_on_this_cp_rank(rank, context, piece, angles).tolist()


@given(**SHAPES)
@settings(max_examples=60)
def test_every_loss_token_is_on_one_rank(lengths, context, align) -> None:
    parts = [held_part(packed(lengths, context, align), place(context, rank)) for rank in range(context)]
    labels = torch.cat([part.labels[part.loss_mask != 0] for part in parts])
    numbers = torch.cat([part.fields["number"][part.loss_mask != 0] for part in parts])
    ends = np.cumsum([0, *lengths])
    assert sorted(labels.tolist()) == [t for a, b in zip(ends, ends[1:], strict=False) for t in range(a + 1, b)]
    assert labels.tolist() == numbers.tolist()
    for part in parts:  # whose they are is still known
        owners = torch.from_numpy(np.searchsorted(ends, part.token_ids[0].numpy(), side="right") - 1)
        own = sequence_ids(part)[0] < len(lengths)  # the rest repeats one of them
        assert torch.equal(sequence_ids(part)[0][own], owners[own])


def test_padding_goes_on_with_the_sequence_and_then_repeats_the_longest() -> None:
    """Five tokens become eight, two become four; a third sequence of four makes sixteen."""
    whole = packed([5, 2], context=2, align=16)
    assert whole.token_ids.tolist() == [[0, 1, 2, 3, 4, 0, 1, 2, 5, 6, 5, 6, 0, 1, 2, 3]]
    assert whole.cu_seqlens.tolist() == [0, 8, 12, 16] and whole.position_ids[0, :8].tolist() == list(range(8))
    assert whole.loss_mask.tolist() == [[1, 1, 1, 1, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0]]
    assert whole.labels[0, :9].tolist() == [1, 2, 3, 4, -1, -1, -1, -1, 6]


@pytest.mark.parametrize("context", [1, 2])
def test_transformer_engine_is_told_of_no_gap_between_sequences(context: int) -> None:
    """Under context parallel it asks for padded bounds, and takes the very same tensor for: no gap."""
    seen = []
    part = held_part(packed([8, 5], context), place(context, 0))
    step._forward_step(
        print, place(context, 0), iter([part]), lambda *_, packed_seq_params, **__: seen.append(packed_seq_params)
    )
    (bounds,) = seen
    assert bounds.cu_seqlens_q.tolist() == [0, 8, 13 if context == 1 else 16]
    assert bounds.cu_seqlens_kv is bounds.cu_seqlens_q
    expected = bounds.cu_seqlens_q if context > 1 else None
    assert bounds.cu_seqlens_q_padded is expected and bounds.cu_seqlens_kv_padded is expected


def test_one_rank_holds_the_whole_batch() -> None:
    whole = packed([3, 2], context=1)
    part = held_part(whole, place(1, 0))
    assert part.token_ids.tolist() == whole.token_ids.tolist() and part.context == 1 and length_multiple(1) == 1


def test_what_cannot_be_cut_is_refused() -> None:
    with pytest.raises(ValueError, match=r"lengths \[3, 2\].*multiples of 4"):
        held_part(packed([3, 2], context=1), place(2, 0))
    with pytest.raises(ValueError, match="cut 2 ways: a whole batch"):
        held_part(held_part(packed([16], context=2), place(2, 0)), place(2, 0))
