"""Run a script under torchrun on this machine, as the tests of several ranks do."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_TAIL_LINES = 60


def torchrun(
    script: str | Path, nproc: int, *args: object, timeout: float = 300, env: dict[str, str] | None = None
) -> str:
    """Run `script args...` as `nproc` ranks; return their output. AssertionError with its tail if they fail or hang."""
    launcher = ["-m", "torch.distributed.run", f"--nproc_per_node={nproc}", "--master_addr=127.0.0.1"]
    command = [sys.executable, *launcher, f"--master_port={_free_port()}", str(script), *map(str, args)]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=ROOT,
        env=_environment(env),
        start_new_session=True,  # so that a timeout ends the ranks too
    )
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        raise AssertionError(f"{script}: {nproc} ranks not done after {timeout} s\n{_tail(output)}") from None
    if process.returncode:
        raise AssertionError(f"{script}: {nproc} ranks ended with code {process.returncode}\n{_tail(output)}")
    return output


def _environment(extra: dict[str, str] | None) -> dict[str, str]:
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "PYTHONWARNINGS": "ignore",
        "OMP_NUM_THREADS": "1",
        "TORCHDYNAMO_DISABLE": "1",
        **(extra or {}),
    }


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _tail(output: str) -> str:
    return "\n".join(output.splitlines()[-_TAIL_LINES:])
