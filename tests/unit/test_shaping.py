from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ac2.algorithm.shaping import informative, map_reward, overlong_penalty
from megatron_ac2.types import UserError


@pytest.mark.parametrize(
    ("length", "expected"),
    [(0, 0.0), (16_384, 0.0), (16_385, -1 / 4096), (18_432, -0.5), (20_480, -1.0), (20_481, -1.0), (10**9, -1.0)],
)  # DAPO: a budget of 20,480 tokens, of which the last 4,096 are the cache
def test_overlong_penalty(length: int, expected: float) -> None:
    assert overlong_penalty(length, 20_480, 4_096) == expected


def test_without_a_cache_only_what_passes_the_budget_is_punished() -> None:
    assert [overlong_penalty(length, 10, 0) for length in (9, 10, 11)] == [0.0, 0.0, -1.0]
    assert [overlong_penalty(length, 10, 10) for length in (0, 5, 10)] == [0.0, -0.5, -1.0]


@given(st.integers(1, 100), st.integers(0, 100), st.integers(0, 200))
def test_the_penalty_falls_with_the_length(budget: int, cache: int, length: int) -> None:
    cache = min(cache, budget)
    here, next_one = overlong_penalty(length, budget, cache), overlong_penalty(length + 1, budget, cache)
    assert -1 <= next_one <= here <= 0
    if cache:
        assert here - next_one <= 1 / cache + 1e-12


@pytest.mark.parametrize("cache", [-1, 11])
def test_a_cache_outside_the_budget_is_refused(cache: int) -> None:
    with pytest.raises(UserError, match=rf"sampling.overlong_cache: found {cache}, accepted: 0 to .* \(10\)"):
        overlong_penalty(5, 10, cache)


@pytest.mark.parametrize(
    ("reward", "low", "high", "expected"),
    [(-1.0, -1.0, 1.0, 0.0), (0.0, -1.0, 1.0, 0.5), (1.0, -1.0, 1.0, 1.0), (3.0, 0.0, 4.0, 0.75), (0.3, 0.0, 1.0, 0.3)],
)
def test_map_reward(reward: float, low: float, high: float, expected: float) -> None:
    assert map_reward(reward, low, high) == expected


@pytest.mark.parametrize("reward", [-1.01, 1.01, float("nan"), float("inf"), -float("inf")])
def test_a_reward_out_of_its_range_is_refused(reward: float) -> None:
    with pytest.raises(UserError, match=f"data.reward_range: found reward {reward}, accepted: -1.0 to 1.0"):
        map_reward(reward, -1.0, 1.0)


@pytest.mark.parametrize(("low", "high"), [(1.0, 1.0), (2.0, 1.0), (float("nan"), 1.0), (0.0, float("inf"))])
def test_a_range_that_is_none_is_refused(low: float, high: float) -> None:
    with pytest.raises(UserError, match="data.reward_range: found .*, accepted: two finite numbers"):
        map_reward(1.0, low, high)


@given(st.floats(-1e6, 1e6), st.floats(1e-3, 1e6), st.floats(0, 1), st.floats(0, 1))
def test_mapped_rewards_stay_in_order_and_in_range(low: float, width: float, first: float, second: float) -> None:
    high = low + width
    rewards = sorted(min(max(low + width * part, low), high) for part in (first, second))
    mapped = [map_reward(reward, low, high) for reward in rewards]
    assert 0 <= mapped[0] <= mapped[1] <= 1
    assert (map_reward(low, low, high), map_reward(high, low, high)) == (0.0, 1.0)


@pytest.mark.parametrize(
    ("values", "valid", "expected"),
    [
        ([1.0, 0.0], [1, 1], True),
        ([1.0, 1.0], [1, 1], False),
        ([0.3, 0.3, 0.30001], [1, 1, 1], True),
        ([1.0, 0.0, 1.0], [1, 0, 1], False),  # what differs is not valid
        ([np.nan, 1.0, 1.0], [0, 1, 1], False),
        ([0.0, np.inf, 1.0], [1, 0, 1], True),
        ([0.7], [1], False),
        ([0.0, 1.0], [0, 0], False),
        ([], [], False),
    ],
)
def test_informative(values, valid, expected: bool) -> None:
    assert informative(np.array(values), np.array(valid, dtype=bool)) is expected
