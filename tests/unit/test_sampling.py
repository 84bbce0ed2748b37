from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ac2.algorithm.sampling import (
    choose_prefixes,
    fresh_prefixes,
    num_cuts,
    num_fresh_at,
    route,
    singleton_prefixes,
)
from megatron_ac2.random_streams import stream
from megatron_ac2.types import Continuation, Prefix, Trajectory, UserError


def trajectory(problem_id: str, length: int, first: int = 0) -> Trajectory:
    return Trajectory(problem_id, np.arange(first, first + length, dtype=np.int32), 1.0, 0)


def prefix(problem_id: str, length: int = 0, replayed: bool = True) -> Prefix:
    return Prefix(problem_id, np.zeros(length, dtype=np.int32), replayed)


def routed(prefixes, ready, **changes):
    options = dict(audit_fraction=0.25, chunk_len=10, response_budget=50, group_size=4, rng=np.random.default_rng(0))
    return route(prefixes, ready, **{**options, **changes})


@pytest.mark.parametrize(
    ("length", "grid", "fraction", "expected"),
    [
        (0, 10, 0.9, 1),
        (11, 10, 0.9, 1),  # 0.9 * 11 = 9.9: the cut at 0 only
        (12, 10, 0.9, 2),  # 10.8: cuts 0 and 10
        (50_000, 10_000, 0.9, 5),  # the paper: 45,000, cuts 0 to 40,000
        (100, 1, 0.29, 30),  # 0.29 * 100 is 28.999999999999996, yet the cut at 29 is legal
        (30, 10, 0.0, 1),
        (30, 10, 1.0, 4),
    ],
)
def test_num_cuts(length: int, grid: int, fraction: float, expected: int) -> None:
    assert num_cuts(length, grid, fraction) == expected


def test_every_problem_once_before_any_twice() -> None:
    buffer = {name: [trajectory(name, 40)] for name in "abc"}
    slots = [p.problem_id for p in choose_prefixes(buffer, 8, 10, 0.9, np.random.default_rng(1))]
    assert sorted(slots[:3]) == ["a", "b", "c"]
    assert slots[3:6] == slots[:3] and slots[6:] == slots[:2]  # the same permutation again


def test_the_order_of_problems_is_permuted() -> None:
    buffer = {name: [trajectory(name, 40)] for name in "abcdef"}
    orders = {
        tuple(p.problem_id for p in choose_prefixes(buffer, 6, 10, 0.9, np.random.default_rng(seed)))
        for seed in range(20)
    }
    assert len(orders) > 10


def test_prefix_is_the_start_of_a_stored_trajectory() -> None:
    buffer = {"a": [trajectory("a", 25, first=100), trajectory("a", 25, first=500)]}
    for chosen in choose_prefixes(buffer, 50, 5, 0.9, np.random.default_rng(0)):
        ids = chosen.response_ids
        assert chosen.replayed and ids.dtype == np.int32
        assert len(ids) == 0 or ids[0] in (100, 500)
        assert (np.diff(ids) == 1).all()


def test_cuts_and_trajectories_are_uniform() -> None:
    buffer = {"a": [trajectory("a", 45, first=1), trajectory("a", 45, first=1001)]}
    chosen = choose_prefixes(buffer, 5000, 10, 0.9, np.random.default_rng(0))
    cuts = Counter(len(p.response_ids) for p in chosen)
    assert sorted(cuts) == [0, 10, 20, 30, 40]  # 0.9 * 45 = 40.5
    assert max(abs(count - 1000) for count in cuts.values()) < 120  # 4 standard deviations
    firsts = Counter(int(p.response_ids[0]) for p in chosen if len(p.response_ids))
    assert abs(firsts[1] - firsts[1001]) < 260


def test_cutting_copies() -> None:
    stored = trajectory("a", 40)
    for chosen in choose_prefixes({"a": [stored]}, 10, 10, 0.9, np.random.default_rng(0)):
        chosen.response_ids[:] = -1
    assert (stored.response_ids == np.arange(40)).all()


