from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ac2.algorithm.rfpo import Calibration, calibrated_rewards, fit_calibration, rfpo_advantages
from megatron_ac2.algorithm.token_returns import gae
from megatron_ac2.types import UserError


def one_of_each() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Lengths 1 ... 10, a correct and an incorrect response each; the values grow with the length by 0.01 and 0.03."""
    lengths = np.repeat(np.arange(1, 11), 2)
    labels = np.tile([True, False], 10)
    values = np.where(labels, 0.8 + 0.01 * (lengths - 5.5), 0.3 + 0.03 * (lengths - 5.5))
    return values, lengths, labels


def test_hand_worked_offsets_and_threshold() -> None:
    values, lengths, labels = one_of_each()
    fitted = fit_calibration(values, lengths, labels)
    # sorted lengths 1 1 2 2 ...; the quantile at 0.1 is at place 1.9, between 1 and 2
    assert fitted.edges[0] == pytest.approx(1.9) and fitted.edges.shape == (9,)
    assert fitted.offsets.tolist() == pytest.approx((0.02 * (np.arange(1, 11) - 5.5)).tolist())
    # v - b: correct 0.8 -+ 0.045, incorrect 0.3 -+ 0.045; ten are right: between 0.755 and 0.345
    assert fitted.threshold == pytest.approx(0.55)
    rewards = calibrated_rewards(fitted, values, lengths)
    assert rewards.dtype == np.float32 and rewards.tolist() == labels.astype(float).tolist()


def test_a_decile_with_one_class_takes_that_class_and_one_with_none_takes_zero() -> None:
    values, lengths, labels = one_of_each()
    one_class = np.where(lengths == 1, False, labels)  # length 1: both incorrect
    fitted = fit_calibration(values, lengths, one_class)
    assert fitted.offsets[0] == pytest.approx(values[:2].mean() - values[~one_class].mean())
    # all lengths equal: everything is in the lowest decile, where the offset is 0 by definition
    same = fit_calibration(values, np.full(20, 7), labels)
    assert same.offsets.tolist() == pytest.approx([0.0] * 10)
    assert calibrated_rewards(same, np.array([0.9, 0.9]), np.array([1, 100])).tolist() == [1, 1]


def test_an_offset_is_not_how_often_a_length_is_correct() -> None:
    # long responses are mostly wrong, but within a class the value knows nothing of the length
    rng = np.random.default_rng(0)
    lengths = rng.permutation(1000)
    labels = rng.random(1000) > lengths / 1000
    fitted = fit_calibration(np.where(labels, 0.9, 0.1), lengths, labels)
    np.testing.assert_allclose(fitted.offsets, 0.0, atol=1e-12)


def test_length_alone_no_longer_earns_a_reward() -> None:
    rng = np.random.default_rng(1)
    lengths, labels = rng.permutation(2000), rng.random(2000) < 0.4
    values = 0.3 + 0.1 * labels + 0.5 * lengths / 2000  # the length outweighs the label
    rewards = calibrated_rewards(fit_calibration(values, lengths, labels), values, lengths)
    plain = values > np.quantile(values, 0.6)
    assert (plain == labels).mean() < 0.75
    assert (rewards == labels).mean() > 0.9
    assert abs(np.corrcoef(rewards, lengths)[0, 1]) < 0.1 < np.corrcoef(plain, lengths)[0, 1]


@settings(max_examples=80)
@given(st.integers(2, 200), st.floats(0.01, 0.99), st.integers(0, 2**32 - 1))
def test_the_share_above_the_threshold_is_the_positive_rate(num: int, rate: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    values, lengths, labels = rng.random(num), rng.integers(0, 50, num), rng.random(num) < rate
    labels[:2] = True, False
    fitted = fit_calibration(values, lengths, labels)
    scores = values - fitted.offsets[np.searchsorted(fitted.edges, lengths)]
    found = calibrated_rewards(fitted, values, lengths).sum()
    ties = np.unique(np.round(scores, 9), return_counts=True)[1].max() - 1
    assert abs(found - labels.sum()) <= ties


@pytest.mark.parametrize(
    ("num_low", "num_correct", "num_rewarded"),
    [(6, 3, 4), (6, 5, 4), (2, 1, 0), (2, 5, 8), (4, 6, 6), (2, 9, 8), (1, 9, 9), (6, 9, 10), (6, 2, 0), (6, 7, 4)],
)
def test_equal_scores_give_the_closest_share(num_low: int, num_correct: int, num_rewarded: int) -> None:
    # ten responses of one length, hence no offsets: the share above can be none, those at 0.7, or all; ties to fewer
    values = np.array([0.2] * num_low + [0.7] * (10 - num_low))
    labels = np.arange(10) < num_correct
    fitted = fit_calibration(values, np.full(10, 5), labels)
    assert calibrated_rewards(fitted, values, np.full(10, 5)).sum() == num_rewarded


def test_lengths_never_seen_belong_to_the_nearest_decile() -> None:
    fitted = Calibration(np.arange(10.0, 100.0, 10.0), np.linspace(-0.45, 0.45, 10), 0.5)
    # an edge belongs to the decile below it; v - b against 0.5
    rewards = calibrated_rewards(fitted, np.array([0.06, 0.04, 0.06, 0.06, 0.96, 0.94]), [0, 10, 10, 11, 91, 10**6])
    assert rewards.tolist() == [1, 0, 1, 0, 1, 0]


def test_a_value_that_is_not_known_earns_nothing() -> None:
    fitted = fit_calibration(*one_of_each())
    assert calibrated_rewards(fitted, np.array([np.nan]), np.array([5])).tolist() == [0]
    assert calibrated_rewards(fitted, np.zeros(0), np.zeros(0)).shape == (0,)


def test_a_checkpoint_gives_back_the_same_rewards() -> None:
    values, lengths, labels = one_of_each()
    fitted = fit_calibration(values, lengths, labels)
    saved = fitted.state_dict()
    loaded = Calibration.from_state(saved)
    assert np.array_equal(loaded.edges, fitted.edges) and np.array_equal(loaded.offsets, fitted.offsets)
    assert loaded.threshold == fitted.threshold
    saved["edges"][:] = 0  # the state is a copy
    assert fitted.edges[0] > 0 and loaded.edges[0] > 0
    with pytest.raises(ValueError, match="RFPO calibration"):
        Calibration.from_state({**saved, "offsets": np.zeros(9)})


@pytest.mark.parametrize("label", [True, False])
def test_labels_of_one_class_are_refused(label: bool) -> None:
    with pytest.raises(UserError, match="estimator.rfpo_num_labelled: found .* correct among 4 labelled") as raised:
        fit_calibration(np.ones(4), np.ones(4), np.full(4, label))
    assert "raise it" in str(raised.value)


def test_no_labels_and_broken_arrays_are_refused() -> None:
    with pytest.raises(UserError, match="0 correct among 0"):
        fit_calibration(np.zeros(0), np.zeros(0), np.zeros(0, bool))
    for values, lengths in ((np.array([0.1, np.nan]), np.ones(2)), (np.ones(2), np.ones(3)), (np.ones(3), np.ones(3))):
        with pytest.raises(ValueError, match="one finite value, length and label"):
            fit_calibration(values, lengths, np.array([True, False]))


def test_advantages_are_the_reward_less_the_value() -> None:
    values = np.array([0.2, 0.7, 0.9])
    advantages = rfpo_advantages(1.0, values)
    assert advantages.dtype == np.float32 and advantages.tolist() == pytest.approx([0.8, 0.3, 0.1])
    np.testing.assert_allclose(advantages, gae(values, 1.0, 1.0, 1.0)[0], atol=1e-6)
