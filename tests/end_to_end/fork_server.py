"""Entry points as jobs of several ranks, forked from one process that has imported what they import.

Imports are most of a launch here: a forked job of two ranks starts in a fraction of a torchrun launch's time. Run as a
script it is the server: a job a line of JSON on stdin, its exit statuses a line on stdout. `ForkServer` is the client.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path

from tests.distributed.launch import ROOT, environment, free_port, tail


@dataclass(frozen=True)
class Job:
    statuses: list[int]  # exit status a rank; negative: killed by that signal
    logs: list[str]  # what each rank printed
    seconds: float

    def passed(self) -> Job:
        assert not any(self.statuses), f"ranks ended with {self.statuses}\n" + "\n".join(map(tail, self.logs))
        return self


class ForkServer:
    def __init__(self, folder: Path, modules: list[str]):
        self._folder = folder
        self._num_jobs = 0
        self._process = subprocess.Popen(
            [sys.executable, __file__, *modules], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT,
            env=environment({"PYTHONPATH": str(ROOT)}),
        )  # fmt: skip

    def run(self, module: str, num_ranks: int, *arguments: object, timeout: float = 120) -> Job:
        """`python -m module arguments...` as `num_ranks` ranks; they are killed after `timeout` seconds."""
        self._num_jobs += 1
        logs = [self._folder / f"job{self._num_jobs}.rank{rank}.log" for rank in range(num_ranks)]
        job = {"module": module, "arguments": arguments, "logs": logs, "timeout": timeout}
        self._process.stdin.write(json.dumps(job, default=str) + "\n")
        self._process.stdin.flush()
        begin = time.monotonic()
        answer = self._process.stdout.readline()
        assert answer, f"the fork server ended with {self._process.wait()}"
        return Job(json.loads(answer), [log.read_text() for log in logs], time.monotonic() - begin)

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait(timeout=30)


def serve(modules: list[str]) -> None:
    from megatron_ac2.engine.environment import quiet, set_environment

    set_environment(on_cpu=True)
    with quiet():
        for module in (*modules, "vllm"):
            importlib.import_module(module)
    for line in sys.stdin:
        print(json.dumps(run_job(**json.loads(line))), flush=True)


def run_job(module: str, arguments: list[str], logs: list[str], timeout: float) -> list[int]:
    port = free_port()
    ranks = [_fork(module, arguments, rank, logs, port) for rank in range(len(logs))]
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
    return [statuses[pid] for pid in ranks]


def _fork(module: str, arguments: list[str], rank: int, logs: list[str], port: int) -> int:
    pid = os.fork()
    if pid:
        return pid
    try:
        log = os.open(logs[rank], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for descriptor in (1, 2):
            os.dup2(log, descriptor)
        world = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": len(logs), "LOCAL_WORLD_SIZE": len(logs)}
        world |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        os.environ.update({name: str(value) for name, value in world.items()})
        sys.argv = [module, *arguments]
        entry = importlib.import_module("megatron_ac2.entry")
        entry.run_entry_point(importlib.import_module(module).main)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(70)  # run_entry_point ends the process itself


if __name__ == "__main__":
    serve(sys.argv[1:])
    os._exit(0)  # what vLLM leaves behind may hang at interpreter exit