@given(
    lengths=st.lists(st.lists(st.integers(1, 60), min_size=1, max_size=3), min_size=1, max_size=6),
    num_prefixes=st.integers(0, 25),
    grid=st.integers(1, 20),
    seed=st.integers(0, 1000),
)
@settings(max_examples=60)
def test_prefix_invariants(lengths, num_prefixes, grid, seed) -> None:
    buffer = {f"p{i}": [trajectory(f"p{i}", n) for n in own] for i, own in enumerate(lengths)}
    chosen = choose_prefixes(buffer, num_prefixes, grid, 0.9, stream(seed, "prefixes", 3))
    again = choose_prefixes(buffer, num_prefixes, grid, 0.9, stream(seed, "prefixes", 3))
    assert [(p.problem_id, len(p.response_ids)) for p in chosen] == [(p.problem_id, len(p.response_ids)) for p in again]
    assert len(chosen) == num_prefixes
    uses = Counter(p.problem_id for p in chosen)
    assert max(uses.values(), default=0) - min((uses[name] for name in buffer), default=0) <= 1
    for p in chosen:
        assert len(p.response_ids) % grid == 0
        assert len(p.response_ids) <= 0.9 * max(len(t.response_ids) for t in buffer[p.problem_id])


def test_empty_buffer_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        choose_prefixes({}, 4, 10, 0.9, np.random.default_rng(0))


def test_fresh_prefixes_cycle_and_are_not_replayed() -> None:
    slots = fresh_prefixes(["a", "b"], 5)
    assert [p.problem_id for p in slots] == ["a", "b", "a", "b", "a"]
    assert all(len(p.response_ids) == 0 and not p.replayed for p in slots)
    with pytest.raises(ValueError, match="no problem"):
        fresh_prefixes([], 1)


def test_unready_slots_are_full() -> None:
    (continuation,) = routed([prefix("a", 20)], frozenset())
    assert (continuation.mode, continuation.max_new_tokens, continuation.group_size) == ("full", 30, 4)


@pytest.mark.parametrize(
    ("num_ready", "fraction", "num_audits"),
    [(0, 0.25, 0), (1, 0.25, 1), (4, 0.25, 1), (5, 0.25, 2), (5, 0.0, 0), (5, 1.0, 5), (100, 0.07, 7)],
)  # 0.07 * 100 is 7.000000000000001 and must not become 8
def test_number_of_audits(num_ready: int, fraction: float, num_audits: int) -> None:
    slots = [prefix(f"ready{i}") for i in range(num_ready)] + [prefix(f"other{i}") for i in range(7)]
    ready = frozenset(f"ready{i}" for i in range(num_ready))
    modes = Counter(c.mode for c in routed(slots, ready, audit_fraction=fraction))
    assert modes["audit"] == num_audits
    assert modes["chunk"] == num_ready - num_audits
    assert modes["full"] == 7


@given(flags=st.lists(st.booleans(), max_size=30), fraction=st.floats(0, 1), seed=st.integers(0, 100))
@settings(max_examples=60)
def test_audits_and_chunks_only_on_ready_slots(flags, fraction, seed) -> None:
    slots = [prefix(f"p{i}", length=5) for i in range(len(flags))]
    ready = frozenset(f"p{i}" for i, flag in enumerate(flags) if flag)
    routes = routed(slots, ready, audit_fraction=fraction, rng=np.random.default_rng(seed))
    assert [c.prefix for c in routes] == slots  # the order of the slots
    for continuation, flag in zip(routes, flags):
        assert (continuation.mode != "full") == flag
        assert continuation.max_new_tokens == (10 if continuation.mode == "chunk" else 45)
    if any(flags) and fraction > 1e-6:
        assert any(c.mode == "audit" for c in routes)


