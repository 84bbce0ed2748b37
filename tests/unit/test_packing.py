from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ac2.data.packing import longest, num_sequences, pack, plan_microbatches, sequence_ids


def ids(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def floats(*values: float) -> np.ndarray:
    return np.array(values, dtype=np.float32)


def test_plan_hand_worked() -> None:
    # longest first: 7 -> rank 0, 5 -> rank 1, 4 -> rank 1 (5 < 7), 3 -> rank 0 (7 < 9), 1 -> rank 1 (9 < 10)
    assert plan_microbatches([3, 7, 4, 1, 5], num_ranks=2, max_tokens=8) == [[[1], [0]], [[3, 4], [2]]]


def test_a_sequence_over_the_limit_has_a_microbatch_to_itself() -> None:
    (bins,) = plan_microbatches([100, 1, 2], num_ranks=1, max_tokens=10)
    assert bins == [[0], [1, 2]]


def test_short_ranks_end_with_empty_microbatches() -> None:
    assert plan_microbatches([9, 9, 9], num_ranks=2, max_tokens=9) == [[[0], [2]], [[1], []]]
    assert plan_microbatches([5], num_ranks=3, max_tokens=9) == [[[0]], [[]], [[]]]


def test_no_sequence_still_gives_every_rank_a_microbatch() -> None:
    assert plan_microbatches([], num_ranks=2, max_tokens=9) == [[[]], [[]]]


def test_an_interleaved_pipeline_gets_whole_groups() -> None:
    assert plan_microbatches([9, 9, 9], num_ranks=1, max_tokens=9, multiple=2) == [[[0], [1], [2], []]]
    assert plan_microbatches([9, 9], num_ranks=1, max_tokens=9, multiple=2) == [[[0], [1]]]
    assert plan_microbatches([], num_ranks=1, max_tokens=9, multiple=4) == [[[], [], [], []]]


@given(
    lengths=st.lists(st.integers(1, 40), max_size=40),
    num_ranks=st.integers(1, 5),
    max_tokens=st.integers(1, 60),
    multiple=st.integers(1, 4),
)
@settings(max_examples=150)
def test_plan_invariants(lengths: list[int], num_ranks: int, max_tokens: int, multiple: int) -> None:
    plan = plan_microbatches(lengths, num_ranks, max_tokens, multiple)
    assert plan == plan_microbatches(lengths, num_ranks, max_tokens, multiple)
    assert len(plan) == num_ranks
    assert len({len(bins) for bins in plan}) == 1 and len(plan[0]) >= 1 and len(plan[0]) % multiple == 0
    assert sorted(index for bins in plan for members in bins for index in members) == list(range(len(lengths)))
    for bins in plan:
        for members in bins:
            assert len(members) <= 1 or sum(lengths[index] for index in members) <= max_tokens
    loads = [sum(lengths[index] for members in bins for index in members) for bins in plan]
    assert max(loads) - min(loads) <= max(lengths, default=0)


@pytest.mark.parametrize("arguments", [([1], 0, 4), ([1], 1, 0), ([0], 1, 4), ([1], 1, 4, 0)])
def test_plan_refuses_sizes_below_one(arguments) -> None:
    with pytest.raises(ValueError, match="must be >= 1"):
        plan_microbatches(*arguments)


def test_pack_hand_worked() -> None:
    batch = pack(
        [ids(10, 11, 12, 13), ids(20, 21)],
        {"advantages": [floats(0.5, -0.5), floats(2.0)], "logprobs": [floats(-1.0, -2.0), floats(-3.0)]},
        loss_starts=[2, 1],
        align=4,
        pad_id=99,
    )
    assert batch.token_ids.tolist() == [[10, 11, 12, 13, 20, 21, 10, 11]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 0, 1, 0, 1]]
    assert batch.labels.tolist() == [[11, 12, 13, 99, 21, 99, 99, 99]]
    assert batch.loss_mask.tolist() == [[0, 1, 1, 0, 1, 0, 0, 0]]
    assert batch.fields["advantages"].tolist() == [[0, 0.5, -0.5, 0, 2.0, 0, 0, 0]]
    assert batch.fields["logprobs"].tolist() == [[0, -1.0, -2.0, 0, -3.0, 0, 0, 0]]
    assert batch.cu_seqlens.tolist() == [0, 4, 6, 8]
    assert batch.max_seq_len == 4


