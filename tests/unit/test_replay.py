from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ac2.algorithm.ragged import join_ids, split_ids
from megatron_ac2.algorithm.replay import ReplayBuffer, TargetBuffer
from megatron_ac2.types import CriticTarget, Trajectory, UserError


def trajectory(problem_id: str, number: int) -> Trajectory:
    return Trajectory(problem_id, np.full(number % 4, number, dtype=np.int32), number / 10, number)


def target(number: int) -> CriticTarget:
    tags = ("terminal", "mixed", "bootstrapped")
    return CriticTarget(f"p{number}", np.arange(number, dtype=np.int32), number % 11 / 10, tags[number % 3], number)


def contents(buffer: ReplayBuffer | TargetBuffer) -> list[tuple]:
    return [
        tuple(value.tolist() if isinstance(value, np.ndarray) else value for value in astuple(item))
        for item in buffer._items
    ]


def astuple(item) -> tuple:
    return tuple(getattr(item, name) for name in item.__slots__)


def test_replay_drops_the_oldest() -> None:
    buffer = ReplayBuffer(3)
    buffer.add([trajectory("a", 1), trajectory("b", 2)])
    buffer.add([trajectory("a", 3), trajectory("c", 4)])
    assert len(buffer) == 3
    assert {pid: [t.version for t in own] for pid, own in buffer.by_problem().items()} == {"b": [2], "a": [3], "c": [4]}


def test_replay_keeps_wrong_answers_and_groups_in_order() -> None:
    buffer = ReplayBuffer(10)
    buffer.add([trajectory("a", 0), trajectory("b", 1), trajectory("a", 2)])
    grouped = buffer.by_problem()
    assert list(grouped) == ["a", "b"]
    assert [t.reward for t in grouped["a"]] == [0.0, 0.2]


def test_one_add_larger_than_the_capacity() -> None:
    buffer = ReplayBuffer(2)
    buffer.add([trajectory("a", n) for n in range(5)])
    assert [t.version for t in buffer.by_problem()["a"]] == [3, 4]


def versions(buffer: ReplayBuffer) -> list[int]:
    return [item[3] for item in contents(buffer)]


def test_a_stale_buffer_is_replaced_whole() -> None:
    buffer = ReplayBuffer(4, kind="stale")
    buffer.add([trajectory("a", n) for n in range(4)])
    buffer.add([])  # the steps between two fillings
    assert versions(buffer) == [0, 1, 2, 3]
    buffer.add([trajectory("b", 8), trajectory("c", 9)])
    assert versions(buffer) == [8, 9]


def test_a_stale_batch_must_fit() -> None:
    buffer = ReplayBuffer(2, kind="stale")
    buffer.add([trajectory("a", 1)])
    with pytest.raises(UserError, match="replay.capacity: found 2, but a stale buffer takes 3 trajectories at once"):
        buffer.add([trajectory("a", n) for n in range(3)])
    assert versions(buffer) == [1]


def test_correct_only_keeps_what_reaches_the_reward() -> None:
    buffer = ReplayBuffer(2, kind="correct_only", correct_min_reward=0.5)
    buffer.add([trajectory("a", n) for n in (4, 5, 6, 0)])  # rewards .4, .5, .6, 0
    assert versions(buffer) == [5, 6]
    buffer.add([trajectory("b", 1), trajectory("b", 9)])  # a wrong one pushes nothing out
    assert versions(buffer) == [6, 9]
    paper = ReplayBuffer(9, kind="correct_only")
    paper.add([Trajectory("a", np.zeros(1, np.int32), reward, 0) for reward in (0.85, 6 / 7, 1.0)])
    assert len(paper) == 2


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(UserError, match="replay.kind: found 'lifo', accepted: rolling, stale, correct_only"):
        ReplayBuffer(4, kind="lifo")


@given(
    kind=st.sampled_from(["rolling", "stale", "correct_only"]),
    batches=st.lists(st.lists(st.integers(0, 10), max_size=4), max_size=6),
    cut=st.integers(0, 6),
)
def test_a_resumed_buffer_of_any_kind_goes_on_the_same(kind, batches, cut) -> None:
    whole = ReplayBuffer(5, kind, correct_min_reward=0.5)
    buffer = ReplayBuffer(5, kind, correct_min_reward=0.5)
    for number, batch in enumerate(batches):
        if number == cut:
            saved = buffer.state_dict()
            buffer = ReplayBuffer(5, kind, correct_min_reward=0.5)
            buffer.load_state_dict(saved)
        added = [trajectory(f"p{n % 3}", n) for n in batch]
        whole.add(added)
        buffer.add(added)
        assert contents(buffer) == contents(whole) and len(whole) <= 5
    flat = [n for batch in batches for n in batch]
    kept = {
        "rolling": flat[-5:],
        "stale": next((batch for batch in reversed(batches) if batch), []),
        "correct_only": [n for n in flat if n >= 5][-5:],
    }
    assert versions(whole) == kept[kind]