def test_which_slots_are_audited_is_random() -> None:
    slots = [prefix(f"p{i}") for i in range(8)]
    ready = frozenset(p.problem_id for p in slots)
    audited = Counter()
    for seed in range(400):
        routes = routed(slots, ready, audit_fraction=0.25, rng=np.random.default_rng(seed))
        audited.update(i for i, c in enumerate(routes) if c.mode == "audit")
    assert all(60 < audited[i] < 140 for i in range(8))  # 100 each expected


def test_a_chunk_never_passes_the_budget() -> None:
    (continuation,) = routed([prefix("a", 45)], {"a"}, audit_fraction=0.0)
    assert (continuation.mode, continuation.max_new_tokens) == ("chunk", 5)


def test_fresh_problems_are_full_even_if_ready() -> None:
    (continuation,) = routed([prefix("a", replayed=False)], {"a"}, audit_fraction=0.0)
    assert continuation.mode == "full"


@pytest.mark.parametrize("routing", ["prefix_grpo", "grpo"])
def test_baselines_trust_no_critic(routing: str) -> None:
    slots = [prefix("a", 0), prefix("b", 0)]
    assert [c.mode for c in routed(slots, {"a", "b"}, routing=routing)] == ["full", "full"]


def test_bad_input_is_refused() -> None:
    with pytest.raises(UserError, match="sampling.routing: found 'ppo', accepted: ac2"):
        routed([prefix("a")], frozenset(), routing="ppo")
    with pytest.raises(UserError, match="sampling.response_budget: found 50"):
        routed([prefix("a", 50)], frozenset())
    with pytest.raises(ValueError, match="bare problems"):
        routed([prefix("a", 10)], frozenset(), routing="grpo")


def test_number_of_fresh_problems() -> None:
    # the paper's stale buffer: 1,920 rollouts every 10 steps
    assert [num_fresh_at(step, "stale", 192, 10) for step in (0, 1, 9, 10, 11, 20)] == [1920, 0, 0, 1920, 0, 1920]
    assert [num_fresh_at(step, "stale", 5, 1) for step in range(3)] == [5, 5, 5]
    for kind in ("rolling", "correct_only"):
        assert [num_fresh_at(step, kind, 192, 10) for step in (0, 1, 10)] == [192, 192, 192]


def singletons(continuations, buffer, grid=10, fraction=0.9, chunk_len=10, budget=50, seed=0):
    rng = np.random.default_rng(seed)
    return singleton_prefixes(continuations, buffer, grid, fraction, rng, chunk_len=chunk_len, response_budget=budget)


def chunk_slot(problem_id: str, group_size: int) -> Continuation:
    return Continuation(prefix(problem_id, 10), "chunk", group_size, 10)


def test_a_chunk_group_becomes_chunks_from_as_many_prefixes() -> None:
    buffer = {"a": [trajectory("a", 45, first=100), trajectory("a", 23, first=500)], "b": [trajectory("b", 9)]}
    full = Continuation(prefix("b", 0), "full", 3, 50)
    audit = Continuation(prefix("a", 20), "audit", 3, 30)
    first, *members, last = singletons([full, chunk_slot("a", 6), audit], buffer)
    assert first is full and last is audit
    assert [(c.mode, c.group_size, c.prefix.problem_id, c.prefix.replayed) for c in members] == [
        ("chunk", 1, "a", True)
    ] * 6
    # cuts 0 to 40 of the first, 0 to 20 of the second
    starts = {
        (int(c.prefix.response_ids[0]), len(c.prefix.response_ids)) for c in members if len(c.prefix.response_ids)
    }
    assert starts <= {(100, cut) for cut in (10, 20, 30, 40)} | {(500, cut) for cut in (10, 20)}
    assert len(starts) >= 4  # of 6 pairs at most two have an empty prefix


