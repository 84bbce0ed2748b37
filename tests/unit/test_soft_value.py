"""The mean over the grid under the model's own probabilities."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ac2.algorithm import value_prompt
from megatron_ac2.algorithm.soft_value import MIN_GRID_MASS, reply_tree, soft_value
from megatron_ac2.algorithm.value_prompt import GRID, grid_replies, parse_value
from tools.quickstart_model import train_tokenizer

POINT = 50
REPLIES = {value: [40 + int(value), POINT, 60 + round(value * 10) % 10] for value in GRID}  # digits 40, 41; 60 .. 69
TREE = reply_tree(REPLIES)


def top(probabilities: dict[int, float]) -> tuple[np.ndarray, np.ndarray]:
    ids = np.array(list(probabilities), dtype=np.int32)
    return ids, np.log(np.array(list(probabilities.values())) + 1e-300).astype(np.float32)


def answer(tree, *branches: dict[int, float]):
    ids, logprobs = zip(*map(top, branches), strict=True)
    return soft_value(tree, ids, logprobs)


def test_the_grid_of_eleven_replies_has_two_branches():
    assert TREE.branches == ((), (40, POINT))
    assert TREE.choices[0.0] == ((0, 40), (1, 60)) and TREE.choices[0.7] == ((0, 40), (1, 67))
    assert TREE.choices[1.0] == ((0, 41),), "nothing but a point and a zero can follow"


def test_the_real_tokenizers_grid():
    tokenizer = train_tokenizer(["user assistant\n", "the answer is 0.5", value_prompt._QUESTION])
    replies = grid_replies(tokenizer)
    assert tuple(replies) == GRID and all(tokenizer.eos_token_id not in ids for ids in replies.values())
    assert [parse_value(tokenizer.decode(ids)) for ids in replies.values()] == [(value, True) for value in GRID]
    assert len(reply_tree(replies).branches) == 2


@pytest.mark.parametrize("value", GRID)
def test_certain_of_one_value_is_that_value(value):
    first, _, last = REPLIES[value]
    found = answer(TREE, {first: 1.0}, {last: 1.0, 3: 0.0})
    assert found.value == pytest.approx(value, abs=1e-7) and found.valid and found.mass == pytest.approx(1)


def test_half_and_half_between_two_values_is_their_mean():
    found = answer(TREE, {40: 1.0}, {62: 0.5, 66: 0.5})
    assert found.value == pytest.approx(0.4, abs=1e-6) and found.valid


def test_hand_worked():
    # p(1.0) = 0.2; p(0.5) = 0.7 * 0.5 = 0.35; p(0.9) = 0.7 * 0.2 = 0.14; mass 0.69; the rest is off the grid
    # (0.2 + 0.5 * 0.35 + 0.9 * 0.14) / 0.69 = 0.501 / 0.69 = 0.726087
    found = answer(TREE, {40: 0.7, 41: 0.2, 7: 0.1}, {65: 0.5, 8: 0.3, 69: 0.2})
    assert found.mass == pytest.approx(0.69, abs=1e-6)
    assert found.value == pytest.approx(0.726087, abs=1e-6)


def test_little_mass_on_the_grid_is_invalid():
    assert MIN_GRID_MASS == 0.5
    assert not answer(TREE, {40: 0.49, 7: 0.51}, {60: 1.0}).valid
    assert answer(TREE, {40: 0.51, 7: 0.49}, {60: 1.0}).valid
    # "0." is near certain, but no digit follows: 1.0 alone must not be the answer
    assert not answer(TREE, {40: 0.9, 41: 0.1}, {5: 1.0}).valid
    nothing = answer(TREE, {7: 1.0}, {60: 1.0})
    assert (nothing.value, nothing.mass, nothing.valid) == (0.0, 0.0, False)


def test_minus_infinity_is_no_mass():
    ids = np.array([40, 41]), np.array([60, 65])
    found = soft_value(TREE, ids, (np.array([0.0, -math.inf]), np.array([-math.inf, 0.0])))
    assert found.value == pytest.approx(0.5) and found.mass == 1


def test_replies_of_uneven_tokenisation():
    """ "1" | "0" ".1" | "0" ".5" "0": branches at the start and after "0"; the last token of 0.5 is certain."""
    tree = reply_tree({1.0: [1], 0.1: [0, 11], 0.5: [0, 15, 9]})
    assert tree.branches == ((), (0,)) and tree.choices[0.5] == ((0, 0), (1, 15))
    # 0.5 * 1 + 0.5 * (0.25 * 0.1 + 0.75 * 0.5) = 0.7
    assert answer(tree, {1: 0.5, 0: 0.5}, {11: 0.25, 15: 0.75}).value == pytest.approx(0.7, abs=1e-6)


@pytest.mark.parametrize("replies", [{0.0: [1], 1.0: [1]}, {0.0: [1], 1.0: [1, 2]}, {0.0: [], 1.0: [1]}])
def test_replies_that_no_next_token_tells_apart_are_refused(replies):
    with pytest.raises(ValueError, match="beginning of another"):
        reply_tree(replies)


def test_log_probs_for_every_branch_are_needed():
    with pytest.raises(ValueError, match="2 branches, found 1"):
        answer(TREE, {40: 1.0})


@given(st.lists(st.floats(1e-3, 1), min_size=2, max_size=2), st.lists(st.floats(1e-3, 1), min_size=10, max_size=10))
def test_it_is_the_mean_over_the_enumerated_replies(first, last):
    """Whatever the probabilities; half of the root's going off the grid changes the mass and no value."""
    first, last = np.array(first) / sum(first), np.array(last) / sum(last)
    roots, digits = dict(zip((40, 41), first, strict=True)), dict(zip(range(60, 70), last, strict=True))
    expected = first[1] * 1.0 + first[0] * sum(0.1 * i * p for i, p in enumerate(last))
    found = answer(TREE, roots, digits)
    assert found.value == pytest.approx(expected, abs=1e-5) and found.mass == pytest.approx(1, abs=1e-5)
    halved = answer(TREE, {token: p / 2 for token, p in roots.items()}, digits)
    assert halved.value == pytest.approx(found.value, abs=1e-5) and halved.mass == pytest.approx(0.5, abs=1e-5)
