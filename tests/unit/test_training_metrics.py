"""Sums over tokens or labels -> the metrics that are reported, by hand."""

from __future__ import annotations

import math

import pytest
import torch

from megatron_ac2.training.mismatch import mismatch_sums, score_metrics
from megatron_ac2.training.value_labels import value_metrics, value_sums


def scored(logprobs, behavior):
    sums = {name: value.item() for name, value in mismatch_sums(torch.tensor(logprobs), torch.tensor(behavior)).items()}
    return {**sums, "entropy": 0.3 * sums["tokens"], "empty_prefix_entropy": 0.5, "empty_prefix_tokens": 1.0}


def test_mismatch_by_hand():
    """Ratios 3, 1/4 and 1."""
    behavior = [-2.0, -1.0, -0.5]
    logprobs = [-2.0 + math.log(3), -1.0 - math.log(4), -0.5]
    metrics = score_metrics([scored(logprobs, behavior)])
    assert metrics["num_tokens"] == 3 and metrics["entropy"] == pytest.approx(0.3)
    assert metrics["mismatch/mean_abs"] == pytest.approx((math.log(3) + math.log(4)) / 3, rel=1e-6)
    assert metrics["mismatch/max_abs"] == pytest.approx(math.log(4), rel=1e-6)
    assert metrics["mismatch/k1"] == pytest.approx((math.log(4) - math.log(3)) / 3, rel=1e-5)
    assert metrics["mismatch/k3"] == pytest.approx((3 + 0.25 - 2 - math.log(3) + math.log(4)) / 3, rel=1e-6)
    assert metrics["mismatch/ratio_above_2"] == metrics["mismatch/ratio_below_half"] == pytest.approx(1 / 3)
    assert metrics["mismatch/ess"] == pytest.approx(4.25**2 / (3 * (9 + 1 / 16 + 1)), rel=1e-6)


def test_agreement_is_no_mismatch():
    metrics = score_metrics([scored([-1.0, -2.0], [-1.0, -2.0])])
    assert metrics["mismatch/ess"] == 1
    assert all(metrics[f"mismatch/{name}"] == 0 for name in ("mean_abs", "max_abs", "k1", "k3", "ratio_above_2"))


def test_minibatches_add_up():
    whole = scored([-1.0, -2.0, -3.0], [-1.5, -2.0, -2.0])
    parts = [scored([-1.0], [-1.5]), scored([-2.0, -3.0], [-2.0, -2.0])]
    halved = [{**part, "empty_prefix_entropy": 0.25, "empty_prefix_tokens": 0.5} for part in parts]
    assert score_metrics(halved) == pytest.approx(score_metrics([whole]))


def test_rerouted_is_a_share_of_all_choices():
    parts = [scored([-1.0], [-1.0]) | {"routed": 30, "rerouted": 1}, scored([], []) | {"routed": 10, "rerouted": 5}]
    assert score_metrics(parts)["mismatch/rerouted"] == 0.15
    assert score_metrics([parts[0] | {"routed": 0, "rerouted": 0}])["mismatch/rerouted"] == 0
    assert "mismatch/rerouted" not in score_metrics([scored([-1.0], [-1.0])])


def test_nothing_generated_is_not_a_division_by_zero():
    metrics = score_metrics([{**scored([], []), "empty_prefix_tokens": 0.0}])
    assert math.isnan(metrics.pop("empty_prefix_entropy"))
    assert all(math.isfinite(value) for value in metrics.values())


def reported(values, targets, weights):
    sums = value_sums(*map(torch.tensor, (values, targets, weights)))
    return value_metrics({**{name: value.item() for name, value in sums.items()}, "loss": 0.7})


def test_value_metrics_by_hand():
    """Targets 0, 1, 1 (the last at weight 0): mean 0.5, variance 0.25; errors -0.2 and 0.4."""
    metrics = reported([0.2, 0.6, 0.0], [0.0, 1.0, 1.0], [1.0, 1.0, 0.0])
    assert metrics == pytest.approx(
        {"loss": 0.7, "mae": 0.3, "explained_variance": 1 - 0.09 / 0.25, "mean_value": 0.4, "mean_target": 0.5}
    )


@pytest.mark.parametrize("values,expected", [([0.1, 0.9], 1.0), ([0.3, 0.3], 0.0), ([0.9, 0.1], -3.0)])
def test_explained_variance_special_cases(values, expected):
    assert reported(values, [0.1, 0.9], [2.0, 2.0])["explained_variance"] == pytest.approx(expected, abs=1e-6)


def test_constant_targets_and_no_labels_are_finite():
    assert reported([0.3, 0.4], [0.5, 0.5], [1.0, 1.0])["explained_variance"] == 0
    assert all(math.isfinite(value) for value in reported([0.3], [0.5], [0.0]).values())
