"""The trainer's side of grading: a server (server.py), some of its workers, and for each answer a deadline."""

from __future__ import annotations

import json
import os
import pickle
import selectors
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from megatron_ac2.grading.confinement import clean_environment
from megatron_ac2.grading.server import FAILED, LENGTH, PROCESS, READY, RIGHT, WRONG

_START_SECONDS = 300.0  # to import verifiers on a busy machine
_VERDICTS = {RIGHT: True, WRONG: False, FAILED: None}
_DIED, _LATE = b"", b"late"


class GradingStopped(RuntimeError):
    """The server or a new worker ended by itself: nothing that an answer could cause."""


class _Server:
    """The server's process and its control socket."""

    def __init__(self, datasets: Sequence[str], maths: bool, confined: bool):
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        setup = json.dumps({"datasets": list(datasets), "maths": maths, "confined": confined})
        command = [sys.executable, "-P", "-W", "ignore", "-m", "megatron_ac2.grading.server", setup]
        with theirs:
            self._process = subprocess.Popen(
                [*command, str(theirs.fileno())], pass_fds=[theirs.fileno()], env=clean_environment(), cwd="/",
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            )  # fmt: skip
        self._is_ready = False
        self._finalizer = weakref.finalize(self, _end, self._process, self._control)

    def fork(self, channel: socket.socket) -> int:
        """A worker at the other end of `channel`: its process id."""
        if not self._is_ready:
            self._reply(_START_SECONDS)
            self._is_ready = True
        with suppress(OSError):  # of a server that is gone, as the reply tells
            socket.send_fds(self._control, [b"fork"], [channel.fileno()])
        return PROCESS.unpack(self._reply(_START_SECONDS))[0]

    def kill(self, process: int) -> None:
        with suppress(OSError, GradingStopped):
            self._control.send(b"kill" + PROCESS.pack(process))
            self._reply(_START_SECONDS)

    def end(self) -> None:
        self._finalizer()

    def _reply(self, seconds: float) -> bytes:
        self._control.settimeout(seconds)
        try:
            reply = self._control.recv(64)
        except OSError as error:
            raise GradingStopped(f"the grading server does not answer: {error}") from error
        if not reply:
            raise GradingStopped(f"the grading server ended with status {self._process.wait()}")
        return reply


def _end(process: subprocess.Popen, control: socket.socket) -> None:
    control.close()
    try:
        process.wait(5.0)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


@dataclass(slots=True)
class _Worker:
    channel: socket.socket
    process: int
    index: int = -1  # of the request that it works on
    deadline: float = 0.0


class GradingPool:
    """`num_workers` confined processes that share out requests; `timeout` in seconds a request.

    The server starts at once and loads while the caller goes on; the first verdicts wait for it. `datasets`: the
    reasoning-gym verifiers that will be asked for; `maths`: whether math-verify will. Without `confined`, no seccomp
    filter is loaded.
    """

    def __init__(
        self, datasets: Sequence[str], maths: bool, timeout: float, num_workers: int = 1, confined: bool = True
    ):
        self._arguments = (tuple(datasets), maths, confined)
        self._timeout, self._num_workers = timeout, num_workers
        self._server = _Server(*self._arguments)
        self._idle: list[_Worker] = []
        self._lock = threading.Lock()

    def verdicts(self, requests: Sequence[tuple[Mapping[str, Any], str]]) -> list[bool | None]:
        """For each (grading, response text): right, wrong, or None where the verifier failed, died, or took longer
        than the timeout. Raises `GradingStopped` if grading cannot go on."""
        with self._lock:
            return self._verdicts(requests)

    def close(self) -> None:
        with self._lock:
            for worker in self._idle:
                worker.channel.close()
            self._idle.clear()
            self._server.end()

    def _verdicts(self, requests: Sequence[tuple[Mapping[str, Any], str]]) -> list[bool | None]:
        found: list[bool | None] = [None] * len(requests)
        waiting = deque(range(len(requests)))
        deadlines: dict[int, float] = {}  # of the requests that a worker was given
        retried: set[int] = set()
        with selectors.DefaultSelector() as busy:
            try:
                while waiting or busy.get_map():
                    while waiting and len(busy.get_map()) < self._num_workers:
                        worker = self._idle.pop() if self._idle else self._new_worker()
                        worker.index = waiting.popleft()
                        worker.deadline = deadlines.setdefault(worker.index, time.monotonic() + self._timeout)
                        self._ask(worker, requests[worker.index])
                        busy.register(worker.channel, selectors.EVENT_READ, worker)
                    for index, byte in self._finish(busy):
                        found[index] = _VERDICTS.get(byte)
                        if byte == _DIED and index not in retried:  # perhaps of something else, before or meanwhile
                            retried.add(index)
                            waiting.appendleft(index)
            except BaseException:  # those at work would answer the next call
                for key in list(busy.get_map().values()):
                    self._retire(key.data)
                raise
        return found

    def _ask(self, worker: _Worker, request: tuple[Mapping[str, Any], str]) -> None:
        content = pickle.dumps(request)
        worker.channel.settimeout(self._timeout)
        with suppress(OSError):  # of one that is dead, as its channel will say
            worker.channel.sendall(LENGTH.pack(len(content)) + content)

    def _finish(self, busy: selectors.BaseSelector) -> list[tuple[int, bytes | None]]:
        """(request, verdict byte) of the workers that are done by the next deadline; who died or is late is ended."""
        first = min(key.data.deadline for key in busy.get_map().values())
        ended = []
        for key, _ in busy.select(max(first - time.monotonic(), 0.0)):
            ended.append((key.data, _one_byte(key.data.channel)))
            busy.unregister(key.fileobj)
        now = time.monotonic()
        for key in [key for key in busy.get_map().values() if key.data.deadline <= now]:
            ended.append((key.data, _LATE))
            busy.unregister(key.fileobj)
        for worker, byte in ended:
            if byte in _VERDICTS:
                self._idle.append(worker)
            else:
                self._retire(worker)
        return [(worker.index, byte) for worker, byte in ended]

    def _new_worker(self) -> _Worker:
        try:
            return self._fork()
        except GradingStopped:  # the server may have been killed, by an operator or for memory: once more
            self._start_again()
            return self._fork()

    def _start_again(self) -> None:
        for worker in self._idle:
            worker.channel.close()
        self._idle.clear()
        self._server.end()
        self._server = _Server(*self._arguments)

    def _fork(self) -> _Worker:
        channel, theirs = socket.socketpair()
        try:
            with theirs:
                process = self._server.fork(theirs)
            channel.settimeout(_START_SECONDS)
            if _one_byte(channel) != READY:
                reason = channel.recv(1000).decode(errors="replace")
                raise GradingStopped(f"a grading worker could not be shut in: {reason}")
        except BaseException:
            channel.close()
            raise
        return _Worker(channel, process)

    def _retire(self, worker: _Worker) -> None:
        worker.channel.close()
        self._server.kill(worker.process)


def _one_byte(channel: socket.socket) -> bytes:
    try:
        return channel.recv(1)
    except OSError:
        return _DIED


def cores_a_process() -> int:
    """Cores that fall to each of this machine's ranks, 1 to 8: how many workers grading may keep busy."""
    num_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return min(max(len(os.sched_getaffinity(0)) // num_ranks, 1), 8)
