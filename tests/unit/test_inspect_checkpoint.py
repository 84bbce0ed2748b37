"""tools/inspect_checkpoint.py on a checkpoint of two small tensors, whole and damaged; no Megatron needed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.distributed import checkpoint

from megatron_ac2.model import checkpoint_files as files
from megatron_ac2.model import checkpoint_manifest as manifests
from tools import inspect_checkpoint
from tools.inspect_checkpoint import find, inspect, size

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # saved by one process
TENSORS = {
    "model.actor.decoder.weight": torch.zeros(2, 3, dtype=torch.bfloat16),  # 6 numbers, 12 bytes
    "model.actor.norm": torch.zeros(5),  # 5 numbers, 20 bytes
    "optimizer.actor.adam.exp_avg.norm": torch.zeros(5),
    "unknown": torch.zeros(()),
}
STATE = {
    "step": 7,
    "identity": {"model": "tiny", "run.seed": "0"},
    "models": {"actor": "bfloat16"},
    "optimizers": {
        "actor": {"kinds": ["adam.exp_avg"], "scalars": {"adam": {"num_steps": 14, "lr": 2.5e-4, "config_lr": 1e-3}}}
    },
    "run": {
        "stream": {"epoch": 1, "position": 2, "order": np.arange(3)},
        "replay": {"problem_ids": ["a", "b"], "versions": np.array([4, 6])},
        "targets": {"problem_ids": [], "versions": np.zeros(0)},
        "references": {"problem_ids": ["a"]},
        "readiness": {"ready": ["a", "b"], "opened": True},
        "counters": {"decoding_flops": 1.5e9, "generated_tokens": 1234, "prefill_tokens": 0},
        "calibration": {},
    },
}


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    root = tmp_path / "checkpoints"
    folder = files.begin(root, 7)
    files.write_state(folder / files.STATE_FILE, files.pack_state(STATE))
    checkpoint.save(TENSORS, checkpoint_id=folder / files.TENSORS_FOLDER, no_dist=True)
    files.commit(root, 7, 1, manifests.describe(folder, manifests.files_in(folder)))
    return tmp_path


def printed(capsys: pytest.CaptureFixture[str], folder: Path, every: bool = False, hashes: bool = True) -> list[str]:
    inspect(folder, every, hashes)
    return [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]


def test_all_that_is_in_it(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = find(run_dir)
    assert folder == find(run_dir / "checkpoints") == find(folder) == run_dir / "checkpoints" / "step_000007"
    lines = printed(capsys, folder)
    for line in (
        "step: 7",
        "model tiny",
        "run.seed 0",
        "actor.adam 14 steps lr 0.00025",
        "problems epoch 1, 2 of 3 taken",
        "replay 2 rollouts of policy versions 4 to 6",
        "targets 0 critic targets",
        "references of 1 problems",
        "readiness 2 problems ready, gate open",
        "decoding 1.5e+09 FLOPs, 1,234 tokens generated",
        "calibration none",
        "tensors: 4, 56 bytes",
        "model.actor 11 numbers in 2 tensors bfloat16, float32 32 bytes",
        "optimizer.actor.adam.exp_avg 5 numbers in 1 tensors float32 20 bytes",
        "others 1 numbers in 1 tensors float32 4 bytes",
    ):
        assert line in lines
    assert lines[-1].endswith("sizes and hashes as saved")


def test_every_tensor(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = printed(capsys, find(run_dir), every=True)
    assert "model.actor.decoder.weight 2x3 bfloat16 12 bytes" in lines and "unknown scalar float32 4 bytes" in lines


def test_a_bare_folder_of_tensors(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = find(run_dir) / files.TENSORS_FOLDER
    assert find(folder) == folder
    lines = printed(capsys, folder)
    assert "others 17 numbers in 4 tensors bfloat16, float32 56 bytes" in lines and "not checked" in lines[-1]


def test_no_tensor_is_read(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without the files that hold them, and with sizes and hashes left alone, all but the check is as before."""
    whole = printed(capsys, find(run_dir))
    for path in (find(run_dir) / files.TENSORS_FOLDER).glob("*.distcp"):
        path.unlink()
    assert printed(capsys, find(run_dir))[: len(whole) - 1] == whole[:-1]


def test_damage_is_named_after_what_could_be_read(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = find(run_dir)
    stored = next((folder / files.TENSORS_FOLDER).glob("*.distcp"))
    content = stored.read_bytes()
    stored.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert "DAMAGED" not in printed(capsys, folder, hashes=False)[-1]
    *_, summary, message = printed(capsys, folder)
    assert "DAMAGED" in summary and message.startswith(f"{stored}: damaged: found {len(content)} bytes")
    (folder / files.STATE_FILE).write_bytes(b"no zip file")
    lines = printed(capsys, folder)
    assert len([line for line in lines if str(folder / files.STATE_FILE) in line]) == 2  # its size, its content
    (folder / manifests.FILES_FILE).unlink()
    assert "files.json: missing" in printed(capsys, find(folder))[-1]


@pytest.mark.parametrize(
    ("num_bytes", "text"), [(0, "0 bytes"), (1023, "1023 bytes"), (1536, "1.5 KiB"), (2**42, "4.0 TiB")]
)
def test_sizes(num_bytes: int, text: str) -> None:
    assert size(num_bytes) == text


def test_exit_statuses(run_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def status(path: Path, *flags: str) -> int:
        monkeypatch.setattr(sys, "argv", ["inspect_checkpoint.py", str(path), *flags])
        return inspect_checkpoint.main()

    assert status(run_dir) == status(run_dir, "--sizes-only", "--tensors") == 0
    (find(run_dir) / files.STATE_FILE).unlink()
    assert status(run_dir) == 1
    capsys.readouterr()
    assert status(run_dir / "nothing") == 2
    assert "found no checkpoint; accepted: a run's folder" in capsys.readouterr().err


def test_it_runs_without_megatron(run_dir: Path) -> None:
    command = [sys.executable, "-X", "importtime", inspect_checkpoint.__file__, str(run_dir)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "step: 7" in done.stdout and "megatron.core" not in done.stderr
