from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ac2.algorithm.calibration import (
    bias,
    expected_calibration_error,
    explained_variance,
    mean_absolute_error,
    reliability,
)

NUMBERS = [explained_variance, mean_absolute_error, bias, expected_calibration_error]
pairs = st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), min_size=1, max_size=30)


def test_errors_keep_the_sign_and_leave_out_the_invalid() -> None:
    values, outcomes = np.array([0.5, 0.9, 1.0]), np.array([1.0, 0.8, 0.0])
    assert mean_absolute_error(values, outcomes) == pytest.approx(1.6 / 3)
    assert bias(values, outcomes) == pytest.approx(0.6 / 3)
    valid = np.array([True, True, False])
    assert mean_absolute_error(values, outcomes, valid) == pytest.approx(0.3)
    assert bias(values, outcomes, valid) == pytest.approx(-0.2)


def test_explained_variance_special_cases() -> None:
    outcomes = np.array([0.0, 1.0, 1.0, 0.0])
    assert explained_variance(outcomes, outcomes) == 1
    assert explained_variance(np.full(4, 0.5), outcomes) == 0
    assert explained_variance(1 - outcomes, outcomes) == -3
    assert explained_variance(outcomes - 0.3, outcomes) == pytest.approx(1)  # blind to a constant bias
    assert math.isnan(explained_variance(outcomes, np.ones(4)))


def test_reliability_hand_worked() -> None:
    values, outcomes = np.array([0.1, 0.1, 0.5, 0.9, 1.0]), np.array([0.0, 1.0, 0.5, 1.0, 0.0])
    bins = reliability(values, outcomes)
    assert [(found.low, found.high) for found in bins] == [(0, 0.2), (0.2, 0.4), (0.4, 0.6), (0.6, 0.8), (0.8, 1)]
    assert [found.count for found in bins] == [2, 0, 1, 0, 2]
    assert bins[0][3:] == pytest.approx((0.1, 0.5))
    assert bins[2][3:] == pytest.approx((0.5, 0.5))
    assert bins[4][3:] == pytest.approx((0.95, 0.5))
    assert math.isnan(bins[1].mean_value) and math.isnan(bins[3].mean_outcome)
    # (2 * 0.4 + 1 * 0 + 2 * 0.45) / 5
    assert expected_calibration_error(values, outcomes) == pytest.approx(0.34)


@pytest.mark.parametrize("num_bins", [2, 5, 10])
def test_float32_grid_values_belong_to_the_bin_above_their_edge(num_bins: int) -> None:
    steps = np.arange(11)
    counts = [found.count for found in reliability((steps / 10).astype(np.float32), steps / 10, num_bins)]
    width = 10 // num_bins
    assert counts == [width] * (num_bins - 1) + [width + 1]


def test_values_outside_the_interval_count_at_its_ends() -> None:
    assert [found.count for found in reliability([-0.5, 1.5, 1.0], [0, 1, 1], 2)] == [1, 2]


def test_a_calibrated_coin_is_calibrated_and_an_inverted_one_is_not() -> None:
    rng = np.random.default_rng(0)
    values = rng.choice([0.1, 0.3, 0.5, 0.7, 0.9], 20_000)
    outcomes = rng.random(20_000) < values
    assert expected_calibration_error(values, outcomes) < 0.02
    assert expected_calibration_error(1 - values, outcomes) == pytest.approx(0.48, abs=0.02)  # mean |1 - 2 p|


@settings(max_examples=60)
@given(pairs, st.integers(1, 12))
def test_what_the_numbers_owe_each_other(found: list[tuple[float, float]], num_bins: int) -> None:
    values, outcomes = (np.array(column) for column in zip(*found))
    bins = reliability(values, outcomes, num_bins)
    assert sum(part.count for part in bins) == len(values)
    error = expected_calibration_error(values, outcomes, num_bins)
    assert abs(bias(values, outcomes)) - 1e-12 <= error <= mean_absolute_error(values, outcomes) + 1e-12
    assert expected_calibration_error(values, outcomes, 1) == pytest.approx(abs(bias(values, outcomes)))


@pytest.mark.parametrize("number", NUMBERS)
def test_masked_entries_are_never_read(number) -> None:
    values, outcomes = np.array([0.2, 0.8, 0.5]), np.array([0.0, 1.0, 1.0])
    valid = np.array([True, False, True, True])
    with_junk = number(np.insert(values, 1, np.nan), np.insert(outcomes, 1, np.inf), valid=valid)
    assert with_junk == number(values, outcomes) and math.isfinite(with_junk)


@pytest.mark.parametrize("number", NUMBERS)
def test_of_nothing_every_number_is_nan(number) -> None:
    assert math.isnan(number(np.zeros(0), np.zeros(0)))
    assert math.isnan(number(np.ones(3), np.zeros(3), valid=np.zeros(3, bool)))


def test_any_shape_will_do_but_all_the_same() -> None:
    assert bias(np.ones((2, 3)), np.zeros((2, 3)), np.ones((2, 3), bool)) == 1
    assert [found.count for found in reliability(np.zeros(0), np.zeros(0), 3)] == [0, 0, 0]
    with pytest.raises(ValueError, match="3 values, 2 outcomes"):
        bias(np.ones(3), np.zeros(2))
    with pytest.raises(ValueError, match="num_bins 0"):
        reliability(np.ones(1), np.ones(1), 0)
