"""What only a GPU can run, through the same loop: Transformer Engine layers, NCCL, the engine's sleep and reload."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_ac2.metrics import METRICS_FILE
from tests.distributed.launch import ROOT, torchrun
from tools.prepare_quickstart import prepare

CONFIG = ROOT / "tests" / "end_to_end" / "train.yaml"


@pytest.mark.gpu
@pytest.mark.parametrize("offload", ["none", "optimizer", "all"])
def test_the_loop_on_one_gpu(offload: str, tmp_path: Path) -> None:
    prepare(tmp_path / "inputs", seed=0, num_terms=4, num_train=16, num_validation=4, num_worked=50)
    inputs = tmp_path / "inputs"
    changes = {
        "run.dir": tmp_path / "run",
        "run.num_steps": 3,
        "run.offload": offload,
        "model.path": inputs / "base",
        "model.dtype": "bfloat16",
        "data.train": inputs / "train.jsonl",
        "engine.gpu_memory_utilization": 0.2,
    }
    torchrun("-m", 1, "megatron_ac2.train", CONFIG, *(f"{key}={value}" for key, value in changes.items()))
    rows = [json.loads(line) for line in (tmp_path / "run" / METRICS_FILE).read_text().splitlines()]
    assert [row["step"] for row in rows[:3]] == [0, 1, 2]
    for row in rows[:3]:  # every reshard was verified by checksum, or the run would have stopped
        assert row["mismatch/logprob_abs_max"] < 0.5 and row["actor/ratio_error_first"] < 1e-6
