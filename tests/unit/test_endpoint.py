from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ac2.algorithm.advantages import group_advantages
from megatron_ac2.algorithm.endpoint import closed_ends, critic_books, endpoint_values, open_ends
from megatron_ac2.types import Grade, Prefix, UserError, Values

STOPS = [["chunk_end", "eos", "budget", "chunk_end"], ["eos", "eos", "budget", "eos"]]


def values(*answers: float, invalid: tuple[int, ...] = ()) -> Values:
    valid = np.array([i not in invalid for i in range(len(answers))], dtype=bool)
    return Values(np.array(answers, dtype=np.float32), valid)


def prefix(problem_id: str, length: int = 2, replayed: bool = True) -> Prefix:
    return Prefix(problem_id, np.arange(length, dtype=np.int32), replayed)


def test_open_and_closed_ends_partition_in_order() -> None:
    assert open_ends(STOPS) == [(0, 0), (0, 3)]
    assert closed_ends(STOPS) == [(0, 1), (0, 2), (1, 0), (1, 1), (1, 2), (1, 3)]


def test_who_values_what() -> None:
    grades = {(0, 1): Grade(1.0), (1, 0): Grade(0.0), (1, 1): Grade(1.0), (1, 3): Grade(0.5, valid=False)}
    found = endpoint_values(STOPS, grades, [(0, 0), (0, 3)], values(0.4, 0.9, invalid=(1,)))
    # chunk ends from the critic, eos from the reward, (0, 2) and (1, 2) reached the budget without an answer: 0,
    # (1, 3): the grader failed, 0 for the actor and unknown for the critic
    np.testing.assert_allclose(found.value, [[0.4, 1.0, 0.0, 0.0], [0.0, 1.0, 0.0, 0.0]], atol=1e-7)
    assert found.valid.tolist() == [[True, True, True, False], [True] * 4]
    assert found.target_valid.tolist() == [[True, True, True, False], [True, True, True, False]]
    assert found.from_critic.tolist() == [[True, False, False, True], [False] * 4]
    assert found.value.dtype == np.float32


def test_a_failed_grader_counts_zero_in_the_group_but_not_in_the_target() -> None:
    stops = [["eos"] * 4]
    grades = {(0, 0): Grade(1.0), (0, 1): Grade(1.0), (0, 2): Grade(0.0), (0, 3): Grade(1.0, valid=False)}
    found = endpoint_values(stops, grades, [], values())
    advantages, weights = group_advantages(found.value, found.valid)
    np.testing.assert_allclose(advantages, [[0.5, 0.5, -0.5, -0.5]])
    assert weights.tolist() == [[1.0] * 4]
    (target,), _ = critic_books([prefix("a")], found, values(0.5), min_valid=1, version=0)
    assert target.value == 0.7  # mean of 1, 1, 0


def test_a_budget_end_is_terminal_even_for_a_chunk() -> None:
    found = endpoint_values([["budget", "chunk_end"]], {(0, 0): Grade(1.0)}, [(0, 1)], values(0.6))
    np.testing.assert_allclose(found.value, [[1.0, 0.6]])
    assert found.from_critic.tolist() == [[False, True]]


def test_a_chunk_that_holds_a_complete_answer_may_be_graded() -> None:
    found = endpoint_values([["chunk_end", "chunk_end"]], {(0, 0): Grade(1.0)}, [(0, 1)], values(0.2))
    np.testing.assert_allclose(found.value, [[1.0, 0.2]])
    assert found.from_critic.tolist() == [[False, True]]


def test_a_value_that_is_no_number_is_invalid() -> None:
    found = endpoint_values([["chunk_end", "chunk_end"]], {}, [(0, 0), (0, 1)], values(np.nan, 0.3))
    assert found.valid.tolist() == [[False, True]] and found.value[0, 0] == 0


def test_no_group_at_all() -> None:
    found = endpoint_values([], {}, [], values())
    assert found.value.shape == (0, 0)


