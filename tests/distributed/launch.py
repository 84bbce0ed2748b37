"""Run a script under torchrun on this machine, as the tests of several ranks do."""

from __future__ import annotations

import os
import random
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[2]
_TAIL_LINES = 60


def torchrun(
    script: str | Path, nproc: int, *args: object, timeout: float = 300, env: dict[str, str] | None = None
) -> str:
    """Run `script args...` as `nproc` ranks; return their output. AssertionError with its tail if they fail or hang."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--local_addr=127.0.0.1", f"--nproc_per_node={nproc}"]
    command = [sys.executable, *launcher, str(script), *map(str, args)]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=ROOT,
        env=environment(env),
    )
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        kill_tree(process)
        output, _ = process.communicate()
        raise AssertionError(f"{script}: {nproc} ranks not done after {timeout} s\n{tail(output)}") from None
    if process.returncode:
        raise AssertionError(f"{script}: {nproc} ranks ended with code {process.returncode}\n{tail(output)}")
    return output


def kill_tree(process: subprocess.Popen[str]) -> None:
    """SIGKILL to a launcher and its ranks: torchrun gives each rank a session of its own, out of reach of a killpg."""
    for member in [*psutil.Process(process.pid).children(recursive=True), process]:
        with suppress(psutil.NoSuchProcess):
            member.kill()


def environment(extra: dict[str, str] | None) -> dict[str, str]:
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "PYTHONWARNINGS": "ignore",
        "OMP_NUM_THREADS": "1",
        "TORCHDYNAMO_DISABLE": "1",
        **(extra or {}),
    }


def free_port() -> int:
    """From below those that the system gives to outgoing connections, or one of these might take it before its user."""
    draw = random.SystemRandom()
    while True:
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", draw.randrange(20_000, 32_768)))
            return probe.getsockname()[1]


def tail(output: str) -> str:
    return "\n".join(output.splitlines()[-_TAIL_LINES:])