def test_pack_dtypes() -> None:
    batch = pack([ids(1, 2)], {"x": [np.array([1.0])]}, [1], 1, 0)
    assert batch.token_ids.dtype == batch.position_ids.dtype == batch.labels.dtype == torch.int64
    assert batch.loss_mask.dtype == batch.fields["x"].dtype == torch.float32
    assert batch.cu_seqlens.dtype == torch.int32


def test_pack_rows_hand_worked() -> None:
    """Two recorded tokens a position: ids stay integers, beyond what float32 holds (2**24 + 1), rows stay whole."""
    batch = pack(
        [ids(10, 11, 12), ids(20, 21)],
        {
            "top_ids": [np.array([[11, 7], [12, 2**24 + 1]], dtype=np.int32), np.array([[21, 9]], dtype=np.int32)],
            "top_logprobs": [np.array([[-1.0, -2.0], [-0.5, -np.inf]]), np.array([[-3.0, -4.0]])],
            "flag": [np.array([True, False]), np.array([True])],
        },
        loss_starts=[1, 1],
        align=6,
        pad_id=0,
    )
    ids_of_rows, logprobs = batch.fields["top_ids"], batch.fields["top_logprobs"]
    assert ids_of_rows.tolist() == [[[11, 7], [12, 2**24 + 1], [0, 0], [21, 9], [0, 0], [0, 0]]]
    assert logprobs.tolist() == [[[-1, -2], [-0.5, -np.inf], [0, 0], [-3, -4], [0, 0], [0, 0]]]
    assert batch.fields["flag"].tolist() == [[1, 0, 0, 1, 0, 0]]
    assert ids_of_rows.dtype == batch.fields["flag"].dtype == torch.int64 and logprobs.dtype == torch.float32


def test_sequence_ids_hand_worked() -> None:
    padded = pack([ids(1, 2, 3), ids(4, 5)], {}, [1, 1], align=4, pad_id=0)
    assert sequence_ids(padded).tolist() == [[0, 0, 0, 1, 1, 2, 2, 2]] and num_sequences(padded) == 3
    full = pack([ids(1, 2, 3), ids(4)], {}, [1, 1], align=4, pad_id=0)
    assert sequence_ids(full).tolist() == [[0, 0, 0, 1]] and num_sequences(full) == 2
    none = pack([], {}, [], align=3, pad_id=0)
    assert sequence_ids(none).tolist() == [[0, 0, 0]] and num_sequences(none) == 1
    assert sequence_ids(full).dtype == torch.int64


def test_no_padding_means_no_padding_sequence() -> None:
    batch = pack([ids(1, 2, 3), ids(4)], {}, [1, 1], align=4, pad_id=0)
    assert batch.cu_seqlens.tolist() == [0, 3, 4]


def test_padding_repeats_the_longest_sequence_as_often_as_it_takes() -> None:
    """Positions and causal attention start anew: the repeats' activations are those of the first tokens."""
    batch = pack([ids(9), ids(1, 2, 3)], {}, [1, 1], align=12, pad_id=0)
    assert batch.token_ids.tolist() == [[9, 1, 2, 3, 1, 2, 3, 1, 2, 3, 1, 2]]
    assert batch.position_ids.tolist() == [[0, 0, 1, 2, 0, 1, 2, 0, 1, 2, 0, 1]]
    assert batch.cu_seqlens.tolist() == [0, 1, 4, 7, 10, 12] and batch.max_seq_len == 3
    assert batch.loss_mask.tolist() == [[0, 1, 1] + [0] * 9] and num_sequences(batch) == 5