def test_a_smaller_capacity_loads_the_newest_of_a_stale_batch() -> None:
    buffer, smaller = ReplayBuffer(5, "stale"), ReplayBuffer(2, "stale")
    buffer.add([trajectory("a", n) for n in range(5)])
    smaller.load_state_dict(buffer.state_dict())
    assert versions(smaller) == [3, 4]


def test_old_targets_are_dropped() -> None:
    buffer = TargetBuffer(6)
    buffer.add([target(n) for n in (3, 1, 2, 3, 0)])
    assert buffer.drop_older_than(2) == 2  # versions 1 and 0
    assert [item[4] for item in contents(buffer)] == [3, 2, 3]
    assert buffer.drop_older_than(2) == 0
    buffer.add([target(n) for n in range(4, 8)])  # the capacity holds, and the oldest go first
    assert [item[4] for item in contents(buffer)] == [2, 3, 4, 5, 6, 7]
    assert buffer.drop_older_than(99) == 6 and len(buffer) == 0


def test_target_sample_is_without_replacement_and_uniform() -> None:
    buffer = TargetBuffer(10)
    buffer.add([target(n) for n in range(10)])
    counts = Counter()
    for seed in range(500):
        versions = [t.version for t in buffer.sample(4, np.random.default_rng(seed))]
        assert len(set(versions)) == 4
        counts.update(versions)
    assert all(150 < counts[n] < 250 for n in range(10))  # 200 each expected, standard deviation 11


def test_target_sample_of_a_short_buffer_is_everything() -> None:
    buffer = TargetBuffer(10)
    assert buffer.sample(4, np.random.default_rng(0)) == []
    buffer.add([target(n) for n in range(3)])
    assert sorted(t.version for t in buffer.sample(768, np.random.default_rng(0))) == [0, 1, 2]
    assert len(buffer) == 3  # sampling takes nothing out


def test_target_buffer_drops_the_oldest() -> None:
    buffer = TargetBuffer(2)
    buffer.add([target(n) for n in range(4)])
    assert sorted(t.version for t in buffer.sample(9, np.random.default_rng(0))) == [2, 3]


@pytest.mark.parametrize("count", [0, 1, 7])
@pytest.mark.parametrize(
    ("kind", "make"), [(ReplayBuffer, lambda n: trajectory(f"p{n % 3}", n)), (TargetBuffer, target)]
)
def test_state_round_trip(kind, make, count: int) -> None:
    buffer, loaded = kind(5), kind(5)
    buffer.add([make(n) for n in range(count)])
    loaded.add([make(99)])  # what was there before a load is gone after it
    saved = buffer.state_dict()
    buffer.add([make(50)])  # the state is a snapshot
    loaded.load_state_dict(saved)
    original = kind(5)
    original.add([make(n) for n in range(count)])
    assert contents(loaded) == contents(original)
    for item in loaded._items:
        assert item.response_ids.dtype == np.int32 and type(item.version) is int and type(item.problem_id) is str
    loaded.add([make(60), make(61)])  # and it is first in, first out still
    assert len(loaded) == min(5, count + 2)


def test_a_smaller_capacity_keeps_the_newest() -> None:
    buffer, smaller = ReplayBuffer(5), ReplayBuffer(2)
    buffer.add([trajectory("a", n) for n in range(5)])
    smaller.load_state_dict(buffer.state_dict())
    assert [t.version for t in smaller.by_problem()["a"]] == [3, 4]


@given(st.lists(st.lists(st.integers(0, 2**31 - 1), max_size=5), max_size=6))
@settings(max_examples=60)
def test_ragged_round_trip(rows: list[list[int]]) -> None:
    joined = join_ids([np.array(row, dtype=np.int32) for row in rows])
    assert joined["ids"].dtype == np.int32
    assert [part.tolist() for part in split_ids(joined)] == rows


def test_damaged_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match="3 stored, but their lengths add up to 4"):
        split_ids({"ids": np.arange(3), "lengths": np.array([1, 3])})
    with pytest.raises(ValueError, match="add up to 0"):
        split_ids({"ids": np.arange(3), "lengths": np.array([])})
