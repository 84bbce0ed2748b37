"""The picture of an experiment: a column a setting, above the scores against generated tokens, below the final ones."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes

from megatron_ac2.comparison import RunSummary, VariantSummary, by_variant
from megatron_ac2.plots import STYLE

# Ten that stay apart for most colour-blind readers too; beyond them, colours come again with another dash.
COLORS = (
    "#5b6770", "#2f6fb0", "#59a5d8", "#d1603d", "#e3a33c", "#3c9d6b", "#8a5fb5", "#c4679b", "#1f3b57", "#8f6a1f",
)  # fmt: skip
DASHES = ("-", "--", ":")


def plot_comparison(runs: Sequence[RunSummary], out: str | Path, title: str = "", axis: str = "") -> Path:
    """Draw `runs` (at least one) to `out`, whose suffix picks the format, and return its path."""
    groups = by_variant(runs)
    settings = list(dict.fromkeys(group.setting for group in groups))
    variants = list(dict.fromkeys(group.variant for group in groups))
    styles = {name: (COLORS[i % len(COLORS)], DASHES[i // len(COLORS) % 3]) for i, name in enumerate(variants)}
    out = Path(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    size = (max(7.0, 0.6 + 4.4 * len(settings)), 4.6 + 0.24 * len(variants))
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(
            2, len(settings), figsize=size, squeeze=False, sharex="row", sharey="row", constrained_layout=True,
            height_ratios=(2.6, 0.6 + 0.2 * len(variants)),
        )  # fmt: skip
        for column, setting in enumerate(settings):
            chosen = [group for group in groups if group.setting == setting]
            _curves(axes[0, column], chosen, styles)
            axes[0, column].set_title(f"{axis}: {setting}" if axis else setting)
            _finals(axes[1, column], chosen, variants, styles)
        axes[0, 0].set_ylabel("validation score, mean ± SE over seeds")
        figure.suptitle(title, fontsize=12)
        figure.savefig(out, dpi=110)
        plt.close(figure)
    return out


def _curves(axis: Axes, groups: Sequence[VariantSummary], styles: dict[str, tuple[str, str]]) -> None:
    for group in groups:
        tokens, score, error = group.curve()
        color, dash = styles[group.variant]
        axis.plot(tokens / 1e3, score, dash, color=color, label=group.variant)
        axis.fill_between(tokens / 1e3, score - error, score + error, color=color, alpha=0.12, lw=0)
    axis.set_xlabel("generated tokens (thousands)")


def _finals(
    axis: Axes, groups: Sequence[VariantSummary], variants: Sequence[str], styles: dict[str, tuple[str, str]]
) -> None:
    """A row a variant: a dot a seed, a bar from mean - SE to mean + SE. The rows' names are the picture's legend."""
    for group in groups:
        color, row = styles[group.variant][0], variants.index(group.variant)
        finals = np.array([run.final for run in group.runs])
        final = group.estimate("final")
        error = np.nan_to_num(final.error)
        axis.plot([final.mean - error, final.mean + error], [row, row], color=color, lw=5, alpha=0.35)
        axis.plot([final.mean], [row], "|", color=color, ms=11, mew=2)
        axis.plot(finals, np.full(len(finals), row), "o", color=color, ms=3.5)
    axis.set_yticks(range(len(variants)), variants)
    for label, name in zip(axis.get_yticklabels(), variants):  # none where the first column shows them
        label.set_color(styles[name][0])
    axis.set_ylim(len(variants) - 0.4, -0.6)
    axis.set_xlabel("final score, a dot a seed")
    axis.tick_params(axis="y", length=0)
