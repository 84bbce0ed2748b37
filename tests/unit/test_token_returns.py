from __future__ import annotations

import math
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ac2.algorithm.token_returns import brace, gae
from megatron_ac2.types import UserError

PAPER = {"horizon": 100, "rho_max": 1.2, "c_max": 1.1, "lam": 1.0, "gamma": 1.0, "product_max": math.inf}
V = np.array([0.5, 0.4, 0.6])


def draw(num_tokens: int, seed: int = 0) -> tuple[np.ndarray, float, np.ndarray]:
    rng = np.random.default_rng(seed)
    return rng.random(num_tokens), float(rng.random()), np.exp(rng.normal(0, 0.5, num_tokens))


# GAE


def test_gae_hand_worked() -> None:
    # R = 1: deltas -0.1, 0.2, 0.4; lambda 0.5: A_2 = 0.4, A_1 = 0.2 + 0.2, A_0 = -0.1 + 0.2
    advantages, returns = gae(V, 1.0, gamma=1.0, lam=0.5)
    assert advantages.tolist() == pytest.approx([0.1, 0.4, 0.4])
    assert returns.tolist() == pytest.approx([0.6, 0.8, 1.0])
    assert advantages.dtype == returns.dtype == np.float32


def test_gae_hand_worked_with_discount() -> None:
    # gamma 0.5: deltas 0.2 - 0.5, 0.3 - 0.4, 0.5 - 0.6; gamma lambda 0.4: A_1 = -0.1 - 0.04, A_0 = -0.3 - 0.056
    advantages, returns = gae(V, 1.0, gamma=0.5, lam=0.8)
    assert advantages.tolist() == pytest.approx([-0.356, -0.14, -0.1])
    assert returns.tolist() == pytest.approx([0.144, 0.26, 0.5])


def test_gae_with_lambda_one_is_the_endpoint_minus_the_value() -> None:
    values, end, _ = draw(1000)
    advantages, returns = gae(values, end, gamma=1.0, lam=1.0)
    np.testing.assert_allclose(advantages, end - values, atol=1e-6)
    np.testing.assert_allclose(returns, end, atol=1e-6)


def test_gae_with_lambda_zero_is_one_step() -> None:
    values, end, _ = draw(1000)
    advantages, _ = gae(values, end, gamma=1.0, lam=0.0)
    np.testing.assert_allclose(advantages, np.append(values[1:], end) - values, atol=1e-7)


@settings(max_examples=60)
@given(st.integers(0, 40), st.floats(0, 1), st.floats(0, 1), st.integers(0, 2**32 - 1))
def test_gae_is_the_backward_recursion(num_tokens: int, gamma: float, lam: float, seed: int) -> None:
    values, end, _ = draw(num_tokens, seed)
    expected, following, next_value = np.zeros(num_tokens), 0.0, end
    for t in reversed(range(num_tokens)):
        following = gamma * next_value - values[t] + gamma * lam * following
        expected[t], next_value = following, values[t]
    advantages, returns = gae(values, end, gamma, lam)
    np.testing.assert_allclose(advantages, expected, atol=1e-6)
    np.testing.assert_allclose(returns, expected + values, atol=1e-6)


# BRACE


def naive_brace(values, end, ratios, *, horizon, rho_max, c_max, lam, gamma, product_max):
    """The page's formula, sum by sum and product by product."""
    num_tokens = len(ratios)
    states = [*values, end]
    c = [lam * min(c_max, w) for w in ratios]
    targets = []
    for s in range(num_tokens):
        j = min(s + horizon, num_tokens)
        target = states[s]
        for t in range(s, j):
            delta = min(rho_max, ratios[t]) * (gamma * states[t + 1] - states[t])
            target += gamma ** (t - s) * min(math.prod(c[s:t]), product_max) * delta
        residual = gamma ** (num_tokens - s) * end - gamma ** (j - s) * states[j]
        targets.append(target + min(math.prod(c[s:j]), product_max) * residual)
    advantages = [gamma * after - value for after, value in zip([*targets[1:], end], values)]
    return targets, advantages


