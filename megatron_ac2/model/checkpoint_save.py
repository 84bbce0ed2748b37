"""Saving a checkpoint: a copy first, then the writing, in a thread of its own if training is to go on meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from megatron_ac2.model import checkpoint_files as files
from megatron_ac2.model import checkpoint_manifest as manifests
from megatron_ac2.model.checkpoint_tensors import HostCopy, ShardedOptimizer, copy_to_host, dtype_name, write_tensors
from megatron_ac2.parallel.collectives import gather_objects, split_evenly
from megatron_ac2.parallel.failures import from_first, together


@dataclass(frozen=True, slots=True)
class Kept:
    """Which checkpoints stay: the newest `newest`, and those of every `every`-th step (0: no others)."""

    newest: int
    every: int = 0


class CheckpointSaver:
    """Saves one checkpoint after another into `root`; if `asynchronous`, it writes while training goes on.

    Building one is a collective, as is each of its methods. The writing is done by a thread of each rank, over a gloo
    group that nothing else uses: training may use its own groups meanwhile. It takes host memory for a copy of all
    that is saved. `timeout_minutes`: how long a rank waits for another to write its part.
    """

    def __init__(self, root: str | Path, kept: Kept, asynchronous: bool = True, timeout_minutes: float = 60.0):
        self.root = Path(root)
        self.kept = kept
        self.asynchronous = asynchronous
        self._group = dist.new_group(backend="gloo", timeout=timedelta(minutes=timeout_minutes))
        self._writing: _Writing | None = None
        self._validated = False

    def save(
        self,
        step: int,
        models: Mapping[str, torch.nn.Module],
        optimizers: Mapping[str, ShardedOptimizer],
        run_state: Mapping[str, Any],
        identity: Mapping[str, str],
    ) -> None:
        """Save as `save_checkpoint` does. Returns when all has been copied: weights and state may then change.

        First waits for the former save, and raises what went wrong with it.
        """
        self.wait()
        write = _prepare(
            self.root, step, models, optimizers, run_state, self.kept, identity, self._group, not self._validated
        )
        self._validated = True
        self._writing = _Writing(write, f"checkpoint of step {step} in {self.root}")
        if not self.asynchronous:
            self.wait()

    def wait(self) -> Path | None:
        """Until the last save is complete; its folder. Raises what went wrong with it, the same on every rank."""
        writing, self._writing = self._writing, None
        return None if writing is None else writing.result()


def save_checkpoint(
    root: str | Path,
    step: int,
    models: Mapping[str, torch.nn.Module],
    optimizers: Mapping[str, ShardedOptimizer],
    run_state: Mapping[str, Any],
    keep: int,
    identity: Mapping[str, str],
) -> Path:
    """Write `root`/step_XXXXXX and make it the latest; afterwards only the newest `keep` remain. A collective.

    `run_state` is the same on every rank: nested dicts and lists of JSON scalars and numpy arrays. `identity` names
    what a run that loads this must have in common with it. Killed at any moment, it leaves a complete checkpoint the
    latest: the former, or this one.
    Raises the same error on every rank if any of them fails.
    """
    return _prepare(Path(root), step, models, optimizers, run_state, Kept(keep), identity)()


class _Writing:
    """A thread that writes one checkpoint, `name` in messages."""

    def __init__(self, write: Callable[[], Path], name: str):
        self._write = write
        self._name = name
        self._folder: Path | None = None
        self._error: BaseException | None = None
        # Daemonic: a process that ends on an error must not wait for ranks that are gone.
        self._thread = threading.Thread(target=self._run, name="checkpoint", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._folder = self._write()
        except BaseException as error:
            self._error = error
        del self._write  # and the host copy with it

    def result(self) -> Path:
        self._thread.join()
        if self._error is not None:
            raise RuntimeError(f"{self._name}: not saved: {self._error}") from self._error
        assert self._folder is not None
        return self._folder


def _prepare(
    root: Path,
    step: int,
    models: Mapping[str, torch.nn.Module],
    optimizers: Mapping[str, ShardedOptimizer],
    run_state: Mapping[str, Any],
    kept: Kept,
    identity: Mapping[str, str],
    group: dist.ProcessGroup | None = None,
    validate: bool = True,
) -> Callable[[], Path]:
    """Copy all that is to be saved; what is returned writes it, as a collective of `group` alone."""
    state = {
        "step": step,
        "identity": dict(identity),
        "models": {name: dtype_name(model) for name, model in models.items()},
        "optimizers": {name: {"kinds": list(o.kinds), "scalars": o.state_dict()} for name, o in optimizers.items()},
        "run": run_state,
    }

    def start() -> Path:
        nonlocal packed
        packed = files.pack_state(state)
        return files.begin(root, step)

    packed: dict[str, np.ndarray] = {}  # rank 0 alone needs it
    folder = from_first(start, f"checkpoint {root}: cannot be written")
    copy = copy_to_host(models, optimizers, validate)
    return lambda: _write(root, step, folder, packed, copy, kept, group)


def _write(
    root: Path,
    step: int,
    folder: Path,
    packed: Mapping[str, np.ndarray],
    copy: HostCopy,
    kept: Kept,
    group: dist.ProcessGroup | None,
) -> Path:
    what = f"checkpoint {folder}: cannot be"
    from_first(lambda: files.write_state(folder / files.STATE_FILE, packed), f"{what} written", group)
    write_tensors(copy, folder / files.TENSORS_FOLDER, group)
    names = from_first(lambda: manifests.files_in(folder), f"{what} read back", group)
    mine = together(lambda: manifests.describe(folder, my_share(names)), f"{what} read back", group)
    everything = {name: found for part in gather_objects(mine, group) for name, found in part.items()}
    return from_first(lambda: files.commit(root, step, kept.newest, everything, kept.every), f"{what} completed", group)


def my_share(names: list[str]) -> list[str]:
    """Of files that the ranks read between them, those of this rank."""
    return [names[index] for index in split_evenly(len(names), dist.get_world_size(), dist.get_rank())]
