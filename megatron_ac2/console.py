"""What a person watching a run sees: a table that grows with a progress bar below it, or plain lines in a log."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from rich.console import Console as RichConsole
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

HEADER_EVERY = 20  # rows; the header scrolls out of sight


def quantity(value: float) -> str:
    """Three significant digits, up to 1e15 with a decimal suffix: 1234 -> 1.23k, 2e20 -> 2.00e+20."""
    if not math.isfinite(value):
        return "-"
    if abs(value) >= 1e15:
        return f"{value:.2e}"
    for limit, suffix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= limit:
            return f"{value / limit:.3g}{suffix}"
    return f"{value:.3g}"


def _decimal(value: float) -> str:
    return f"{value:.3f}" if math.isfinite(value) else "-"


def _percent(value: float) -> str:
    return f"{value:.0%}" if math.isfinite(value) else "-"


def _seconds(value: float) -> str:
    return f"{value:.1f}s" if math.isfinite(value) else "-"


# name, column title, format
COLUMNS: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("train/reward", "reward", _decimal),
    ("evaluation/mean", "val", _decimal),
    ("readiness/ready_fraction", "ready", _percent),
    ("readiness/global_error", "critic err", _decimal),
    ("actor/entropy", "entropy", _decimal),
    ("mismatch/logprob_abs_mean", "mismatch", quantity),
    ("perf/decoding_flops", "dec FLOPs", quantity),
    ("perf/generation_tokens_per_s", "tok/s", quantity),
    ("time/step", "time", _seconds),
)
WIDTH = 10


def phase_times(metrics: Mapping[str, float], num_phases: int = 4) -> str:
    """The longest phases of the step: "sample 3.1s, actor 1.2s"."""
    phases = [(name[5:], value) for name, value in metrics.items() if name.startswith("time/") and name != "time/step"]
    longest = sorted(phases, key=lambda item: -item[1])[:num_phases]
    return ", ".join(f"{name} {value:.1f}s" for name, value in longest)


class Console:
    """One line a step. `total_steps` sizes the bar; `first_step` is where this process starts."""

    def __init__(self, total_steps: int, first_step: int = 0, console: RichConsole | None = None):
        self._rich = console or RichConsole(highlight=False, soft_wrap=True)
        self._total_steps = total_steps
        self._num_rows = 0
        self._progress: Progress | None = None
        if self._rich.is_terminal:
            self._progress = Progress(
                TextColumn("[bold]step"), MofNCompleteColumn(), BarColumn(24), TimeElapsedColumn(),
                TextColumn("left"), TimeRemainingColumn(), TextColumn("[cyan]{task.description}"),
                console=self._rich, transient=True, redirect_stdout=False, redirect_stderr=False,
            )  # fmt: skip
            self._task = self._progress.add_task("", total=total_steps, completed=first_step)
            self._progress.start()

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        if self._progress is None:
            self._rich.print(self._plain(step, metrics), markup=False)
            return
        if self._num_rows % HEADER_EVERY == 0:
            titles = "".join(f"{title:>{WIDTH + 1}}" for _, title, _ in COLUMNS)
            self._rich.print(f"[bold]{'step':>6}{titles}[/bold]")
        cells = [format(metrics[name]) if name in metrics else "" for name, _, format in COLUMNS]
        row = "".join(f"{cell:>{WIDTH + 1}}" for cell in cells)
        self._rich.print(f"{step:>6}{row}  [dim]{phase_times(metrics)}[/dim]")
        self._num_rows += 1
        self._progress.update(self._task, completed=step + 1)

    def _plain(self, step: int, metrics: Mapping[str, float]) -> str:
        cells = [f"{title} {format(metrics[name])}" for name, title, format in COLUMNS if name in metrics]
        phases = phase_times(metrics)
        line = " | ".join([f"step {step}/{self._total_steps}", *cells])
        return f"{line} ({phases})" if phases else line

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Shows `name` beside the bar while the block runs; a log gets its times from `write` instead."""
        if self._progress is None:
            yield
            return
        outer = self._progress.tasks[0].description
        self._progress.update(self._task, description=name)
        try:
            yield
        finally:
            self._progress.update(self._task, description=outer)

    def say(self, text: str) -> None:
        self._rich.print(text, markup=False)

    def close(self) -> None:
        if self._progress is not None:
            self._progress.stop()
