"""Trainer against engine on the tokens that the engine sampled (docs/ALGORITHM.md §6, "always reported")."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch


def mismatch_sums(logprobs: torch.Tensor, behavior: torch.Tensor) -> dict[str, torch.Tensor]:
    """Trainer against engine on sampled tokens, [R] each: sums, and one maximum, that `score_metrics` reads."""
    difference = (logprobs - behavior).double()  # log ratio trainer / engine
    ratio = difference.exp()
    return {
        "tokens": difference.new_tensor(float(len(difference))),
        "abs_difference": difference.abs().sum(),
        "abs_difference_max": largest(difference.abs()),
        "k1": -difference.sum(),
        "k3": (ratio - 1 - difference).sum(),
        "ratio": ratio.sum(),
        "ratio_squared": ratio.square().sum(),
        "ratio_above_2": (ratio > 2).sum(),
        "ratio_below_half": (ratio < 0.5).sum(),
    }


def largest(values: torch.Tensor) -> torch.Tensor:
    """The maximum of values >= 0; 0 of none."""
    return values.amax() if len(values) else values.sum()


def score_metrics(scores: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """The sums of one or more `Actor.score` calls -> means. k1, k3: estimates of KL(engine || trainer) in nats a token.

    "ess" is (sum r)^2 / (n sum r^2) for r = trainer / engine, 1 when they agree. `empty_prefix_entropy` is NaN when no
    response to a bare problem was generated. "mismatch/rerouted" is there with router replay only.
    """
    scores = list(scores)
    total = {name: math.fsum(score[name] for score in scores) for name in scores[0]}
    tokens = max(total["tokens"], 1.0)
    empty = total["empty_prefix_tokens"]
    routing = {"mismatch/rerouted": total["rerouted"] / max(total["routed"], 1.0)} if "routed" in total else {}
    return routing | {
        "num_tokens": total["tokens"],
        "entropy": total["entropy"] / tokens,
        "empty_prefix_entropy": total["empty_prefix_entropy"] / empty if empty else math.nan,
        "empty_prefix_tokens": empty,
        "mismatch/mean_abs": total["abs_difference"] / tokens,
        "mismatch/max_abs": max(score["abs_difference_max"] for score in scores),
        "mismatch/k1": total["k1"] / tokens,
        "mismatch/k3": total["k3"] / tokens,
        "mismatch/ratio_above_2": total["ratio_above_2"] / tokens,
        "mismatch/ratio_below_half": total["ratio_below_half"] / tokens,
        "mismatch/ess": total["ratio"] ** 2 / (tokens * total["ratio_squared"]) if total["ratio_squared"] else 1.0,
    }
