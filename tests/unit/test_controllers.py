from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ac2.algorithm.controllers import CriticLearningRate, EntropyClip
from megatron_ac2.types import UserError


def entropy_clip(k_init: float = 0.06) -> EntropyClip:
    return EntropyClip(k_init, step=0.02, target=0.28, k_min=-0.08, k_max=0.08)


def critic_lr(lr: float = 2 * math.sqrt(2) * 1e-6, lr_min: float = 5 * math.sqrt(2) * 1e-7) -> CriticLearningRate:
    return CriticLearningRate(lr, lr_min, ratio_limit=math.sqrt(2), patience=2)


def test_low_entropy_raises_the_bound_and_high_entropy_lowers_it() -> None:
    clip = entropy_clip()
    assert clip.update(0.1) == pytest.approx(0.08)
    assert clip.update(0.1) == pytest.approx(0.08)  # k_max
    assert clip.update(0.9) == pytest.approx(0.06)
    assert clip.update(0.28) == pytest.approx(0.06)  # on target
    for _ in range(20):
        clip.update(0.9)
    assert clip.k == -0.08


def test_no_measured_entropy_leaves_the_bound() -> None:
    clip = entropy_clip()
    assert clip.update(float("nan")) == 0.06


@given(st.lists(st.floats(0, 2), max_size=40))
def test_bound_stays_inside(entropies: list[float]) -> None:
    clip = entropy_clip()
    for entropy in entropies:
        before = clip.k
        assert -0.08 <= clip.update(entropy) <= 0.08
        assert abs(clip.k - before) <= 0.02 + 1e-12


def test_bound_must_start_inside() -> None:
    with pytest.raises(UserError, match="entropy.k_init: found 0.1"):
        entropy_clip(0.1)


def test_entropy_state_round_trip() -> None:
    clip, loaded = entropy_clip(), entropy_clip()
    clip.update(0.9)
    loaded.load_state_dict(clip.state_dict())
    assert loaded.k == clip.k == pytest.approx(0.04)


def test_two_consecutive_steps_above_the_limit_halve() -> None:
    rate = critic_lr(lr=8.0, lr_min=1.0)
    assert rate.observe(3.0, [1.0, 1.0]) == 8.0  # 1.5 > 1.414, first
    assert rate.observe(3.0, [1.0, 1.0]) == 4.0  # second
    assert rate.observe(3.0, [1.0, 1.0]) == 4.0  # the count starts anew
    assert rate.observe(3.0, [1.0, 1.0]) == 2.0


def test_a_step_below_the_limit_breaks_the_streak() -> None:
    rate = critic_lr(lr=8.0, lr_min=1.0)
    for critic_norm in (3.0, 2.8, 3.0, 0.0, 3.0):  # 2.8 / 2 = 1.4 is below
        assert rate.observe(critic_norm, [1.0, 1.0]) == 8.0


def test_exactly_at_the_limit_is_not_above() -> None:
    rate = CriticLearningRate(8.0, 1.0, ratio_limit=1.5, patience=1)
    assert rate.observe(3.0, [1.0, 1.0]) == 8.0
    assert rate.observe(3.0001, [1.0, 1.0]) == 4.0


def test_rate_never_falls_below_the_floor() -> None:
    rate = critic_lr(lr=3.0, lr_min=1.0)
    found = [rate.observe_non_finite() for _ in range(3)]
    assert found == [1.5, 1.0, 1.0]


def test_the_paper_s_floor_is_two_halvings_down() -> None:
    rate = critic_lr()
    for _ in range(2):
        rate.observe_non_finite()
    assert rate.lr == pytest.approx(rate.lr_min, rel=1e-12)


def test_non_finite_loss_halves_at_once_and_clears_the_streak() -> None:
    rate = critic_lr(lr=8.0, lr_min=1.0)
    rate.observe(3.0, [1.0])
    assert rate.observe_non_finite() == 4.0
    assert rate.observe(3.0, [1.0]) == 4.0  # first of a new streak


@pytest.mark.parametrize(
    ("critic_norm", "actor_norms"),
    [(1.0, [0.0, 0.0]), (1.0, []), (math.nan, [1.0]), (math.inf, [1.0]), (1.0, [math.nan])],
)
def test_without_a_ratio_nothing_changes(critic_norm: float, actor_norms: list[float]) -> None:
    rate = critic_lr(lr=8.0, lr_min=1.0)
    rate.observe(3.0, [1.0])
    assert rate.observe(critic_norm, actor_norms) == 8.0 and rate.streak == 1
    assert rate.observe(3.0, [1.0]) == 4.0


def test_rate_state_keeps_the_streak() -> None:
    rate, loaded = critic_lr(lr=8.0, lr_min=1.0), critic_lr(lr=8.0, lr_min=1.0)
    rate.observe_non_finite()
    rate.observe(3.0, [1.0])
    loaded.load_state_dict(rate.state_dict())
    assert (loaded.lr, loaded.streak) == (4.0, 1)
    assert loaded.observe(3.0, [1.0]) == 2.0
