"""Many runs of one experiment -> numbers by variant: means and standard errors over seeds, a table, results.json."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megatron_ac2.console import quantity
from megatron_ac2.plots import RunMetrics, load_metrics
from megatron_ac2.types import UserError

SCORE, TOKENS = "evaluation/mean", "perf/generated_tokens"


@dataclass(frozen=True, slots=True)
class RunSummary:
    """One run. `tokens[i]` is what it had generated for training before its evaluation i, which gave `score[i]`."""

    setting: str  # the name on the second axis; "" without one
    variant: str
    seed: int
    tokens: list[float]
    score: list[float]
    area: float  # the mean score over the generated tokens: area under the curve / its width
    kl_k3: float  # KL(engine || trainer), nats a token, mean over steps
    ratio_above_2: float  # share of sampled tokens whose trainer / engine ratio is above 2, mean over steps
    ratio_below_half: float
    ess: float  # effective sample size of the token ratios, share, mean over steps

    @property
    def final(self) -> float:
        return self.score[-1]


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over seeds and its standard error: nan of one seed alone."""

    mean: float
    error: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Estimate:
        values = np.asarray(list(values), dtype=np.float64)
        error = values.std(ddof=1) / math.sqrt(len(values)) if len(values) > 1 else math.nan
        return cls(float(values.mean()), float(error))

    def __str__(self) -> str:
        return f"{self.mean:.3f} ± {self.error:.3f}" if math.isfinite(self.error) else f"{self.mean:.3f}"


@dataclass(frozen=True, slots=True)
class VariantSummary:
    setting: str
    variant: str
    runs: tuple[RunSummary, ...]  # by seed

    def estimate(self, name: str) -> Estimate:
        """`name`: final, area, kl_k3, ratio_above_2, ratio_below_half, ess."""
        return Estimate.of(getattr(run, name) for run in self.runs)

    def curve(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(tokens, score, standard error of the score), f64[evaluations] each, over seeds evaluation by evaluation.

        Where runs have different numbers of evaluations, only those that all have are kept.
        """
        length = min(len(run.score) for run in self.runs)
        tokens, score = (np.array([getattr(run, name)[:length] for run in self.runs]) for name in ("tokens", "score"))
        number = len(self.runs)
        error = score.std(axis=0, ddof=1) / math.sqrt(number) if number > 1 else np.zeros(length)
        return tokens.mean(axis=0), score.mean(axis=0), error


def summarize_run(run_dir: str | Path, setting: str, variant: str, seed: int) -> RunSummary:
    """Read a finished run's metrics. Raises `UserError` if it holds no evaluation after its first."""
    run = load_metrics(run_dir)
    steps, score = run.series(SCORE)
    if len(steps) < 2:
        raise UserError(f"{run_dir}: found {len(steps)} evaluation(s), needed: one before and one after training")
    tokens = tokens_before(run, steps)
    width = tokens[-1] - tokens[0]
    area = float(np.trapezoid(score, tokens) / width) if width else float(score[-1])
    means = {name: _mean(run, f"mismatch/{name}") for name in ("kl_k3", "ratio_above_2", "ratio_below_half", "ess")}
    return RunSummary(setting, variant, seed, tokens.tolist(), score.tolist(), area, **means)


def tokens_before(run: RunMetrics, steps: np.ndarray) -> np.ndarray:
    """f64[N]: generated tokens before each of `steps`. A step's own row counts what that step generated too."""
    counted_steps, counts = run.series(TOKENS)
    places = np.searchsorted(counted_steps, steps)
    return np.concatenate([[0.0], counts])[places]


def by_variant(runs: Sequence[RunSummary]) -> list[VariantSummary]:
    """In the order in which settings and variants first appear."""
    groups: dict[tuple[str, str], list[RunSummary]] = {}
    for run in runs:
        groups.setdefault((run.setting, run.variant), []).append(run)
    return [
        VariantSummary(setting, variant, tuple(sorted(group, key=lambda run: run.seed)))
        for (setting, variant), group in groups.items()
    ]


def to_results(title: str, axis: str, runs: Sequence[RunSummary]) -> dict[str, Any]:
    """What results.json holds: every run, and by variant the means and standard errors (null of one seed alone)."""
    variants = [
        {
            "setting": group.setting,
            "variant": group.variant,
            "seeds": [run.seed for run in group.runs],
            **{name: _finite(asdict(group.estimate(name))) for name in ("final", "area", *_MISMATCH)},
            "tokens": _tokens(group),
        }
        for group in by_variant(runs)
    ]
    return {"title": title, "axis": axis, "variants": variants, "runs": [_finite(asdict(run)) for run in runs]}


def to_table(axis: str, runs: Sequence[RunSummary]) -> str:
    """A markdown table, one row a variant (and setting): mean ± standard error over seeds."""
    names = ["variant", "seeds", "final score", "mean score", "KL k3", "ratio > 2", "ratio < 1/2", "ESS", "tokens"]
    names = [axis, *names] if axis else names
    lines = ["| " + " | ".join(names) + " |", "|" + "---|" * len(names)]
    for group in by_variant(runs):
        cells = [group.variant, str(len(group.runs)), str(group.estimate("final")), str(group.estimate("area"))]
        cells += [quantity(group.estimate("kl_k3").mean)]
        cells += [f"{group.estimate(name).mean:.2%}" for name in ("ratio_above_2", "ratio_below_half")]
        cells += [f"{group.estimate('ess').mean:.3f}", quantity(_tokens(group))]
        lines.append("| " + " | ".join([group.setting, *cells] if axis else cells) + " |")
    return "\n".join(lines) + "\n"


_MISMATCH = ("kl_k3", "ratio_above_2", "ratio_below_half", "ess")


def _tokens(group: VariantSummary) -> float:
    return float(np.mean([run.tokens[-1] for run in group.runs]))


def _mean(run: RunMetrics, name: str) -> float:
    _, values = run.series(name)
    return float(values.mean()) if len(values) else math.nan


def _finite(fields: Mapping[str, Any]) -> dict[str, Any]:
    """JSON has no nan."""
    return {name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in fields.items()}  # fmt: skip
