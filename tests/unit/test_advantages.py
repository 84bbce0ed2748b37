from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ac2.algorithm.advantages import critic_target, group_advantages, probe_error, round_to_grid
from megatron_ac2.types import UserError


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
@settings(max_examples=100)
def test_advantages_are_centred_and_shift_invariant(group, shift) -> None:
    values = np.array([[value for value, _ in group]])
    valid = np.array([[flag for _, flag in group]])
    advantages, weights = group_advantages(values, valid)
    assert abs((advantages * weights).sum()) < 1e-5
    assert (advantages[weights == 0] == 0).all()
    np.testing.assert_allclose(group_advantages(values + shift, valid)[0], advantages, atol=1e-6)


def test_a_baseline_replaces_the_mean_of_its_group_only() -> None:
    values = np.array([[0.75, 0.25, 0.5], [0.75, np.nan, 0.5]])
    valid = np.array([[True] * 3, [True, False, True]])
    advantages, weights = group_advantages(values, valid, baselines=np.array([np.nan, 0.25]))
    assert advantages.tolist() == [[0.25, -0.25, 0.0], [0.5, 0.0, 0.25]]
    assert weights.tolist() == [[1, 1, 1], [1, 0, 1]]


def test_singletons_have_their_own_baseline() -> None:
    # G = 1 everywhere: A = v - V(s), where the mean of a group of one would leave nothing
    values, probes = np.array([[0.75], [0.25], [1.0]]), np.array([0.5, 0.5, np.nan])
    advantages, weights = group_advantages(values, np.array([[True], [True], [False]]), probes)
    assert advantages.tolist() == [[0.25], [-0.25], [0.0]] and weights.tolist() == [[1], [1], [0]]
    assert not group_advantages(values, np.ones((3, 1)))[0].any()


def test_padding_of_a_ragged_group_is_never_read() -> None:
    # a full group of 4 (mean 0.5) beside a singleton, V(s) = 0.25
    present = np.array([[True] * 4, [True, False, False, False]])
    for junk in (0.0, 1e9, np.inf, np.nan):
        values = np.array([[1.0, 0.0, 1.0, 0.0], [1.0, junk, junk, junk]])
        for kind, scale in (("mean", 1.0), ("leave_one_out", 4 / 3)):
            advantages, weights = group_advantages(
                values, np.ones((2, 4)), np.array([np.nan, 0.25]), present, kind=kind
            )
            expected = [[0.5 * scale, -0.5 * scale] * 2, [0.75, 0.0, 0.0, 0.0]]
            np.testing.assert_allclose(advantages, expected, rtol=1e-6)
            assert (weights == present).all()


def test_leave_one_out_by_hand() -> None:
    # others' means of {1, 0, .5}: .25, .75, .5; the invalid member is nobody's baseline
    values, valid = np.array([[1.0, np.nan, 0.0, 0.5]]), np.array([[True, False, True, True]])
    advantages, weights = group_advantages(values, valid, kind="leave_one_out")
    np.testing.assert_allclose(advantages, [[0.75, 0.0, -0.75, 0.0]], atol=1e-7)
    assert weights.tolist() == [[1, 0, 1, 1]]
    lone, weight = group_advantages(np.array([[0.7, 0.1]]), np.array([[True, False]]), kind="leave_one_out")
    assert not lone.any() and weight.tolist() == [[1, 0]]


@pytest.mark.parametrize(
    ("group", "expected"),
    [
        # mean 1/2, variance (1/4 + 1/4) / 1: advantages +-1/2 / sqrt(1/2)
        ([0.0, 1.0], [-0.7071068, 0.7071068]),
        # mean 1/4, variance (3/16 + 9/16) / 3 = 1/4
        ([0.0, 0.0, 0.0, 1.0], [-0.5, -0.5, -0.5, 1.5]),
        ([0.3, 0.3, 0.3], [0.0, 0.0, 0.0]),
        ([0.3], [0.0]),
    ],
)
def test_divided_by_the_standard_deviation(group: list[float], expected: list[float]) -> None:
    values = np.array([[*group, np.nan]])
    advantages, _ = group_advantages(values, ~np.isnan(values), divide_by_std=True)
    np.testing.assert_allclose(advantages, [[*expected, 0.0]], atol=3e-6)