def test_brace_hand_worked() -> None:
    # w = 2, .5, 1: rho = 1.2, .5, 1, c = 1.1, .5, 1, R = 1; deltas 1.2 (-.1) = -.12, .5 (.2) = .1, .4
    # s = 0, j = 2: .5 - .12 + 1.1 (.1) + 1.1 (.5) (1 - .6) = .71
    # s = 1, j = 3: .4 + .1 + .5 (.4) = .7; s = 2: .6 + .4 = 1
    targets, advantages = brace(V, 1.0, np.array([2.0, 0.5, 1.0]), **PAPER | {"horizon": 2})
    assert targets.tolist() == pytest.approx([0.71, 0.7, 1.0])
    assert advantages.tolist() == pytest.approx([0.2, 0.6, 0.4])
    assert targets.dtype == advantages.dtype == np.float32


def test_brace_hand_worked_with_discount() -> None:
    # gamma = lambda = .5, horizon 1: c = .55, .25, .5; deltas 1.2 (.2 - .5) = -.36, .5 (.3 - .4) = -.05, .5 - .6 = -.1
    # s = 0: .5 - .36 + .55 (.125 - .5 (.4)) = .09875; s = 1: .4 - .05 + .25 (.25 - .5 (.6)) = .3375; s = 2: .6 - .1
    # A = .5 (.3375) - .5, .5 (.5) - .4, .5 (1) - .6
    settings_ = PAPER | {"horizon": 1, "lam": 0.5, "gamma": 0.5}
    targets, advantages = brace(V, 1.0, np.array([2.0, 0.5, 1.0]), **settings_)
    assert targets.tolist() == pytest.approx([0.09875, 0.3375, 0.5])
    assert advantages.tolist() == pytest.approx([-0.33125, -0.15, -0.1])


@pytest.mark.parametrize("horizon", [0, 1, 7, 100, 1000])
def test_brace_on_policy_is_the_endpoint(horizon: int) -> None:
    values, end, _ = draw(150)
    targets, advantages = brace(values, end, np.ones(150), **PAPER | {"horizon": horizon})
    np.testing.assert_allclose(targets, end, atol=1e-6)
    np.testing.assert_allclose(advantages, end - values, atol=1e-6)


@pytest.mark.parametrize("gamma", [1.0, 0.9])
def test_brace_without_a_horizon_is_the_endpoint_whatever_the_ratios(gamma: float) -> None:
    values, end, ratios = draw(50)
    targets, _ = brace(values, end, ratios, **PAPER | {"horizon": 0, "gamma": gamma})
    np.testing.assert_allclose(targets, gamma ** (50.0 - np.arange(50)) * end, atol=1e-6)


@pytest.mark.parametrize("horizon", [60, 61, 10_000])
@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.97, 1.0), (1.0, 0.9)])
def test_brace_with_a_horizon_past_the_end_is_vtrace(horizon: int, gamma: float, lam: float) -> None:
    values, end, ratios = draw(60)
    corrected, next_corrected, next_value = np.zeros(60), end, end  # arXiv 1802.01561, remark 1, from the end back
    for t in reversed(range(60)):
        delta = min(1.2, ratios[t]) * (gamma * next_value - values[t])
        trace = lam * min(1.1, ratios[t])
        corrected[t] = values[t] + delta + gamma * trace * (next_corrected - next_value)
        next_corrected, next_value = corrected[t], values[t]
    found = brace(values, end, ratios, **PAPER | {"horizon": horizon, "gamma": gamma, "lam": lam})
    np.testing.assert_allclose(found[0], corrected, atol=1e-5)
    np.testing.assert_allclose(found[1], gamma * np.append(corrected[1:], end) - values, atol=1e-5)


def test_at_gamma_one_a_reward_with_the_last_token_is_the_same_vtrace() -> None:
    values, end, ratios = draw(20)
    rewards, states = np.append(np.zeros(19), end), np.append(values, 0.0)
    corrected = np.zeros(21)
    for t in reversed(range(20)):
        delta = min(1.2, ratios[t]) * (rewards[t] + states[t + 1] - states[t])
        corrected[t] = states[t] + delta + min(1.1, ratios[t]) * (corrected[t + 1] - states[t + 1])
    np.testing.assert_allclose(brace(values, end, ratios, **PAPER)[0], corrected[:-1], atol=1e-6)


