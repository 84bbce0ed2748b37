"""Run every (setting, variant, seed) of an experiment, then write its table, its numbers and its picture.

    python tools/compare_runs.py examples/mismatch/experiment.yaml [--jobs N] [--fresh] [--report]

Each run is a job `python -m megatron_ac2.train BASE.yaml [OVERLAY.yaml ...] [section.field=value ...]` on one rank,
with a folder and a log of its own. Finished jobs are skipped: a call that was interrupted goes on where it was. Jobs
are forked from one process that has imported what they need, which saves each of them most of its start.
megatron_ac2/experiment.py says what an experiment file holds.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from megatron_ac2.config import Config
from megatron_ac2.experiment import Experiment, Job, Stage, check_jobs, jobs_of, load_experiment, unfinished
from megatron_ac2.types import UserError

ROOT = Path(__file__).resolve().parent.parent
# One thread a job, or jobs fight over the cores; libraries' warnings about each other would bury what matters.
ENVIRONMENT = {
    "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
}  # fmt: skip


def prepare(stages: Sequence[Stage], console: Console) -> None:
    """Run the commands whose output is not there. Raises `UserError` for one that fails."""
    for stage in stages:
        if Path(stage.output).exists():
            continue
        console.print(f"[bold]prepare[/] {escape(stage.run)}")
        done = subprocess.run([sys.executable, *shlex.split(stage.run)], env=os.environ | ENVIRONMENT)
        if done.returncode or not Path(stage.output).exists():
            raise UserError(f"prepare: exit status {done.returncode}, {stage.output} not written by: {stage.run}")


def work(arguments: Sequence[str], log: Path) -> None:
    """The body of a job's process: training's entry point, with the log as its output. Does not return."""
    from megatron_ac2 import train
    from megatron_ac2.entry import run_entry_point

    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for output in (1, 2):
        os.dup2(descriptor, output)
    sys.argv = ["megatron_ac2.train", *arguments]
    run_entry_point(train.main)


@dataclass
class Running:
    process: BaseProcess
    bar: TaskID
    started: float


class Runner:
    """Runs jobs, a number of them at a time, and shows how far they are."""

    def __init__(self, configs: Mapping[Job, Config], num_at_a_time: int, console: Console):
        self._configs = configs
        self._num_at_a_time = num_at_a_time
        self._console = console
        self._progress = Progress(
            TextColumn("{task.description}"), BarColumn(24), MofNCompleteColumn(), TimeElapsedColumn(), console=console,
            transient=True, disable=not console.is_terminal,
        )  # fmt: skip
        self._running: dict[Job, Running] = {}
        self._failed: list[Job] = []
        os.environ.update(ENVIRONMENT)  # for the process that jobs are forked from
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["megatron_ac2.train", "vllm"])

    def run(self, jobs: Sequence[Job]) -> list[Job]:
        """Returns those that failed, whose logs have been named. Whatever ends this call ends its jobs."""
        waiting = list(jobs)
        total = self._progress.add_task(
            "[bold]jobs", total=len(self._configs), completed=len(self._configs) - len(jobs)
        )
        try:
            with self._progress:
                while waiting or self._running:
                    while waiting and len(self._running) < self._num_at_a_time:
                        self._start(waiting.pop(0))
                    time.sleep(0.2)
                    for job in [job for job in self._running if self._has_ended(job)]:
                        self._close(job)
                        self._progress.advance(total)
        finally:
            for running in self._running.values():
                running.process.kill()
        return self._failed

    def _start(self, job: Job) -> None:
        job.record()
        process = self._context.Process(target=work, args=(job.arguments, job.log))
        process.start()
        bar = self._progress.add_task(escape(job.name), total=self._configs[job].run.num_steps + 1)
        self._running[job] = Running(process, bar, time.monotonic())

    def _has_ended(self, job: Job) -> bool:
        running = self._running[job]
        self._progress.update(running.bar, completed=job.num_rows())
        return running.process.exitcode is not None

    def _close(self, job: Job) -> None:
        running = self._running.pop(job)
        self._progress.remove_task(running.bar)
        if job.is_finished(self._configs[job]):
            self._console.print(f"{job.name}: {time.monotonic() - running.started:.0f} s", markup=False)
        else:
            self._failed.append(job)
            text = f"{job.name}: failed (exit status {running.process.exitcode}), see {job.log}"
            self._console.print(text, style="red", markup=False, soft_wrap=True)


def report(experiment: Experiment, done: Sequence[Job], console: Console) -> None:
    """results.json, results.md and the picture, from the finished jobs."""
    from megatron_ac2.comparison import summarize_run, to_results, to_table
    from megatron_ac2.comparison_plot import plot_comparison

    order = [(setting, variant) for setting in experiment.settings or [""] for variant in experiment.variants]
    done = sorted(done, key=lambda job: (order.index((job.setting, job.variant)), job.seed))
    runs = [summarize_run(job.folder, job.setting, job.variant, job.seed) for job in done]
    out = Path(experiment.out)
    (out / "results.json").write_text(json.dumps(to_results(experiment.title, experiment.axis, runs), indent=1))
    table = to_table(experiment.axis, runs)
    (out / "results.md").write_text(table)
    picture = plot_comparison(runs, experiment.picture or out / "comparison.png", experiment.title, experiment.axis)
    console.print(table, markup=False, soft_wrap=True)
    console.print(f"{out / 'results.json'}, {out / 'results.md'}, {picture}", markup=False, soft_wrap=True)


def compare(arguments: argparse.Namespace, console: Console) -> int:
    experiment = load_experiment(arguments.experiment)
    configs = check_jobs(jobs_of(experiment))
    failed: list[Job] = []
    if not arguments.report:
        waiting = unfinished(configs, arguments.fresh)
        prepare(experiment.prepare, console)
        failed = Runner(configs, arguments.jobs, console).run(waiting)
    done = [job for job, config in configs.items() if job.is_finished(config)]
    if not done:
        raise UserError(f"{experiment.out}: no finished run to report on")
    report(experiment, done, console)
    return 1 if failed else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("experiment", help="the experiment file")
    cores = len(os.sched_getaffinity(0))
    parser.add_argument(
        "--jobs", type=int, default=cores, help="runs at a time (default: one a core; one a GPU is yours to set)"
    )
    parser.add_argument("--fresh", action="store_true", help="delete and repeat runs of another configuration")
    parser.add_argument("--report", action="store_true", help="run nothing: report on what is finished")
    arguments = parser.parse_args()
    if arguments.jobs < 1:
        parser.error(f"--jobs: found {arguments.jobs}, accepted: 1 or more")
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # or its jobs would outlive it
    console = Console(highlight=False)
    try:
        return compare(arguments, console)
    except UserError as error:
        console.print("\n".join(f"error: {problem}" for problem in error.problems), markup=False, soft_wrap=True)
        return 2


if __name__ == "__main__":
    sys.exit(main())