def test_empty_pack_is_one_masked_batch_with_every_field() -> None:
    batch = pack([], {"advantages": [], "logprobs": []}, [], align=8, pad_id=5)
    assert batch.token_ids.tolist() == [[5] * 8]
    assert batch.cu_seqlens.tolist() == [0, 8] and batch.max_seq_len == 8
    assert batch.loss_mask.sum() == 0
    assert set(batch.fields) == {"advantages", "logprobs"}
    assert all(field.shape == (1, 8) and (field == 0).all() for field in batch.fields.values())


def test_empty_pack_repeats_its_filler() -> None:
    sequences = [ids(7), ids(1, 2, 3), ids(4, 5, 6)]
    assert longest(sequences) is sequences[1] and longest([]) is None
    batch = pack([], {"x": []}, [], align=8, pad_id=5, filler=longest(sequences))
    assert batch.token_ids.tolist() == [[1, 2, 3, 1, 2, 3, 1, 2]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 0, 1, 2, 0, 1]]
    assert batch.cu_seqlens.tolist() == [0, 3, 6, 8] and not batch.loss_mask.any()
    cut = pack([], {}, [], align=8, pad_id=5, filler=ids(1, 2, 3), length_multiple=4)  # of context ranks
    assert cut.token_ids.tolist() == [[1, 2, 3, 1, 1, 2, 3, 1]] and cut.cu_seqlens.tolist() == [0, 4, 8]
    assert pack([ids(9)], {}, [1], align=2, pad_id=5, filler=ids(1)).token_ids.tolist() == [[9, 9]]


def test_the_filler_is_in_rank_0s_first_microbatch() -> None:
    lengths = [3, 9, 9, 2, 9, 1]
    plan = plan_microbatches(lengths, 2, 10)
    filler = longest([np.arange(length) + 10 * i for i, length in enumerate(lengths)])
    assert filler is not None and filler[0] // 10 in plan[0][0]


def test_empty_pack_takes_rows_from_templates() -> None:
    fields = {"top_ids": [], "advantages": []}
    batch = pack([], fields, [], align=4, pad_id=0, templates={"top_ids": np.zeros((0, 3), dtype=np.int32)})
    assert batch.fields["top_ids"].shape == (1, 4, 3) and batch.fields["top_ids"].dtype == torch.int64
    assert batch.fields["advantages"].shape == (1, 4) and batch.fields["advantages"].dtype == torch.float32
    assert not batch.fields["top_ids"].any()


def test_a_sequence_may_carry_no_loss() -> None:
    batch = pack([ids(1, 2, 3)], {"x": [floats()]}, [3], align=1, pad_id=0)
    assert batch.loss_mask.tolist() == [[0, 0, 0]]


@given(
    shapes=st.lists(st.tuples(st.integers(1, 9), st.integers(0, 8)), max_size=6),
    align=st.integers(1, 8),
)
@settings(max_examples=100)
def test_every_loss_token_is_found_where_its_logits_are(shapes, align) -> None:
    rng = np.random.default_rng(0)
    sequences = [rng.integers(0, 1000, length).astype(np.int32) for length, _ in shapes]
    starts = [max(1, min(start, length)) for length, start in shapes]
    fields = {"label": [sequence[start:].astype(np.float32) for sequence, start in zip(sequences, starts)]}
    batch = pack(sequences, fields, starts, align, pad_id=0)
    num_tokens = batch.token_ids.shape[1]
    assert num_tokens % align == 0 and batch.cu_seqlens[-1] == num_tokens
    assert num_tokens - sum(map(len, sequences)) < align or not sequences
    mask = batch.loss_mask[0].bool()
    expected = np.concatenate([[], *(sequence[start:] for sequence, start in zip(sequences, starts))])
    assert batch.labels[0][mask].tolist() == expected.tolist()
    assert batch.fields["label"][0][mask].tolist() == expected.tolist()
    assert (batch.fields["label"][0][~mask] == 0).all()
    following = batch.token_ids[0].roll(-1)
    assert (batch.labels[0][mask] == following[mask]).all()  # the next token of the same sequence
    assert not mask[batch.cu_seqlens[1:].long() - 1].any()