def test_a_given_baseline_is_not_divided() -> None:
    values = np.array([[0.0, 1.0], [1.0, np.nan]])
    advantages, _ = group_advantages(values, ~np.isnan(values), np.array([0.25, 0.25]), divide_by_std=True)
    assert advantages.tolist() == [[-0.25, 0.75], [0.75, 0.0]]


def test_an_unknown_baseline_is_refused() -> None:
    with pytest.raises(UserError, match="estimator.baseline: found 'median', accepted: mean, leave_one_out"):
        group_advantages(np.zeros((1, 2)), np.ones((1, 2)), kind="median")


@st.composite
def ragged_groups(draw):
    """values, valid, present [B, G], and float32 values that sums in float64 do not round."""
    sizes = draw(st.lists(st.integers(0, 6), min_size=1, max_size=4))
    shape = (len(sizes), max(sizes))
    present = np.arange(shape[1]) < np.array(sizes)[:, None]
    cells = draw(st.lists(st.integers(0, 64), min_size=present.size, max_size=present.size))
    flags = draw(st.lists(st.booleans(), min_size=present.size, max_size=present.size))
    values = (np.array(cells, dtype=np.float32) / 64).reshape(shape)
    valid = np.array(flags, dtype=bool).reshape(shape)
    return np.where(valid & present, values, np.nan), valid, present


@given(ragged_groups(), st.sampled_from(["mean", "leave_one_out"]), st.booleans(), st.integers(-64, 64))
def test_properties_of_ragged_groups(groups, kind, divide_by_std, shift) -> None:
    values, valid, present = groups
    advantages, weights = group_advantages(values, valid, None, present, kind, divide_by_std)
    assert np.isfinite(advantages).all()
    assert (weights == (valid & present)).all() and not advantages[weights == 0].any()
    assert np.abs(advantages.sum(axis=-1)).max(initial=0) < 1e-4
    shifted = group_advantages(values + shift / 64, valid, None, present, kind, divide_by_std)[0]
    np.testing.assert_allclose(shifted, advantages, rtol=1e-6, atol=1e-9)
    for b, size in enumerate(present.sum(axis=-1)):  # a group alone, without padding
        alone = group_advantages(values[b : b + 1, :size], valid[b : b + 1, :size], None, None, kind, divide_by_std)[0]
        np.testing.assert_allclose(alone[0], advantages[b, :size], rtol=1e-6)


@given(ragged_groups(), st.sampled_from(["mean", "leave_one_out"]), st.booleans(), st.randoms(use_true_random=False))
def test_permuting_a_group_permutes_its_advantages(groups, kind, divide_by_std, random) -> None:
    values, valid, present = groups
    order = list(range(values.shape[1]))
    random.shuffle(order)
    advantages, weights = group_advantages(values, valid, None, present, kind, divide_by_std)
    permuted = group_advantages(values[:, order], valid[:, order], None, present[:, order], kind, divide_by_std)
    np.testing.assert_allclose(permuted[0], advantages[:, order], rtol=1e-6)
    assert (permuted[1] == weights[:, order]).all()


@given(ragged_groups())
def test_leave_one_out_is_the_mean_baseline_scaled(groups) -> None:
    values, valid, present = groups
    by_mean, _ = group_advantages(values, valid, None, present)
    by_others, _ = group_advantages(values, valid, None, present, "leave_one_out")
    for b, members in enumerate(valid & present):
        known = values[b, members]
        for g, advantage in zip(np.flatnonzero(members), by_others[b, members]):
            others = known.sum() - values[b, g]
            assert advantage == pytest.approx(
                values[b, g] - others / (len(known) - 1) if len(known) > 1 else 0, abs=1e-6
            )
        if len(known) > 1:
            np.testing.assert_allclose(by_others[b], by_mean[b] * len(known) / (len(known) - 1), rtol=1e-6)


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
