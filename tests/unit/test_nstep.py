from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ac2.algorithm.nstep import nstep_targets
from megatron_ac2.algorithm.value_losses import value_mse_loss

# Three siblings from one prefix: two inner boundaries, none (ends within its first chunk), one.
FROZEN = [np.array([0.2, 0.4]), np.zeros(0), np.array([0.6])]
ENDS = np.array([1.0, 0.0, 0.5])


def test_the_prefix_bootstraps_from_the_mean_over_siblings() -> None:
    # n = 1: (0.2 + 0 + 0.6) / 3; n = 2: (0.4 + 0 + 0.5) / 3; n = 3: (1 + 0 + 0.5) / 3; n = 4: all have ended
    prefix, _ = nstep_targets(FROZEN, ENDS, 4)
    assert prefix.targets.tolist() == pytest.approx([0.8 / 3, 0.3, 0.5, 0.0])
    assert prefix.mask.tolist() == [True, True, True, False]
    assert prefix.targets.dtype == np.float32 and prefix.mask.dtype == bool


def test_inner_boundaries_look_along_their_own_trajectory() -> None:
    _, own = nstep_targets(FROZEN, ENDS, 3)
    # trajectory 0: boundary 1 sees boundary 2, then the end; boundary 2 sees the end only
    np.testing.assert_allclose(own[0].targets, [[0.4, 1.0, 0.0], [1.0, 0.0, 0.0]])
    assert own[0].mask.tolist() == [[True, True, False], [True, False, False]]
    assert own[1].targets.shape == own[1].mask.shape == (0, 3)
    np.testing.assert_allclose(own[2].targets, [[0.5, 0.0, 0.0]])
    assert own[2].mask.tolist() == [[True, False, False]]
    assert all(found.targets.dtype == np.float32 for found in own)


def test_a_short_horizon_does_not_see_the_end() -> None:
    prefix, own = nstep_targets([np.array([0.2, 0.4, 0.6])], np.array([1.0]), 1)
    assert prefix.targets.tolist() == pytest.approx([0.2])
    assert own[0].targets[:, 0].tolist() == pytest.approx([0.4, 0.6, 1.0])
    assert own[0].mask.all()


def test_one_chunk_to_the_end_is_the_group_mean() -> None:
    prefix, own = nstep_targets([np.zeros(0)] * 4, np.array([1.0, 0.0, 0.0, 1.0]), 5)
    assert prefix.targets.tolist() == [0.5, 0, 0, 0, 0]
    assert prefix.mask.tolist() == [True, False, False, False, False]
    assert [found.mask.size for found in own] == [0, 0, 0, 0]


def test_an_empty_group_has_no_target() -> None:
    prefix, own = nstep_targets([], np.zeros(0), 3)
    assert not prefix.mask.any() and prefix.targets.tolist() == [0, 0, 0] and own == []


@settings(max_examples=80)
@given(st.lists(st.integers(0, 6), min_size=1, max_size=6), st.integers(1, 8), st.integers(0, 2**32 - 1))
def test_every_target_is_read_where_it_should_be(inner: list[int], num_max: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    frozen, ends = [rng.random(count) for count in inner], rng.random(len(inner))
    prefix, own = nstep_targets(frozen, ends, num_max)
    for values, end, found in zip(frozen, ends, own):
        for i in range(1, len(values) + 1):
            for n in range(1, num_max + 1):
                expected = values[i + n - 1] if i + n <= len(values) else end
                exists = i + n <= len(values) + 1
                assert found.mask[i - 1, n - 1] == exists
                assert found.targets[i - 1, n - 1] == pytest.approx(expected if exists else 0.0, abs=1e-6)
    for n in range(1, num_max + 1):
        reached = [values[n - 1] if n <= len(values) else end for values, end in zip(frozen, ends)]
        exists = n <= max(inner) + 1
        assert prefix.mask[n - 1] == exists
        assert prefix.targets[n - 1] == pytest.approx(np.mean(reached) if exists else 0.0, abs=1e-6)
    assert prefix.mask[0] and all(found.mask[:, 0].all() for found in own)


def test_the_loss_averages_losses_not_targets() -> None:
    _, own = nstep_targets([np.array([0.2, 0.4, 0.7])], np.array([1.0]), 3)
    targets, mask = torch.from_numpy(own[0].targets).double(), torch.from_numpy(own[0].mask)
    # boundary 1: 0.4, 0.7, 1; boundary 2: 0.7, 1; boundary 3: 1
    counts = mask.sum(-1, keepdim=True)
    means = (targets * mask).sum(-1) / counts[:, 0]
    values = torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64)
    averaged_at, mean_at = values.clone().requires_grad_(), values.clone().requires_grad_()
    averaged = value_mse_loss(averaged_at, targets, mask / counts)
    on_the_mean = value_mse_loss(mean_at, means, torch.ones(3))
    averaged.backward()
    on_the_mean.backward()
    torch.testing.assert_close(averaged_at.grad, mean_at.grad)
    # variances: 0.09 + 0 + 0.09 over 3; 0.0225; 0
    assert (averaged - on_the_mean).item() == pytest.approx(0.5 * (0.06 + 0.0225), abs=1e-6)


def test_what_does_not_match_is_refused() -> None:
    with pytest.raises(ValueError, match="num_max 0"):
        nstep_targets(FROZEN, ENDS, 0)
    with pytest.raises(ValueError, match="3 trajectories"):
        nstep_targets(FROZEN, ENDS[:2], 3)
