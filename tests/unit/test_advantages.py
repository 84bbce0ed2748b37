from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ac2.algorithm.advantages import critic_target, group_advantages, probe_error, round_to_grid


def test_value_minus_mean_without_standard_deviation() -> None:
    advantages, weights = group_advantages(np.array([[1.0, 0.0, 0.0, 0.0], [0.9, 0.7, 0.7, 0.5]]), np.ones((2, 4)))
    np.testing.assert_allclose(advantages, [[0.75, -0.25, -0.25, -0.25], [0.2, 0.0, 0.0, -0.2]], atol=1e-7)
    assert (weights == 1).all()
    assert advantages.dtype == weights.dtype == np.float32


def test_invalid_value_becomes_the_mean_of_the_valid_ones() -> None:
    # valid mean (0.8 + 0.2 + 0.2) / 3 = 0.4; with the replacement the group's mean is 0.4 too
    values = np.array([[0.8, np.nan, 0.2, 0.2]], dtype=np.float32)
    advantages, weights = group_advantages(values, np.array([[True, False, True, True]]))
    np.testing.assert_allclose(advantages, [[0.4, 0.0, -0.2, -0.2]], atol=1e-7)
    assert weights.tolist() == [[1.0, 0.0, 1.0, 1.0]]


def test_what_an_invalid_entry_holds_is_never_read() -> None:
    valid = np.array([[True, False, True]])
    results = [group_advantages(np.array([[0.1, junk, 0.6]]), valid)[0] for junk in (0.0, 1.0, 1e9, np.inf, np.nan)]
    for result in results[1:]:
        np.testing.assert_array_equal(result, results[0])


def test_a_group_without_a_valid_value_is_out() -> None:
    advantages, weights = group_advantages(np.full((1, 4), np.nan), np.zeros((1, 4), dtype=bool))
    assert (advantages == 0).all() and (weights == 0).all()


def test_equal_values_teach_nothing() -> None:
    advantages, _ = group_advantages(np.full((3, 16), 0.3, dtype=np.float32), np.ones((3, 16), dtype=bool))
    assert np.abs(advantages).max() == 0


@given(st.lists(st.tuples(st.floats(0, 1, width=32), st.booleans()), min_size=1, max_size=16), st.floats(-1, 1))
@settings(max_examples=100, deadline=None)
def test_advantages_are_centred_and_shift_invariant(group, shift) -> None:
    values = np.array([[value for value, _ in group]])
    valid = np.array([[flag for _, flag in group]])
    advantages, weights = group_advantages(values, valid)
    assert abs((advantages * weights).sum()) < 1e-5
    assert (advantages[weights == 0] == 0).all()
    np.testing.assert_allclose(group_advantages(values + shift, valid)[0], advantages, atol=1e-6)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (0.0, 0.0), (0.04, 0.0), (0.06, 0.1), (0.1, 0.1), (0.3, 0.3), (0.96, 1.0), (1.0, 1.0),
        (0.05, 0.0), (0.15, 0.1), (0.25, 0.2), (0.35, 0.3), (0.45, 0.4), (0.55, 0.5), (0.65, 0.6), (0.75, 0.7),
        (0.85, 0.8), (0.95, 0.9), (0.2500001, 0.2), (0.251, 0.3), (-0.2, 0.0), (1.3, 1.0),
    ],
)  # fmt: skip
def test_round_to_grid_ties_down(value: float, expected: float) -> None:
    assert round_to_grid(value) == expected


@pytest.mark.parametrize("low", range(10))
def test_float32_ties_are_still_ties(low: int) -> None:
    pair = np.array([low / 10, (low + 1) / 10], dtype=np.float32)
    for values in (np.tile(pair, 8), pair.astype(np.float64)):
        assert round_to_grid(values.mean()) == low / 10


@given(st.floats(0, 1))
def test_rounding_moves_at_most_half_a_step(value: float) -> None:
    rounded = round_to_grid(value)
    assert rounded in [k / 10 for k in range(11)]
    assert abs(rounded - value) <= 0.05 + 2e-6


def target(values, valid, from_critic, min_valid=1):
    return critic_target(np.array(values, np.float32), np.array(valid, bool), np.array(from_critic, bool), min_valid)


def test_target_is_the_rounded_mean_of_the_valid_values() -> None:
    assert target([1, 0, 0, 1, 1], [1, 1, 1, 1, 0], [0] * 5) == (0.5, "terminal")
    assert target([1, 0, 0], [1, 1, 1], [0] * 3) == (0.3, "terminal")
    assert target([np.nan, 0.2, 0.4], [0, 1, 1], [1] * 3) == (0.3, "bootstrapped")


def test_tag_speaks_of_valid_values_only() -> None:
    assert target([1.0, 0.5], [1, 1], [0, 1]) == (0.7, "mixed")  # 0.75, a tie
    assert target([1.0, 0.5], [1, 0], [0, 1]) == (1.0, "terminal")
    assert target([1.0, 0.5], [0, 1], [0, 1]) == (0.5, "bootstrapped")


def test_target_needs_min_valid_values() -> None:
    values, from_critic = [1.0] * 16, [0] * 16
    assert target(values, [1] * 7 + [0] * 9, from_critic, min_valid=8) is None
    assert target(values, [1] * 8 + [0] * 8, from_critic, min_valid=8) == (1.0, "terminal")
    assert target([0.5], [0], [0], min_valid=0) is None  # no value at all


def test_probe_error() -> None:
    assert probe_error(0.3, True, 0.8) == pytest.approx(0.5)
    assert probe_error(0.8, True, 0.3) == pytest.approx(0.5)
    assert probe_error(0.8, False, 0.8) == 1.0
    assert probe_error(float("nan"), False, 0.8) == 1.0
