"""Optimizers and checkpoints in every layout of two ranks; a process killed while it saves."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

from megatron_ac2.model.checkpoint_files import complete_folders
from tests.distributed.launch import ROOT, torchrun

CASES = Path(__file__).with_name("checkpoint_cases.py")
KILLED = Path(__file__).with_name("kill_cases.py")
NUM_KILLS = 4


def test_optimizers_and_checkpoints_in_every_layout(tiny_untied: Path, tiny_tied: Path, tmp_path: Path) -> None:
    output = torchrun(CASES, 2, tiny_untied, tiny_tied, tmp_path, timeout=600)
    assert output.count("passed ") == 13 and output.count("done") == 2


def start(folder: Path, root: Path, last: int) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        environment.pop(name, None)
    return subprocess.Popen(
        [sys.executable, str(KILLED), str(folder), str(root), str(last)],
        stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment, start_new_session=True,
    )  # fmt: skip


def wait_for(process: subprocess.Popen[str], word: str) -> int:
    """The number that follows `word` in the first line that starts with it."""
    for line in process.stdout:
        if line.startswith(word):
            return int(line.split()[1])
    raise AssertionError(f"the process ended with code {process.wait()} before it said {word!r}")


def test_killed_at_any_moment_leaves_a_loadable_checkpoint(tiny_untied: Path, tmp_path: Path) -> None:
    """Each new process loads and checks what the killed one left: the last step it reported, or the one after."""
    rng = random.Random(0)
    root, last_saved = tmp_path / "run", 0
    for _ in range(NUM_KILLS):
        process = start(tiny_untied, root, last=10_000)
        try:
            loaded = wait_for(process, "ready")
            assert loaded >= last_saved
            last_saved = wait_for(process, "saved")  # one whole save, so that the next delay is in units of saves
            time.sleep(rng.uniform(0.0, 1.0))
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            rest, _ = process.communicate()
        saved = [int(line.split()[1]) for line in rest.splitlines() if line.startswith("saved ")]
        last_saved = max([last_saved, *saved])
    process = start(tiny_untied, root, last=last_saved + 3)
    assert wait_for(process, "ready") in (last_saved, last_saved + 1)
    process.communicate(timeout=120)
    assert process.returncode == 0
    assert [path.name for path in complete_folders(root).values()] == [f"step_{last_saved + n:06d}" for n in (2, 3)]
    assert not list(root.glob("*.tmp")) and not list(root.glob("*.old"))