@settings(max_examples=80)
@given(
    st.lists(st.tuples(st.floats(0, 1), st.sampled_from([0.0, 0.3, 1.0, 1.05, 5.0, 1e40])), max_size=12),
    st.integers(0, 14),
    st.floats(0, 1),
    st.floats(0, 1),
    st.sampled_from([1.0, 1.3, math.inf]),
)
def test_brace_is_the_formula(tokens, horizon: int, gamma: float, lam: float, product_max: float) -> None:
    values, ratios = (np.array(column) for column in (zip(*tokens) if tokens else ((), ())))
    chosen = PAPER | {"horizon": horizon, "gamma": gamma, "lam": lam, "product_max": product_max}
    found = brace(values, 0.75, ratios, **chosen)
    for ours, expected in zip(found, naive_brace(values.tolist(), 0.75, ratios.tolist(), **chosen)):
        np.testing.assert_allclose(ours, expected, atol=2e-6)


def test_the_cap_bounds_every_product() -> None:
    # w = 2 everywhere, V alternates 0, 0.5: uncapped, the last weights are 1.1^99 = 12,500
    values, ratios = np.tile([0.0, 0.5], 100), np.full(200, 2.0)
    assert np.abs(brace(values, 1.0, ratios, **PAPER)[0]).max() > 1000
    assert np.abs(brace(values, 1.0, ratios, **PAPER | {"product_max": 10.0})[0]).max() < 100
    within = brace(values, 1.0, np.ones(200), **PAPER | {"product_max": 1.0})[0]
    np.testing.assert_allclose(within, 1.0, atol=1e-6)


@pytest.mark.parametrize("product_max", [10.0, math.inf])
def test_extreme_ratios_stay_finite(product_max: float) -> None:
    ratios = np.exp(np.tile([100.0, -100.0, 0.0, 100.0], 50))
    for extreme in (ratios, np.where(ratios > 1, np.inf, 0.0), np.zeros(200)):
        for found in brace(np.full(200, 0.3), 1.0, extreme, **PAPER | {"product_max": product_max}):
            assert np.isfinite(found).all()
    traces = {"horizon": 200, "c_max": 1e30, "product_max": product_max}  # 1e30^11 is inf, and inf * 0 would be NaN
    zero_last = np.append(np.full(199, 1e30), 0.0)
    assert np.isfinite(brace(np.full(200, 0.0), 0.0, zero_last, **PAPER | traces)[0]).all()


def test_a_ratio_of_zero_cuts_what_comes_after() -> None:
    values, ratios = np.array([0.2, 0.3, 0.9]), np.array([0.0, 1.0, 1.0])
    targets, _ = brace(values, 1.0, ratios, **PAPER)
    assert targets.tolist() == pytest.approx([0.2, 1.0, 1.0])


def test_a_response_without_tokens_has_no_targets() -> None:
    nothing = np.zeros(0)
    for found in (gae(nothing, 1.0, 1.0, 1.0), brace(nothing, 1.0, nothing, **PAPER)):
        assert [part.shape for part in found] == [(0,), (0,)]


def test_inputs_are_left_alone() -> None:
    values, end, ratios = draw(30)
    before = values.copy(), ratios.copy()
    gae(values, end, 0.9, 0.9)
    brace(values, end, ratios, **PAPER)
    assert np.array_equal(values, before[0]) and np.array_equal(ratios, before[1])


def test_long_responses_take_no_token_by_token_loop() -> None:
    values, end, ratios = draw(50_000)
    start = time.process_time()
    gae(values, end, 1.0, 0.95)
    brace(values, end, ratios, **PAPER)
    assert time.process_time() - start < 2


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"gamma": 1.1}, "estimator.gamma: found 1.1"),
        ({"lam": -0.1}, "estimator.brace_lambda: found -0.1"),
        ({"horizon": -1}, "estimator.brace_horizon: found -1"),
        ({"rho_max": math.inf}, "estimator.brace_rho_max"),
        ({"c_max": 0.0}, "estimator.brace_c_max"),
        ({"product_max": 0.5}, "estimator.brace_product_max"),
    ],
)
def test_parameters_out_of_range_are_named(bad: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        brace(V, 1.0, np.ones(3), **PAPER | bad)


def test_what_does_not_match_is_refused() -> None:
    with pytest.raises(UserError, match="estimator.gae_lambda: found 2"):
        gae(V, 1.0, 1.0, 2.0)
    with pytest.raises(ValueError, match="one row"):
        gae(np.zeros((2, 3)), 1.0, 1.0, 1.0)
    for ratios in (np.ones(2), np.array([1.0, np.nan, 1.0]), np.array([1.0, -1.0, 1.0])):
        with pytest.raises(ValueError, match="3 tokens need as many ratios"):
            brace(V, 1.0, ratios, **PAPER)
