"""An experiment from its file to its picture: jobs in processes of their own, one of which fails."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import yaml

from tests.distributed.launch import ROOT, environment

HERE = Path(__file__).parent


def compare(file: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "tools" / "compare_runs.py"), str(file), "--jobs", "2"]
    env = environment(None) | {"COLUMNS": "500"}
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=env, timeout=300)


def test_a_failed_job_is_named_and_the_others_are_reported(inputs: Path, tmp_path: Path) -> None:
    out, nowhere = tmp_path / "out", tmp_path / "nowhere.jsonl"
    common = [f"model.path={inputs / 'base'}", f"data.train={inputs / 'train.jsonl'}", "sampling.routing=grpo",
              f"data.validation={inputs / 'validation.jsonl'}", "run.num_steps=1"]  # fmt: skip
    experiment = {"title": "two", "out": str(out), "base": str(HERE / "train.yaml"), "common": common, "seeds": [0],
                  "variants": {"works": [], "fails": [f"data.train={nowhere}"]}}  # fmt: skip
    file = tmp_path / "experiment.yaml"
    file.write_text(yaml.safe_dump(experiment))

    first = compare(file)
    assert first.returncode == 1, first.stdout + first.stderr
    assert f"fails / seed 0: failed (exit status 2), see {out / 'fails' / 'seed0' / 'log.txt'}" in first.stdout
    assert str(nowhere) in (out / "fails" / "seed0" / "log.txt").read_text()
    (row,) = json.loads((out / "results.json").read_text())["variants"]
    assert row["variant"] == "works" and row["tokens"] > 0 and row["kl_k3"]["mean"] < 1e-6
    assert "| works | 1 |" in first.stdout and (out / "comparison.png").stat().st_size > 5000

    metrics = out / "works" / "seed0" / "metrics.jsonl"
    before = os.stat(metrics).st_mtime_ns
    nowhere.write_text((inputs / "train.jsonl").read_text())
    second = compare(file)
    assert second.returncode == 0, second.stdout + second.stderr
    assert "fails / seed 0: " in second.stdout and "works / seed 0" not in second.stdout
    assert os.stat(metrics).st_mtime_ns == before
    assert len(json.loads((out / "results.json").read_text())["runs"]) == 2
