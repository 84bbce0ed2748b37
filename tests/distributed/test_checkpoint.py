"""Optimizers and checkpoints in every layout of two ranks; saves in the background; jobs killed while they save."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from tests.distributed.fork_server import ForkServer
from tests.distributed.launch import ROOT, environment

CASES, ASYNC_CASES, KILL_CASES = (
    Path(__file__).with_name(f"{name}_cases.py") for name in ("checkpoint", "async_save", "kill")
)
NUM_KILLS = 20


def test_optimizers_and_checkpoints_in_every_layout(
    server: ForkServer, tiny_untied: Path, tiny_tied: Path, tmp_path: Path
) -> None:
    output = server.run(CASES, 2, tiny_untied, tiny_tied, tmp_path, timeout=600).passed().output
    assert output.count("passed ") == 17 and output.count("done") == 2


def test_saves_go_on_behind_training(server: ForkServer, tiny_untied: Path, tmp_path: Path) -> None:
    output = server.run(ASYNC_CASES, 2, tiny_untied, tmp_path, timeout=300).passed().output
    assert output.count("passed ") == 3 and output.count("done") == 2


def test_killed_at_any_moment_leaves_a_loadable_checkpoint(tiny_untied: Path, tmp_path: Path) -> None:
    """Of two ranks that save in the background; each next job loads the last step that was complete, or the next."""
    command = [sys.executable, KILL_CASES, tiny_untied, tmp_path / "run", NUM_KILLS]
    job = subprocess.run(
        [*map(str, command)], capture_output=True, text=True, cwd=ROOT, env=environment(None), timeout=300
    )
    assert job.returncode == 0, job.stdout + job.stderr[-4000:]
    found = re.search(rf"{NUM_KILLS} kills, (\d+) of them while files were written", job.stdout)
    assert found and int(found[1]) >= NUM_KILLS // 2, job.stdout  # else the moments miss what they are for
