"""The process that grades: `python -m megatron_ac2.grading.server SETUP DESCRIPTOR`, started by pool.py.

It loads the verifiers once, and then only forks: each worker is shut in (confinement.py) before it sees an answer, and
a worker that had to be killed is replaced within milliseconds. On the control socket, one datagram a request:
  b"fork" with a socket   -> the new worker's process id; the worker answers requests on that socket
  b"kill" + process id    -> its wait status, when it has ended
The end of the control socket ends the server and all workers.

A worker's socket: b"r" when it is ready (or b"!" and a reason), then one verdict byte for each request, which is its
length (8 bytes) and a pickle of (grading, response text): only what the trainer sends is ever unpickled.
"""

from __future__ import annotations

import gc
import json
import os
import pickle
import signal
import socket
import struct
import sys
from contextlib import suppress
from typing import Any, NoReturn

from megatron_ac2.grading import confinement

LENGTH = struct.Struct("<Q")
PROCESS = struct.Struct("<i")  # an id, or a wait status
READY, NOT_READY = b"r", b"!"
RIGHT, WRONG, FAILED = b"1", b"0", b"x"


def receive(channel: socket.socket, size: int) -> bytes | None:
    """Exactly so many bytes, or None at the end of the stream."""
    data = bytearray()
    while len(data) < size:
        piece = channel.recv(min(size - len(data), 1 << 20))
        if not piece:
            return None
        data += piece
    return bytes(data)


def _work(channel: socket.socket, verifiers: Any, confined: bool) -> None:
    """A worker's life."""
    confinement.end_with_parent()
    try:
        confinement.limit_resources()
        if confined:
            confinement.load_filter()
    except Exception as error:
        channel.sendall(NOT_READY + str(error).encode()[:1000])
        return
    channel.sendall(READY)
    while (header := receive(channel, LENGTH.size)) is not None:
        request = receive(channel, LENGTH.unpack(header)[0])
        if request is None:
            return
        try:
            verdict = RIGHT if verifiers.is_right(*pickle.loads(request)) else WRONG
        except BaseException:  # whatever a verifier raises, SystemExit too, is its own failure
            verdict = FAILED
        channel.sendall(verdict)


class Server:
    """Forks workers and ends them."""

    def __init__(self, control: socket.socket, verifiers: Any, confined: bool):
        self._control, self._verifiers, self._confined = control, verifiers, confined
        self._workers: set[int] = set()

    def serve(self) -> None:
        while True:
            message, descriptors, _, _ = socket.recv_fds(self._control, 64, 1)
            if not message:
                break
            if message == b"fork":
                self._control.send(PROCESS.pack(self._fork(descriptors[0])))
            else:
                self._control.send(PROCESS.pack(self._kill(PROCESS.unpack(message.removeprefix(b"kill"))[0])))
        for process in list(self._workers):
            self._kill(process)

    def _fork(self, descriptor: int) -> int:
        process = os.fork()
        if process:
            os.close(descriptor)
            self._workers.add(process)
            return process
        try:
            self._control.close()
            _work(socket.socket(fileno=descriptor), self._verifiers, self._confined)
        finally:
            os._exit(0)

    def _kill(self, process: int) -> int:
        if process not in self._workers:
            return 0
        self._workers.remove(process)
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
        return os.waitpid(process, 0)[1]


def main() -> NoReturn:
    setup, control = json.loads(sys.argv[1]), socket.socket(fileno=int(sys.argv[2]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal, for the trainer; this process ends with it
    from megatron_ac2.grading.verifiers import Verifiers

    if setup["confined"]:
        import pyseccomp  # noqa: F401  (it looks for its library with the help of other programs)
    verifiers = Verifiers(setup["datasets"], setup["maths"])
    gc.collect()
    gc.freeze()  # what is loaded by now is shared by all workers, and never collected
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):  # what went wrong until here was to be read; what verifiers print is not
        os.dup2(nowhere, stream)
    os.close(nowhere)
    control.send(READY)
    Server(control, verifiers, setup["confined"]).serve()
    os._exit(0)


if __name__ == "__main__":
    main()
