"""Runs of the tiny model, and the rows that they leave."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.distributed.fork_server import ForkServer, Job
from tests.distributed.launch import ROOT, environment

CONFIG = Path(__file__).with_name("train.yaml")
NOT_REPRODUCIBLE = ("time/", "perf/generation_tokens", "perf/training_tokens", "perf/process_memory", "reshard/seconds")


class Launcher:
    """Arguments of a run of the tiny model; `run`, `start` fork its ranks, `torchrun` starts them as a user would."""

    def __init__(self, server: ForkServer, inputs: Path, policy: Path, critic: Path):
        self.server, self.critic = server, f"critic.path={critic}"
        sets = {name: f"data.{name}={inputs / name}.jsonl" for name in ("train", "validation")}
        self.arguments = [str(CONFIG), f"model.path={policy}", *sets.values()]

    def run(self, run_dir: Path, *changes: str, num_ranks: int = 2) -> Job:
        return self.server.wait(self.start(run_dir, *changes, num_ranks=num_ranks))

    def start(self, run_dir: Path, *changes: str, num_ranks: int = 2) -> int:
        return self.server.start("megatron_ac2.train", num_ranks, *self.arguments, f"run.dir={run_dir}", *changes)

    def torchrun(self, run_dir: Path, *changes: str) -> subprocess.Popen[str]:
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
        command = [*launcher, "-m", "megatron_ac2.train", *self.arguments, f"run.dir={run_dir}", *changes]
        return subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT, env=environment(None)
        )


def rows(run_dir: Path) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in found] == list(range(len(found)))
    return found


def steps(run_dir: Path) -> list[dict[str, Any]]:
    """The rows of steps taken: the last row of a run holds its last evaluation alone."""
    return [row for row in rows(run_dir) if "actor/loss" in row]


def reproducible(row: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if not name.startswith(NOT_REPRODUCIBLE)}
