"""An experiment file -> the training jobs that it stands for, checked before any is run.

The file (paths are relative to the working directory, as on a command line):

    title: ...                        # of the picture
    out: runs/experiments/mismatch    # run folders, results.json, results.md
    picture: docs/images/mismatch.png # null: comparison.png in `out`
    prepare:                          # commands that are run first, each unless its `output` exists
      - {output: PATH, run: "-m megatron_ac2.sft ..."}     # arguments of python
    base: BASE.yaml
    common: [OVERLAY.yaml or section.field=value, ...]
    seeds: [0, 1, 2]
    axis: name                        # with `settings`: a column of the picture each
    settings: {NAME: [OVERLAY.yaml or section.field=value, ...], ...}
    variants: {NAME: [OVERLAY.yaml or section.field=value, ...], ...}
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from megatron_ac2.config import Config
from megatron_ac2.config_file import load_config, split_arguments
from megatron_ac2.config_yaml import read_yaml
from megatron_ac2.metrics import METRICS_FILE
from megatron_ac2.types import UserError

RECORD = "job.json"  # in a job's folder: the configuration it was started with


@dataclass
class Stage:
    output: str = "???"
    run: str = "???"


@dataclass
class Experiment:
    title: str = ""
    out: str = "???"
    picture: str | None = None
    prepare: list[Stage] = field(default_factory=list)
    base: str = "???"
    common: list[str] = field(default_factory=list)
    seeds: list[int] = field(default_factory=lambda: [0, 1, 2])
    axis: str = ""
    settings: dict[str, list[str]] = field(default_factory=dict)
    variants: dict[str, list[str]] = field(default_factory=dict)


@dataclass(frozen=True)
class Job:
    setting: str  # "" without a second axis
    variant: str
    seed: int
    folder: Path
    arguments: tuple[str, ...]  # of megatron_ac2.train

    @property
    def name(self) -> str:
        return " / ".join([*filter(None, [self.setting]), self.variant, f"seed {self.seed}"])

    @property
    def log(self) -> Path:
        return self.folder / "log.txt"

    def config(self) -> Config:
        """Raises `UserError` naming this job for a configuration that makes no run."""
        try:
            return load_config(*split_arguments(self.arguments))
        except UserError as error:
            raise UserError([f"{self.name}: {problem}" for problem in error.problems]) from error

    def written(self) -> dict[str, Any]:
        """What files and overrides say, defaults left out: equal for two jobs that ask for the same run."""
        paths, overrides = split_arguments(self.arguments)
        return OmegaConf.to_container(OmegaConf.merge(*map(OmegaConf.load, paths), OmegaConf.from_dotlist(overrides)))

    def num_rows(self) -> int:
        """Rows written so far; a finished run has one more, the last evaluation."""
        metrics = self.folder / METRICS_FILE
        return metrics.read_text().count("\n") if metrics.is_file() else 0

    def record(self) -> None:
        """Note what is about to run in the job's folder, for `unfinished` to compare with."""
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / RECORD).write_text(json.dumps(self.written(), indent=1))

    def is_finished(self, config: Config) -> bool:
        metrics = self.folder / METRICS_FILE
        rows = metrics.read_text().splitlines() if metrics.is_file() else []
        return bool(rows) and json.loads(rows[-1])["step"] == config.run.num_steps


def load_experiment(path: str | Path) -> Experiment:
    """Raises `UserError` for a file that is not there, an unknown key, a wrong type, or nothing to compare."""
    if not Path(path).is_file():
        raise UserError(f"experiment file not found: {path}")
    try:
        written = OmegaConf.create(read_yaml(Path(path)) or {})
        experiment = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Experiment), written))
    except Exception as error:  # YAML's, OmegaConf's, and Python's of conversions
        raise UserError(f"{path}: {str(error).splitlines()[0]}") from error
    problems = [f"{path}: {name}: found none, needed: one or more"
                for name in ("variants", "seeds") if not getattr(experiment, name)]  # fmt: skip
    if bool(experiment.axis) != bool(experiment.settings):
        problems.append(f"{path}: axis and settings: found one without the other")
    if problems:
        raise UserError(problems)
    return experiment


def jobs_of(experiment: Experiment) -> list[Job]:
    """Every (setting, variant, seed), seeds outermost: an interrupted experiment has compared all variants so far."""
    jobs = []
    for seed in experiment.seeds:
        for setting, changes in (experiment.settings or {"": []}).items():
            for variant, own in experiment.variants.items():
                folder = Path(experiment.out).joinpath(*map(_slug, filter(None, (setting, variant))), f"seed{seed}")
                arguments = (experiment.base, *experiment.common, *changes, *own, f"run.dir={folder}",
                             f"run.name={_slug(variant)}", f"run.seed={seed}")  # fmt: skip
                jobs.append(Job(setting, variant, seed, folder, arguments))
    return jobs


def _slug(name: str) -> str:
    return "".join(letter if letter.isalnum() or letter in "-." else "_" for letter in name)


def check_jobs(jobs: Sequence[Job]) -> dict[Job, Config]:
    """The configuration of each job. Raises one `UserError` with all that is wrong."""
    problems, configs = [], {}
    for job in jobs:
        try:
            configs[job] = job.config()
        except UserError as error:
            problems += error.problems
    if len({job.folder for job in jobs}) < len(jobs):
        problems.append("two jobs have one folder: names must differ in more than their punctuation")
    if problems:
        raise UserError(list(dict.fromkeys(problems)))
    return configs


def unfinished(configs: Mapping[Job, Config], fresh: bool) -> list[Job]:
    """The jobs to run, in order. A folder that another configuration has filled is emptied if `fresh`, else refused."""
    problems, waiting = [], []
    for job, config in configs.items():
        record = job.folder / RECORD
        if record.is_file() and json.loads(record.read_text()) != job.written():
            if not fresh:
                problems.append(f"{job.folder}: holds a run of another configuration; delete it, or pass --fresh")
                continue
            shutil.rmtree(job.folder)
        if not job.is_finished(config):
            waiting.append(job)
    if problems:
        raise UserError(problems)
    return waiting