@given(data=st.data(), rows=st.sampled_from([(), (1,), (3,), (2, 2)]), align=st.integers(1, 8))
@settings(max_examples=100)
def test_unpacking_gives_back_every_value_where_its_token_is_predicted(data, rows, align) -> None:
    lengths = data.draw(st.lists(st.integers(1, 9), max_size=5))
    starts = [data.draw(st.integers(1, length)) for length in lengths]
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    sequences = [rng.integers(0, 1000, length).astype(np.int32) for length in lengths]
    shapes = [(length - start, *rows) for length, start in zip(lengths, starts)]
    fields = {
        "floats": [rng.standard_normal(shape).astype(np.float32) for shape in shapes],
        "ints": [rng.integers(-(2**40), 2**40, shape) for shape in shapes],
    }
    templates = {name: np.zeros((0, *rows), kind) for name, kind in (("floats", np.float64), ("ints", np.int32))}
    batch = pack(sequences, fields, starts, align, pad_id=0, templates=templates)
    owners, mask = sequence_ids(batch)[0], batch.loss_mask[0].bool()
    num_repeats = -(-(batch.token_ids.shape[1] - sum(lengths)) // max(lengths, default=align))
    assert num_sequences(batch) - len(sequences) == num_repeats
    for i, (sequence, start) in enumerate(zip(sequences, starts)):
        own = owners == i
        assert batch.token_ids[0, own].tolist() == sequence.tolist()
        for name, dtype in (("floats", torch.float32), ("ints", torch.int64)):
            field = batch.fields[name]
            assert field.shape == (*batch.token_ids.shape, *rows) and field.dtype == dtype
            assert field[0, own][start - 1 : len(sequence) - 1].numpy().tolist() == fields[name][i].tolist()
    assert not any(field[0, ~mask].any() for field in batch.fields.values())


@pytest.mark.parametrize(
    ("arrays", "templates", "message"),
    [
        ([np.zeros((1, 2)), np.zeros((1, 3))], {}, r"x has rows of float32\[2\], float32\[3\]; accepted: one shape"),
        ([np.zeros(1), np.zeros((1, 1))], {}, r"x has rows of float32\[1\], float32\[\]"),
        ([np.zeros(1), np.zeros(1, int)], {}, r"x has rows of float32\[\], int64\[\]; .* floats or integers"),
        ([np.zeros(1), np.zeros(1)], {"x": np.zeros((0, 2))}, r"x has rows of float32\[2\], float32\[\]"),
        ([np.zeros(1), np.zeros(1)], {"y": np.zeros(0)}, r"templates for \['y'\], which are no fields; .*\['x'\]"),
        ([np.array(["a"]), np.array(["b"])], {}, "x has values of <U1; accepted: floats, integers, booleans"),
    ],
)
def test_pack_refuses_rows_of_two_kinds(arrays, templates, message) -> None:
    with pytest.raises(ValueError, match=message):
        pack([ids(1, 2), ids(3, 4)], {"x": arrays}, [1, 1], 1, 0, templates)


@pytest.mark.parametrize(
    ("fields", "starts", "align", "message"),
    [
        ({}, [0], 1, r"loss_starts\[0\] is 0, accepted: 1 to 3"),
        ({}, [4], 1, r"loss_starts\[0\] is 4"),
        ({}, [1, 1], 1, "loss_starts has 2 entries for 1 sequences"),
        ({"x": [floats(1.0)]}, [1], 1, r"x\[0\] has 1 values for 2 loss tokens"),
        ({"x": []}, [1], 1, "x has 0 entries"),
        ({}, [1], 0, "align 0"),
    ],
)
def test_pack_refuses_what_does_not_match(fields, starts, align, message) -> None:
    with pytest.raises(ValueError, match=message):
        pack([ids(1, 2, 3)], fields, starts, align, 0)
