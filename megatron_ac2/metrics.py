"""What is reported and where it goes: the metric names, the quantities behind them, and the writers of a run.

A step's metrics are one flat `dict[str, float]`, already reduced over the ranks. Rank 0 writes it to the console, to
`metrics.jsonl` (one row a step), and if asked to TensorBoard and Weights & Biases.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np

from megatron_ac2.console import Console
from megatron_ac2.types import UserError

METRICS_FILE = "metrics.jsonl"

# The names that every run reports (docs/ALGORITHM.md §6, "always reported"), with the label a plot gives them. Others
# may be written beside them. `time/<phase>` holds the seconds of each phase of the step, `time/step` the whole.
METRICS: dict[str, str] = {
    "evaluation/mean": "validation mean@k",
    "evaluation/mean_se": "standard error of mean@k over problems",
    "evaluation/best_at_k": "validation best@k",
    "evaluation/decoding_flops": "decoding FLOPs before the evaluation",
    "train/reward": "mean reward of fresh rollouts",
    "train/version_lag": "versions between sampling and training",
    "readiness/ready_fraction": "share of sampled problems that are ready",
    "readiness/global_error": "mean critic error over the window",
    "critic/error_terminal": "critic error, targets from rewards",
    "critic/error_bootstrapped": "critic error, targets from the critic",
    "critic/audit_mae": "audits: mean |value - reward|",
    "critic/audit_bias": "audits: mean (value - reward)",
    "critic/probe_bias": "prefix value minus target, targets from rewards",
    "critic/explained_variance_terminal": "explained variance of targets from rewards",
    "critic/calibration_error": "expected calibration error, targets from rewards",
    "critic/endpoint_share": "share of chunk ends valued by the critic",
    "critic/invalid_probe": "share of unreadable prefix values",
    "critic/invalid_endpoint": "share of unreadable chunk-end values",
    "mismatch/logprob_abs_mean": "mean |trainer - engine log-prob|",
    "mismatch/logprob_abs_max": "max |trainer - engine log-prob|",
    "mismatch/kl_k1": "KL(engine, trainer), k1",
    "mismatch/kl_k3": "KL(engine, trainer), k3",
    "mismatch/ess": "effective sample size of the token ratios, share",
    "mismatch/rerouted": "share of (token, layer) where the trainer would choose other experts than the engine",
    "actor/entropy": "mean token entropy (nats)",
    "actor/clip_high": "upper clip",
    "actor/grad_norm": "gradient norm",
    "perf/decoding_flops": "decoding FLOPs so far",
    "perf/generated_tokens": "generated tokens so far",
    "perf/generation_tokens_per_s": "generated tokens per second",
    "perf/training_tokens_per_s": "trained tokens per second",
}


def mean_at_k(rewards: np.ndarray) -> tuple[float, float]:
    """rewards f[P, k] -> the mean over problems of each problem's mean, and its standard error over the P problems.

    The k answers of a problem are not independent of each other, the problems are: the error counts problems only.
    One problem alone has no standard error (nan).
    """
    per_problem = np.asarray(rewards, dtype=np.float64).mean(axis=1)
    num_problems = len(per_problem)
    error = per_problem.std(ddof=1) / math.sqrt(num_problems) if num_problems > 1 else math.nan
    return float(per_problem.mean()), float(error)


def best_at_k(rewards: np.ndarray) -> float:
    """rewards f[P, k] -> the mean over problems of each problem's best answer."""
    return float(np.asarray(rewards, dtype=np.float64).max(axis=1).mean())


def share(flags: np.ndarray | Sequence[bool]) -> float:
    """The share of True, over any shape; nan of nothing. For `from_critic[B, G]` it is critic/endpoint_share."""
    flags = np.asarray(flags, dtype=bool)
    return float(flags.mean()) if flags.size else math.nan


def invalid_rate(valid: np.ndarray | Sequence[bool]) -> float:
    """The share of critic answers that could not be read, over any shape; nan of nothing."""
    return 1 - share(valid)


class JsonlWriter:
    """Appends one JSON object a step. On resume, rows of steps that will be taken again are dropped first."""

    def __init__(self, path: Path, resume_step: int):
        kept = [line for line in _complete_lines(path) if json.loads(line)["step"] < resume_step]
        replacement = path.with_suffix(".tmp")
        replacement.write_text("".join(kept))
        os.replace(replacement, path)
        self._file = path.open("a")

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        row = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        self._file.write(json.dumps({"step": step, **row}) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def _complete_lines(path: Path) -> Iterator[str]:
    """A crash can leave half a row at the end; it has no newline, and its step will be taken again."""
    if path.is_file():
        yield from (line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n"))


class TensorBoardWriter:
    def __init__(self, run_dir: Path, resume_step: int):
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(run_dir / "tensorboard"), purge_step=resume_step)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WandbWriter:
    def __init__(self, run_dir: Path, config: Mapping[str, Any] | None):
        try:
            import wandb
        except ImportError as error:
            found = "run.wandb: found true, but wandb is not installed: pip install wandb, or set false"
            raise UserError(found) from error
        self._run = wandb.init(
            project="megatron_ac2", name=run_dir.name, id=run_dir.name, dir=str(run_dir), resume="allow", config=config
        )

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        self._run.finish()


class MetricsWriter:
    """All writers of a run behind one `write`. Only rank 0 writes; on other ranks every method does nothing.

    `resume_step` is the first step that this process takes: what is on file from there on is taken again.
    """

    def __init__(
        self,
        run_dir: str | Path,
        rank: int,
        total_steps: int,
        tensorboard: bool = True,
        wandb: bool = False,
        resume_step: int = 0,
        config: Mapping[str, Any] | None = None,
    ):
        self._writers: list[JsonlWriter | TensorBoardWriter | WandbWriter | Console] = []
        self._console: Console | None = None
        if rank != 0:
            return
        run_dir = Path(run_dir)
        run_dir.mkdir(parents=True, exist_ok=True)
        if wandb:  # first: it is the one that can refuse
            self._writers.append(WandbWriter(run_dir, config))
        self._writers.append(JsonlWriter(run_dir / METRICS_FILE, resume_step))
        if tensorboard:
            self._writers.append(TensorBoardWriter(run_dir, resume_step))
        self._console = Console(total_steps, resume_step)
        self._writers.append(self._console)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """One row: call it once a step. A value that is not finite becomes null in the JSONL file."""
        metrics = {name: float(value) for name, value in metrics.items()}
        for writer in self._writers:
            writer.write(step, metrics)

    def phase(self, name: str) -> AbstractContextManager[None]:
        """On a terminal, say what the run is busy with; pass it to `PhaseTimer(show=...)`."""
        return self._console.phase(name) if self._console else nullcontext()

    def say(self, text: str) -> None:
        """A line for the reader of the console, above the progress bar."""
        if self._console:
            self._console.say(text)

    def close(self) -> None:
        for writer in self._writers:
            writer.close()
        self._writers, self._console = [], None
