"""What the process that grades may still do: read and write the descriptors it has, compute, and end.

Linux holds this, not Python: limits on resources, and a seccomp filter (through libseccomp) that knows every system
call that grading makes and refuses all others, so that no file is opened, no socket made, no program or process
started, no other process signalled or read, whatever runs. Works for any user, in containers too.

`python -m megatron_ac2.grading.confinement` tries it in a process of its own and prints what is not held.
"""

from __future__ import annotations

import ctypes
import errno
import os
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

MEMORY_BYTES = 2 * 1024**3  # of address space, above what the process has when it is shut in
_OPEN_FILES = 16
_TRIAL_SECONDS = 60.0
_INHERITED = ("LD_LIBRARY_PATH", "OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE")  # without which numpy may not load

# For the memory allocator, threads' locks, signals, clocks, and descriptors that are open. None takes a path.
_ALLOWED = (
    "read", "write", "readv", "writev", "recvfrom", "recvmsg", "sendto", "sendmsg", "poll", "ppoll", "select",
    "pselect6", "close", "fstat", "lseek", "brk", "munmap", "mremap", "madvise", "futex", "rt_sigaction",
    "rt_sigprocmask", "rt_sigreturn", "sigaltstack", "getpid", "gettid", "getrandom", "clock_gettime", "clock_getres",
    "gettimeofday", "time", "nanosleep", "clock_nanosleep", "restart_syscall", "sched_yield", "sched_getaffinity",
    "getrusage", "times", "rseq", "set_robust_list", "exit", "exit_group",
)  # fmt: skip
_NEVER_EXECUTABLE = ("mmap", "mprotect")  # allowed without PROT_EXEC
_PROT_EXEC, _PROT_ARGUMENT = 4, 2
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE = 1, 4


def clean_environment() -> dict[str, str]:
    """Of the process that grades: nothing of ours but where packages are, so that no secret is there to be read."""
    kept = {name: os.environ[name] for name in _INHERITED if name in os.environ}
    packages = os.pathsep.join(entry for entry in sys.path if entry)
    fixed = {"LC_ALL": "C.UTF-8", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
    return {**kept, **fixed, "PYTHONPATH": packages}


def end_with_parent() -> None:
    """Be killed when the process that started this one ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def limit_resources() -> None:
    """Memory, no core dump, no growing file, few descriptors; and no other process of this user may look inside."""
    with open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    limits = {
        resource.RLIMIT_AS: used + MEMORY_BYTES, resource.RLIMIT_CORE: 0, resource.RLIMIT_FSIZE: 0,
        resource.RLIMIT_NOFILE: _OPEN_FILES,
    }  # fmt: skip
    for kind, most in limits.items():
        hard = resource.getrlimit(kind)[1]
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(kind, (most, most))
    ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)


def load_filter() -> None:
    """From now on no system call but those above, in this process and for good. Raises OSError or ImportError where
    the kernel or libseccomp cannot."""
    import pyseccomp  # says at its import whether libseccomp is there

    calls = pyseccomp.SyscallFilter(pyseccomp.ERRNO(errno.EPERM))
    for name in _ALLOWED:
        _allow(calls, name)
    for name in _NEVER_EXECUTABLE:
        _allow(calls, name, pyseccomp.Arg(_PROT_ARGUMENT, pyseccomp.MASKED_EQ, _PROT_EXEC, 0))
    calls.load()


def _allow(calls, name: str, *conditions) -> None:
    import pyseccomp

    try:
        calls.add_rule(pyseccomp.ALLOW, name, *conditions)
    except OSError as error:  # an architecture without this call (time, on ARM)
        if error.errno not in (errno.EFAULT, errno.EDOM, errno.EINVAL):
            raise


@lru_cache(maxsize=1)
def why_unconfined() -> str | None:
    """Why this machine cannot shut grading in; None if it can. Tried in a process of its own, once."""
    command = [sys.executable, "-P", "-m", __name__]
    try:
        run = subprocess.run(
            command, env=clean_environment(), cwd="/", capture_output=True, text=True, timeout=_TRIAL_SECONDS
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"its trial did not run: {error}"
    if run.returncode == 0:
        return None
    said = [line for line in (run.stdout + run.stderr).splitlines() if line.strip()]
    return said[-1] if said else f"its trial ended with status {run.returncode}"


def _open_own_source() -> None:
    with open(__file__):
        pass


def _write_scratch() -> None:
    Path("/tmp", f"megatron-ac2-{os.getpid()}").write_text("")


_FORBIDDEN: dict[str, Callable[[], object]] = {
    "reading a file": _open_own_source,
    "writing a file": _write_scratch,
    "making a socket": lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM).close(),
    "starting a process": lambda: os.fork() or os._exit(0),
    "signalling a process": lambda: os.kill(os.getppid(), 0),
    "listing a folder": lambda: os.listdir("/"),
}


def _trial() -> str | None:
    try:
        limit_resources()
        load_filter()
    except (ImportError, OSError, RuntimeError, ValueError) as error:
        return f"seccomp: {error}"
    for what, attempt in _FORBIDDEN.items():
        try:
            attempt()
        except OSError:
            continue
        return f"seccomp: {what} is not refused"
    return None


if __name__ == "__main__":
    problem = _trial()
    os.write(1, f"{problem or 'confined'}\n".encode())
    os._exit(1 if problem else 0)