@pytest.mark.parametrize(
    ("grades", "ends", "answers", "message"),
    [
        ({}, [(0, 0)], (0.5,), r"no value for the open ends \(group, member\) \[\(0, 3\)\]"),
        ({}, [(0, 0), (0, 3), (0, 1)], (0.5, 0.5, 0.5), "closed or graded"),
        ({(0, 0): Grade(1.0)}, [(0, 0), (0, 3)], (0.5, 0.5), "closed or graded"),
        ({}, [(0, 0), (0, 3)], (0.5,), "2 critic ends, 1 critic values"),
    ],
)
def test_ends_without_or_with_two_values_are_refused(grades, ends, answers, message) -> None:
    with pytest.raises(ValueError, match=message):
        endpoint_values(STOPS, grades, ends, values(*answers))


def test_groups_of_unequal_size_are_padded() -> None:
    stops = [["chunk_end"], ["eos", "eos", "budget"], [], ["eos"]]
    grades = {(1, 0): Grade(1.0), (1, 1): Grade(0.5, valid=False), (3, 0): Grade(1.0)}
    found = endpoint_values(stops, grades, [(0, 0)], values(0.25))
    assert found.value.tolist() == [[0.25, 0, 0], [1, 0, 0], [0, 0, 0], [1, 0, 0]]
    assert found.present.tolist() == [[True, False, False], [True] * 3, [False] * 3, [True, False, False]]
    assert (found.valid == found.present).all()
    assert found.target_valid.tolist() == [[True, False, False], [True, False, True], [False] * 3, [True, False, False]]
    assert found.from_critic.tolist() == [[True, False, False], [False] * 3, [False] * 3, [False] * 3]


def test_equal_groups_are_all_present() -> None:
    found = endpoint_values(STOPS, {}, [(0, 0), (0, 3)], values(0.5, 0.5))
    assert found.present.shape == (2, 4) and found.present.all()


def test_grades_of_nothing_and_bad_rewards_are_refused() -> None:
    with pytest.raises(ValueError, match=r"grades of no end \(group, member\) \[\(0, 1\)\]"):
        endpoint_values([["eos"], ["eos", "eos"]], {(0, 1): Grade(1.0)}, [], values())
    with pytest.raises(UserError, match="found reward 2.0, accepted: 0 to 1"):
        endpoint_values([["eos"]], {(0, 0): Grade(2.0)}, [], values())
    with pytest.raises(UserError, match="found reward nan"):
        endpoint_values([["eos"]], {(0, 0): Grade(float("nan"))}, [], values())


def test_books_of_one_step() -> None:
    stops = [["eos"] * 4, ["chunk_end"] * 4, ["chunk_end", "eos", "eos", "eos"], ["eos"] * 4, ["chunk_end"] * 4]
    ends = open_ends(stops)
    grades = {end: Grade(float(end[1] % 2)) for end in closed_ends(stops)}
    # row 1: .2 .2 .4 .4 -> .3; row 2: .6 then 1 0 1 -> .65, a tie -> .6; row 4: only one valid value
    answers = values(0.2, 0.2, 0.4, 0.4, 0.6, 0.1, 0.1, 0.1, 0.1, invalid=(6, 7, 8))
    endpoints = endpoint_values(stops, grades, ends, answers)
    prefixes = [prefix("a", 1), prefix("b", 2), prefix("c", 3), prefix("fresh", 0, replayed=False), prefix("e", 4)]
    probes = values(0.9, 0.3, 0.0, 0.5, 0.5, invalid=(2,))
    targets, records = critic_books(prefixes, endpoints, probes, min_valid=2, version=7)
    assert [(t.problem_id, len(t.response_ids), t.value, t.tag, t.version) for t in targets] == [
        ("a", 1, 0.5, "terminal", 7),
        ("b", 2, 0.3, "bootstrapped", 7),
        ("c", 3, 0.6, "mixed", 7),
    ]
    assert [r.error for r in records] == pytest.approx([0.4, 0.0, 1.0], abs=1e-6)
    assert [(r.problem_id, r.probe_valid, r.tag) for r in records] == [
        ("a", True, "terminal"),
        ("b", True, "bootstrapped"),
        ("c", False, "mixed"),
    ]


