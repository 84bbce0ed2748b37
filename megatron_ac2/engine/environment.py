"""What vLLM changes in its process, kept to what we allow: environment, random states, thread setter, output."""

from __future__ import annotations

import contextlib
import os
import random
import sys
import tempfile
import warnings
from collections.abc import Iterator

import numpy as np
import torch

from megatron_ac2.parallel import cpu

_DEFAULTS = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}
# vLLM sets these for itself; left as they are, the trainer and its child processes would read them.
_RESTORED = ("LOCAL_WORLD_SIZE", "LD_PRELOAD")


def set_environment(on_cpu: bool) -> None:
    """Variables that vLLM reads when it is imported. What the user has set stays, but for one.

    The engine shares our weights' memory and process group, so it must live in this process.
    """
    if on_cpu:
        cpu.set_environment()
    for name, value in _DEFAULTS.items():
        os.environ.setdefault(name, value)
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"


@contextlib.contextmanager
def preserved_random_state() -> Iterator[None]:
    """vLLM seeds and consumes the global generators; nobody outside the engine may notice."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    device_state = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])
        if device_state is not None:
            torch.cuda.set_rng_state(device_state)


@contextlib.contextmanager
def preserved_process() -> Iterator[None]:
    """Around building an engine: random states, the variables it overwrites, and `torch.set_num_threads`."""
    variables = {name: os.environ.get(name) for name in _RESTORED}
    set_num_threads = torch.set_num_threads
    with preserved_random_state():
        try:
            yield
        finally:
            torch.set_num_threads = set_num_threads  # vLLM leaves a no-op
            for name, value in variables.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Hold back what the process prints, C++ included; show it only if the block raises.

    A logging level below ERROR, set by the user, turns this off.
    """
    if os.environ.get("VLLM_LOGGING_LEVEL", "ERROR") not in ("ERROR", "CRITICAL"):
        yield
        return
    sys.stdout.flush()
    sys.stderr.flush()
    saved = os.dup(1), os.dup(2)
    with tempfile.TemporaryFile() as held, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        os.dup2(held.fileno(), 1)
        os.dup2(held.fileno(), 2)
        failed = True
        try:
            yield
            failed = False
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            for descriptor, copy in zip((1, 2), saved, strict=True):
                os.dup2(copy, descriptor)
                os.close(copy)
            if failed:
                held.seek(0)
                os.write(2, held.read())
