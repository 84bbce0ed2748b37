"""An experiment from its file to its picture: jobs in processes of their own, one of which fails."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import yaml

from tests.distributed.launch import ROOT, environment

HERE = Path(__file__).parent


def start(file: Path) -> subprocess.Popen[str]:
    command = [sys.executable, str(ROOT / "tools" / "compare_runs.py"), str(file), "--jobs", "2"]
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    return subprocess.Popen(command, cwd=ROOT, env=environment(None), **pipes)


def compare(file: Path) -> tuple[int, str, str]:
    process = start(file)
    output, errors = process.communicate(timeout=300)
    return process.returncode, output, errors


def write_experiment(inputs: Path, folder: Path, variants: dict[str, list[str]]) -> tuple[Path, Path]:
    """The experiment's file, and the folder of its results."""
    out, file = folder / "out", folder / "experiment.yaml"
    common = [f"model.path={inputs / 'base'}", f"data.train={inputs / 'train.jsonl'}", "sampling.routing=grpo",
              f"data.validation={inputs / 'validation.jsonl'}", "run.num_steps=1"]  # fmt: skip
    experiment = {"out": str(out), "base": str(HERE / "train.yaml"), "common": common, "seeds": [0]}
    file.write_text(yaml.safe_dump(experiment | {"variants": variants}))
    return file, out


def test_a_failed_job_is_named_and_the_others_are_reported(inputs: Path, tmp_path: Path) -> None:
    nowhere = tmp_path / "nowhere.jsonl"
    file, out = write_experiment(inputs, tmp_path, {"works": [], "fails": [f"data.train={nowhere}"]})
    status, output, errors = compare(file)
    assert status == 1, output + errors
    assert f"fails / seed 0: failed (exit status 2), see {out / 'fails' / 'seed0' / 'log.txt'}" in output
    assert str(nowhere) in (out / "fails" / "seed0" / "log.txt").read_text()
    (row,) = json.loads((out / "results.json").read_text())["variants"]
    assert row["variant"] == "works" and row["tokens"] > 0 and row["kl_k3"]["mean"] < 1e-6
    assert "| works | 1 |" in output and (out / "comparison.png").stat().st_size > 5000

    metrics = out / "works" / "seed0" / "metrics.jsonl"
    before = os.stat(metrics).st_mtime_ns
    nowhere.write_text((inputs / "train.jsonl").read_text())
    status, output, errors = compare(file)
    assert status == 0, output + errors
    assert "fails / seed 0: " in output and "works / seed 0" not in output
    assert os.stat(metrics).st_mtime_ns == before
    assert len(json.loads((out / "results.json").read_text())["runs"]) == 2


def test_a_stopped_experiment_leaves_no_job_behind(inputs: Path, tmp_path: Path) -> None:
    file, out = write_experiment(inputs, tmp_path, {"long": ["run.num_steps=100000"]})
    process = start(file)
    metrics, deadline = out / "long" / "seed0" / "metrics.jsonl", time.monotonic() + 200
    while not (metrics.is_file() and metrics.read_text()):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    family = psutil.Process(process.pid).children(recursive=True)
    assert len(family) >= 2  # what jobs are forked from, and the job
    process.terminate()
    process.communicate(timeout=60)
    assert process.returncode == 128 + 15
    _, alive = psutil.wait_procs(family, timeout=20)
    assert not alive
