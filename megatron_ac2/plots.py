"""One picture of one or several runs, from their metrics.jsonl."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from megatron_ac2.metrics import METRICS, METRICS_FILE
from megatron_ac2.types import UserError

STYLE = {
    "axes.axisbelow": True,
    "axes.edgecolor": "#888888",
    "axes.grid": True,
    "axes.labelcolor": "#333333",
    "axes.labelsize": 9,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 10.5,
    "axes.titleweight": "bold",
    "font.size": 9,
    "grid.color": "#e6e6e6",
    "legend.fontsize": 8,
    "legend.frameon": False,
    "lines.linewidth": 1.7,
    "xtick.color": "#555555",
    "ytick.color": "#555555",
}
RUN_COLORS = ("#2f6fb0", "#d1603d", "#3c9d6b", "#8a5fb5", "#b58a1f", "#5b6770")
# Not the runs' colours: in this panel a colour is a phase.
PHASE_COLORS = ("#35618f", "#7fa8cf", "#e3b04b", "#8f6a1f", "#7db58a", "#3f6b4c", "#c48fb0", "#a8a8a8")
DASHES = ("-", "--", ":", "-.")


@dataclass(frozen=True)
class RunMetrics:
    """A run's rows as columns: `columns[name]` is f64[rows], nan where a row does not have the metric."""

    name: str
    steps: np.ndarray  # int64[rows]
    columns: Mapping[str, np.ndarray]

    def series(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """(steps, values) of the rows that have this metric; both empty if none does."""
        values = self.columns.get(name, np.full(len(self.steps), math.nan))
        known = np.isfinite(values)
        return self.steps[known], values[known]


def load_metrics(run_dir: str | Path) -> RunMetrics:
    """Read `<run_dir>/metrics.jsonl`. Raises `UserError` if there is none or it has no rows."""
    path = Path(run_dir) / METRICS_FILE
    if not path.is_file():
        raise UserError(f"{path}: not found; expected the folder of a run that has taken a step")
    rows = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
    if not rows:
        raise UserError(f"{path}: no rows; the run has not finished a step yet")
    names = sorted({name for row in rows for name in row} - {"step"})
    columns = {
        name: np.array([math.nan if row.get(name) is None else row[name] for row in rows], dtype=np.float64)
        for name in names
    }
    return RunMetrics(Path(run_dir).resolve().name, np.array([row["step"] for row in rows]), columns)


def plot_runs(run_dirs: Sequence[str | Path], out: str | Path, title: str | None = None) -> Path:
    """Draw the runs into one picture at `out` (the suffix picks the format: .png, .svg, .pdf) and return its path."""
    runs = [load_metrics(run_dir) for run_dir in run_dirs]
    out = Path(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(3, 3, figsize=(14, 10.5), constrained_layout=True)
        for axis, draw in zip(axes.flat, _PANELS, strict=True):
            draw(axis, runs)
            _finish(axis)
        if len(runs) > 1:
            handles = [plt.Line2D([], [], color=color, lw=3) for color in RUN_COLORS]
            labels = [run.name for run in runs]
            figure.legend(handles[: len(runs)], labels, loc="outside upper center", ncols=len(runs), fontsize=11)
        figure.suptitle(title if title is not None else (runs[0].name if len(runs) == 1 else ""), fontsize=13)
        figure.savefig(out, dpi=130)
        plt.close(figure)
    return out


def _finish(axis: Axes) -> None:
    if not axis.has_data():
        axis.text(0.5, 0.5, "not reported", ha="center", va="center", color="#999999", transform=axis.transAxes)
        axis.set(xticks=[], yticks=[])
    elif axis.get_xlabel() == "step":
        axis.xaxis.set_major_locator(MaxNLocator(6, integer=True))


def moving_mean(values: np.ndarray, window: int) -> np.ndarray:
    """The mean of the last `window` values at each point, of fewer at the start: f[N] -> f[N]."""
    sums = np.concatenate([[0.0], np.cumsum(values)])
    ends = np.arange(1, len(values) + 1)
    starts = np.maximum(ends - window, 0)
    return (sums[ends] - sums[starts]) / (ends - starts)


def _validation(axis: Axes, runs: Sequence[RunMetrics], against_flops: bool) -> None:
    axis.set(title=f"Validation against {'decoding FLOPs' if against_flops else 'steps'}", ylabel="mean@k ± SE")
    axis.set_xlabel("decoding FLOPs" if against_flops else "step")
    for run, color in zip(runs, RUN_COLORS * len(runs)):
        steps, mean = run.series("evaluation/mean")
        error_at = dict(zip(*run.series("evaluation/mean_se")))
        error = np.array([error_at.get(step, 0.0) for step in steps])
        x = steps
        if against_flops:
            flops_at = dict(zip(*run.series("evaluation/decoding_flops")))
            x = np.array([flops_at.get(step, math.nan) for step in steps])
        if len(steps):
            axis.plot(x, mean, "o-", ms=3.5, color=color)
            axis.fill_between(x, mean - error, mean + error, color=color, alpha=0.15, lw=0)


def _lines(title: str, label: str, *names: str, log: bool = False) -> Callable[[Axes, Sequence[RunMetrics]], None]:
    """A panel of metrics against steps: values faint, moving mean strong. Colour is the run, dashes the metric."""

    def draw(axis: Axes, runs: Sequence[RunMetrics]) -> None:
        axis.set(title=title, ylabel=label, xlabel="step")
        for run, color in zip(runs, RUN_COLORS * len(runs)):
            for name, dashes in zip(names, DASHES):
                steps, values = run.series(name)
                if not len(steps):
                    continue
                axis.plot(steps, values, color=color, alpha=0.2, lw=0.8)
                axis.plot(steps, moving_mean(values, max(1, len(values) // 20)), dashes, color=color)
        shown = {name: dashes for name, dashes in zip(names, DASHES) if any(len(run.series(name)[0]) for run in runs)}
        if len(names) > 1 and shown:
            handles = [plt.Line2D([], [], color="#555555", ls=dashes) for dashes in shown.values()]
            axis.legend(handles, [METRICS[name] for name in shown], handlelength=2.4)
        if log and any((run.series(name)[1] > 0).any() for run in runs for name in names):
            axis.set_yscale("log")

    return draw


def _phases(axis: Axes, runs: Sequence[RunMetrics]) -> None:
    """One run: seconds by phase against steps, stacked. Several: each run's mean step."""
    names = _longest_phases(runs)
    colors = dict(zip(names, PHASE_COLORS))
    if not names:
        axis.set_title("Step time by phase")
        return
    if len(runs) == 1:
        heights = [np.nan_to_num(runs[0].columns[name]) for name in names]
        axis.stackplot(runs[0].steps, heights, labels=[name[5:] for name in names], colors=colors.values(), alpha=0.85)
        axis.set(title="Step time by phase", ylabel="seconds", xlabel="step")
    else:
        left = np.zeros(len(runs))
        for name in names:
            width = np.array([np.nan_to_num(run.columns.get(name, np.zeros(1))).mean() for run in runs])
            axis.barh(range(len(runs)), width, left=left, label=name[5:], color=colors[name], height=0.6)
            left += width
        axis.set(title="Step time by phase", xlabel="seconds, mean over steps")
        axis.set_yticks(range(len(runs)), [run.name for run in runs])
        axis.invert_yaxis()
    axis.legend(ncols=2, loc="upper right")
    axis.margins(y=0.25)


def _longest_phases(runs: Sequence[RunMetrics]) -> list[str]:
    """The phases' metric names, longest first, as many as there are colours."""
    totals: dict[str, float] = {}
    for run in runs:
        for name, values in run.columns.items():
            if name.startswith("time/") and name != "time/step":
                totals[name] = totals.get(name, 0.0) + float(np.nansum(values))
    return sorted(totals, key=lambda name: -totals[name])[: len(PHASE_COLORS)]


_PANELS: tuple[Callable[[Axes, Sequence[RunMetrics]], None], ...] = (
    lambda axis, runs: _validation(axis, runs, against_flops=True),
    lambda axis, runs: _validation(axis, runs, against_flops=False),
    _lines("Training reward", METRICS["train/reward"], "train/reward"),
    _lines("Where the critic is trusted", "share", "readiness/ready_fraction", "critic/endpoint_share"),
    _lines(
        "Critic error",
        "mean |value - target|",
        "critic/error_terminal",
        "critic/error_bootstrapped",
        "critic/audit_mae",
    ),  # fmt: skip
    _lines("Critic bias on audits", METRICS["critic/audit_bias"], "critic/audit_bias"),
    _lines(
        "Trainer-engine mismatch",
        "nats",
        "mismatch/logprob_abs_mean",
        "mismatch/logprob_abs_max",
        "mismatch/kl_k3",
        log=True,
    ),  # fmt: skip
    _lines("Entropy", METRICS["actor/entropy"], "actor/entropy"),
    _phases,
)
