"""Programs as jobs of several ranks, forked from one process that has imported what they import.

Imports are most of a launch here: a forked job of four ranks starts in a fraction of a torchrun launch's time. Run as a
script it is the server: a job a line of JSON on stdin, its end a line of JSON on stdout. `ForkServer` is the client.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import runpy
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from tests.distributed.launch import ROOT, environment, free_port, tail


@dataclass(frozen=True)
class Job:
    statuses: list[int]  # exit status a rank; negative: killed by that signal
    logs: list[str]  # what each rank printed
    seconds: float

    @property
    def output(self) -> str:
        """Of all ranks."""
        return "".join(self.logs)

    def passed(self) -> Job:
        ended = f"ranks ended with {self.statuses} after {self.seconds:.0f} s"
        assert not any(self.statuses), "\n".join([ended, *map(tail, self.logs)])
        return self


class ForkServer:
    """`with ForkServer(folder for logs, modules to import) as server:`. At its end, jobs that still run are killed."""

    def __init__(self, folder: Path, modules: Sequence[str]):
        self._folder = folder
        self._logs: list[list[Path]] = []  # of each job
        self._ended: dict[int, Job] = {}
        self._process = subprocess.Popen(
            [sys.executable, __file__, *modules], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT,
            env=environment({"PYTHONPATH": str(ROOT)}),
        )  # fmt: skip

    def __enter__(self) -> ForkServer:
        return self

    def __exit__(self, *error: object) -> None:
        self._process.stdin.close()
        self._process.wait(timeout=30)

    def run(self, program: Path | str, num_ranks: int, *arguments: object, timeout: float = 120) -> Job:
        """A script, or a module by its name, run by `num_ranks` ranks; they are killed after `timeout` seconds."""
        return self.wait(self.start(program, num_ranks, *arguments, timeout=timeout))

    def start(self, program: Path | str, num_ranks: int, *arguments: object, timeout: float = 120) -> int:
        """As `run`, but only begin; the job's number, for `wait`."""
        number = len(self._logs)
        self._logs.append([self._folder / f"job{number}.rank{rank}.log" for rank in range(num_ranks)])
        job = {"number": number, "program": program, "arguments": [*map(str, arguments)], "timeout": timeout}
        self._process.stdin.write(json.dumps(job | {"logs": self._logs[number]}, default=str) + "\n")
        self._process.stdin.flush()
        return number

    def wait(self, number: int) -> Job:
        while number not in self._ended:
            answer = self._process.stdout.readline()
            assert answer, f"the fork server ended with {self._process.wait()}"
            ended, statuses, seconds = json.loads(answer)
            self._ended[ended] = Job(statuses, [log.read_text() for log in self._logs[ended]], seconds)
        return self._ended[number]


def serve(modules: Sequence[str]) -> None:
    from megatron_ac2.engine.environment import quiet, set_environment

    set_environment(on_cpu=True)
    with quiet():
        for module in modules:
            importlib.import_module(module)
    gc.freeze()  # a collection in a rank would write to, and so copy, every page that it shares
    for line in sys.stdin:
        if not os.fork():
            supervise(**json.loads(line))
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:  # of jobs that have ended
                pass
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            process.kill()


def supervise(number: int, **job: Any) -> None:
    """A job's own process, beside those of other jobs: starts its ranks and reports their end. Does not return."""
    begin, statuses = time.monotonic(), [1]
    try:
        statuses = run_job(**job)
    except BaseException:
        traceback.print_exc()
    finally:
        report = json.dumps([number, statuses, time.monotonic() - begin])
        os.write(1, f"{report}\n".encode())  # at once: another job may report now
        os._exit(0)


def run_job(program: str, arguments: list[str], logs: list[str], timeout: float) -> list[int]:
    port = free_port()
    ranks = [_fork(program, arguments, rank, logs, port) for rank in range(len(logs))]
    deadline, statuses = time.monotonic() + timeout, {}
    while len(statuses) < len(ranks):
        for pid in set(ranks) - set(statuses):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                statuses[pid] = os.waitstatus_to_exitcode(status)
        # As torchrun does: when one rank has failed, or time is up, the others are ended.
        if any(statuses.values()) or time.monotonic() > deadline:
            for pid in set(ranks) - set(statuses):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
    for pid in ranks:
        with suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)  # what a rank has started and left behind
    return [statuses[pid] for pid in ranks]


def _fork(program: str, arguments: list[str], rank: int, logs: list[str], port: int) -> int:
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        os.setsid()
        log = os.open(logs[rank], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for descriptor in (1, 2):
            os.dup2(log, descriptor)
        world = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": len(logs), "LOCAL_WORLD_SIZE": len(logs)}
        world |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        os.environ.update({name: str(value) for name, value in world.items()})
        sys.argv = [program, *arguments]
        if program.endswith(".py"):
            runpy.run_path(program, run_name="__main__")
        else:
            runpy.run_module(program, run_name="__main__", alter_sys=True)
        status = 0
    except SystemExit as end:
        status = int(end.code or 0)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)  # not into the server's own code, nor its exit


if __name__ == "__main__":
    serve(sys.argv[1:])
    os._exit(0)  # what vLLM leaves behind may hang at interpreter exit
