"""Loading a checkpoint, after all that could be wrong with it has been looked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch

from megatron_ac2.model import checkpoint_files as files
from megatron_ac2.model import checkpoint_manifest as manifests
from megatron_ac2.model.checkpoint_save import my_share
from megatron_ac2.model.checkpoint_tensors import ShardedOptimizer, dtype_name, load_model, load_optimizer
from megatron_ac2.parallel.failures import from_first, together
from megatron_ac2.types import UserError

T = TypeVar("T")


def load_checkpoint(
    root: str | Path,
    models: Mapping[str, torch.nn.Module],
    optimizers: Mapping[str, ShardedOptimizer],
    identity: Mapping[str, str],
    verify: bool = True,
) -> dict[str, Any] | None:
    """Fill `models` and `optimizers` from the latest checkpoint in `root`; return its `run_state`, or None without one.

    A collective. Models and optimizers that the checkpoint has beyond those are left alone. `verify` reads and hashes
    every file first; without it only their sizes are compared. Raises `UserError`, on every rank and before anything
    is changed: for a missing or damaged file, naming the newest checkpoint that is whole; for everything about this run
    that differs from the saved one, all at once.
    """
    folder = from_first(lambda: files.latest(root), f"checkpoint {root}")
    if folder is None:
        return None
    manifest = _undamaged(folder, lambda: manifests.read_manifest(folder))
    mine = {name: manifest[name] for name in my_share(sorted(manifest))}
    _undamaged(folder, lambda: _raise_if(manifests.damages(folder, mine, hashes=False)))
    state = _undamaged(folder, lambda: files.read_state(folder / files.STATE_FILE))
    together(lambda: _raise_if(_differences(folder, state, models, optimizers, identity)), f"checkpoint {folder}")
    if verify:
        _undamaged(folder, lambda: _raise_if(manifests.damages(folder, mine)))
    for name, model in models.items():
        load_model(name, model, folder / files.TENSORS_FOLDER)
    for name, optimizer in optimizers.items():
        load_optimizer(name, optimizer, folder / files.TENSORS_FOLDER)
        optimizer.load_state_dict(state["optimizers"][name]["scalars"])
    return state["run"]


def identity_problems(root: str | Path, identity: Mapping[str, str]) -> list[str]:
    """What `load_checkpoint` would refuse of a run's identity, as messages, in one process that has no model."""
    try:
        folder = files.latest(root)
        if folder is None:
            return []
        return _differences(folder, files.read_state(folder / files.STATE_FILE), {}, {}, identity)
    except UserError as error:
        return error.problems


def _differences(
    folder: Path,
    state: Mapping[str, Any],
    models: Mapping[str, torch.nn.Module],
    optimizers: Mapping[str, ShardedOptimizer],
    identity: Mapping[str, str],
) -> list[str]:
    saved = state["identity"]
    # A key that either does not know yet stands for none.
    keys = [key for key in sorted({*saved, *identity}) if saved.get(key, "none") != identity.get(key, "none")]
    pairs = [(key, saved.get(key), identity.get(key)) for key in keys]
    stored = {name: part["kinds"] for name, part in state["optimizers"].items()}
    pairs += [(f"model {name}", state["models"].get(name), dtype_name(model)) for name, model in models.items()]
    pairs += [(f"optimizer {name}", stored.get(name), list(optimizer.kinds)) for name, optimizer in optimizers.items()]
    problems = [
        f"{what}: found {'none' if old is None else repr(old)} in {folder}, but this run has {new!r}"
        for what, old, new in pairs
        if old != new
    ]
    remedy = f"{folder}: resume with what it was made with, or start in another run.dir or with run.resume=false"
    return [*problems, remedy] if problems else []


def _undamaged(folder: Path, action: Callable[[], T]) -> T:
    """`action()` on every rank; where it finds damage, its error says how to go on without this checkpoint."""
    try:
        return together(action, f"checkpoint {folder}")
    except UserError as error:
        hint = from_first(lambda: files.way_out(folder), f"checkpoint {folder}")
        raise UserError([*error.problems, hint]) from error


def _raise_if(problems: list[str]) -> None:
    if problems:
        raise UserError(problems)