def test_books_need_one_probe_a_group() -> None:
    endpoints = endpoint_values([["eos"]], {}, [], values())
    with pytest.raises(ValueError, match="1 prefixes, 0 probes, 1 groups"):
        critic_books([prefix("a")], endpoints, values(), min_valid=1, version=0)
    with pytest.raises(ValueError, match="1 groups, 2 modes"):
        critic_books([prefix("a")], endpoints, values(0.5), min_valid=1, version=0, modes=["full", "full"])


def test_records_know_the_audits() -> None:
    endpoints = endpoint_values([["eos"]] * 3, {}, [], values())
    prefixes = [prefix("a"), prefix("b"), prefix("c")]
    options = dict(min_valid=1, version=0)
    _, records = critic_books(prefixes, endpoints, values(0, 0, 0), modes=["full", "audit", "chunk"], **options)
    assert [record.audit for record in records] == [False, True, False]
    _, records = critic_books(prefixes, endpoints, values(0, 0, 0), **options)
    assert not any(record.audit for record in records)


def test_a_singleton_fits_the_critic_to_its_own_value() -> None:
    stops = [["chunk_end"], ["chunk_end"], ["eos"] * 3, ["eos"] * 2, ["chunk_end"]]
    grades = {(2, 0): Grade(1.0), (2, 1): Grade(0.5, valid=False), (3, 0): Grade(1.0), (3, 1): Grade(0.0)}
    endpoints = endpoint_values(stops, grades, [(0, 0), (1, 0), (4, 0)], values(0.34, 0.9, 0.7, invalid=(1,)))
    prefixes = [prefix(problem_id) for problem_id in "abcde"]
    targets, records = critic_books(prefixes, endpoints, values(0.5, 0.5, 0.5, 0.5, 0.7), min_valid=3, version=0)
    # b: its only value is invalid. c: 2 valid ones of 3, and 3 are needed. d: smaller than that, but complete
    assert [(t.problem_id, t.value, t.tag) for t in targets] == [
        ("a", 0.3, "bootstrapped"),
        ("d", 0.5, "terminal"),
        ("e", 0.7, "bootstrapped"),
    ]
    assert [r.error for r in records] == pytest.approx([0.2, 0.0, 0.0], abs=1e-6)


@st.composite
def graded_steps(draw):
    """Stops of ragged groups, and a value of each end: (stops, grades, critic ends, critic values)."""
    stops = draw(st.lists(st.lists(st.sampled_from(["chunk_end", "eos", "budget"]), max_size=5), max_size=5))
    answered = [end for end in open_ends(stops) if draw(st.booleans())]
    closed = [end for end in closed_ends(stops) if draw(st.booleans())]
    grades = {end: Grade(draw(st.integers(0, 4)) / 4, draw(st.booleans())) for end in answered + closed}
    ends = [end for end in open_ends(stops) if end not in grades]
    given_values = [draw(st.integers(0, 10)) / 10 for _ in ends]
    valid = np.array([draw(st.booleans()) for _ in ends], dtype=bool)
    return stops, grades, ends, Values(np.array(given_values, dtype=np.float32), valid)


@given(graded_steps(), st.integers(1, 6))
def test_every_end_has_one_value_and_padding_none(step, min_valid) -> None:
    stops, grades, ends, answers = step
    found = endpoint_values(stops, grades, ends, answers)
    for mask in (found.valid, found.target_valid, found.from_critic):
        assert not (mask & ~found.present).any()
    assert not found.value[~found.present].any() and ((found.value >= 0) & (found.value <= 1)).all()
    assert found.present.sum() == sum(len(group) for group in stops)
    assert {(int(b), int(g)) for b, g in np.argwhere(found.from_critic)} == set(ends)
    assert (found.valid | found.from_critic)[found.present].all()  # only the critic's answers can be out of the loss
    prefixes = [prefix(f"p{b}") for b in range(len(stops))]
    probes = values(*[0.5] * len(stops))
    targets, records = critic_books(prefixes, found, probes, min_valid=min_valid, version=0)
    expected = [
        f"p{b}" for b, group in enumerate(stops) if group and found.target_valid[b].sum() >= min(min_valid, len(group))
    ]
    assert [t.problem_id for t in targets] == [r.problem_id for r in records] == expected