def test_pairs_come_once_before_any_twice() -> None:
    buffer = {"a": [trajectory("a", 25, first=1), trajectory("a", 12, first=501)]}  # cuts 0, 10, 20 and 0, 10
    for seed in range(20):
        members = singletons([chunk_slot("a", 12)], buffer, seed=seed)
        names = [tuple(c.prefix.response_ids[[0, -1]]) if len(c.prefix.response_ids) else () for c in members]
        for chunk in (names[:5], names[5:10]):
            assert Counter(chunk) == Counter({(): 2, (1, 10): 1, (1, 20): 1, (501, 510): 1})
        assert len(names) == 12


def test_a_singleton_is_drawn_as_a_slot_is() -> None:
    # trajectory uniform, then cut uniform: 1/2 * 1/5 for each cut of the long one, 1/2 for the short one's only cut
    buffer = {"a": [trajectory("a", 45, first=1), trajectory("a", 5, first=501)]}
    members = singletons([chunk_slot("a", 1)] * 4000, buffer)
    cuts = Counter(len(c.prefix.response_ids) for c in members)
    assert abs(cuts[0] - 2400) < 130  # 4 standard deviations
    assert all(abs(cuts[cut] - 400) < 80 for cut in (10, 20, 30, 40))


def test_each_singleton_has_its_own_limit() -> None:
    members = singletons([chunk_slot("a", 5)], {"a": [trajectory("a", 45)]}, chunk_len=10, budget=45)
    assert {len(c.prefix.response_ids): c.max_new_tokens for c in members} == {0: 10, 10: 10, 20: 10, 30: 10, 40: 5}


def test_without_a_chunk_nothing_changes() -> None:
    slots = routed([prefix("a", 20), prefix("b", 0)], frozenset())
    assert singletons(slots, {}) == slots and singletons([], {}) == []


def test_singletons_that_cannot_be_are_refused() -> None:
    with pytest.raises(ValueError, match="no stored trajectory of problem 'b'"):
        singletons([chunk_slot("b", 2)], {"a": [trajectory("a", 45)]})
    with pytest.raises(UserError, match="sampling.response_budget: found 40, but a replayed prefix of problem 'a'"):
        singletons([chunk_slot("a", 5)], {"a": [trajectory("a", 45)]}, budget=40)


@given(
    lengths=st.lists(st.lists(st.integers(1, 60), min_size=1, max_size=3), min_size=1, max_size=4),
    flags=st.lists(st.booleans(), min_size=4, max_size=4),
    group_size=st.integers(1, 8),
    grid=st.integers(1, 20),
    fraction=st.sampled_from([0.0, 0.3, 0.9]),
    chunk_len=st.integers(1, 30),
    seed=st.integers(0, 100),
)
def test_singleton_invariants(lengths, flags, group_size, grid, fraction, chunk_len, seed) -> None:
    buffer = {f"p{i}": [trajectory(f"p{i}", n, 100 * k) for k, n in enumerate(own)] for i, own in enumerate(lengths)}
    slots = choose_prefixes(buffer, 6, grid, fraction, np.random.default_rng(seed))
    ready = {name for name, flag in zip(buffer, flags) if flag}
    routes = routed(slots, ready, chunk_len=chunk_len, response_budget=60, group_size=group_size)
    found = singletons(routes, buffer, grid, fraction, chunk_len, 60, seed)
    assert sum(c.group_size for c in found) == sum(c.group_size for c in routes)
    assert [c for c in found if c.mode != "chunk"] == [c for c in routes if c.mode != "chunk"]
    for c in found:
        ids, own = c.prefix.response_ids, buffer[c.prefix.problem_id]
        assert len(ids) % grid == 0
        assert any(
            len(ids) <= fraction * len(t.response_ids) and (ids == t.response_ids[: len(ids)]).all() for t in own
        )
        remaining = 60 - len(ids)
        assert c.max_new_tokens == (min(chunk_len, remaining) if c.mode == "chunk" else remaining) >= 1
        assert c.mode != "chunk" or c.group_size == 1
    again = singletons(routes, buffer, grid, fraction, chunk_len, 60, seed)
    assert [c.prefix.response_ids.tolist() for c in again] == [c.prefix.response_ids.tolist() for c in found]
