"""Distributed checkpoint: models, optimizers and the run's host state; atomic, verified, free of the parallel layout.

The folder must be one that every rank sees. Tensors are stored once each, in the model's shape, so a run may go on
under other tensor, pipeline and data degrees and with the other kind of optimizer (plain or distributed).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.dist_checkpointing.utils import add_prefix_for_sharding
from torch.distributed.checkpoint.api import CheckpointException

from megatron_ac2.model import checkpoint_files as files
from megatron_ac2.model.checkpoint_files import latest
from megatron_ac2.model.checkpoint_writer import InProcessSave
from megatron_ac2.model.hf_weights import unwrap
from megatron_ac2.parallel.collectives import broadcast_object, gather_objects, split_evenly
from megatron_ac2.types import UserError

__all__ = ["latest", "load_checkpoint", "save_checkpoint"]

T = TypeVar("T")


class ShardedOptimizer(Protocol):
    """What is saved of an optimizer (training.optimizer.SharedWeightsOptimizer)."""

    @property
    def kinds(self) -> tuple[str, ...]: ...

    def sharded_tensors(self, kind: str, loading: bool) -> dict[str, Any]: ...

    def load_tensors(self, kind: str, tensors: Mapping[str, torch.Tensor]) -> None: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, saved: Mapping[str, Any]) -> None: ...


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
    root = Path(root)
    state = {
        "identity": dict(identity),
        "models": {name: _dtype(model) for name, model in models.items()},
        "optimizers": {name: {"kinds": list(o.kinds), "scalars": o.state_dict()} for name, o in optimizers.items()},
        "run": run_state,
    }

    def start() -> Path:
        folder = files.begin(root, step)
        files.write_state(folder / files.STATE_FILE, state)
        return folder

    folder = _from_first(start, f"checkpoint {root}: cannot be written")
    with _failing_as_runtime_error(f"checkpoint {folder}: cannot be written"):
        dist_checkpointing.save(_sharded(models, optimizers), str(folder / files.TENSORS_FOLDER), InProcessSave())
    names = _from_first(lambda: files.files_in(folder), f"checkpoint {folder}")
    sums = _together(lambda: files.checksums(folder, _my_share(names)), f"checkpoint {folder}: cannot be read back")
    everything = {name: value for part in gather_objects(sums) for name, value in part.items()}
    return _from_first(lambda: files.commit(root, step, keep, everything), f"checkpoint {root}: cannot be completed")


def load_checkpoint(
    root: str | Path,
    models: Mapping[str, torch.nn.Module],
    optimizers: Mapping[str, ShardedOptimizer],
    identity: Mapping[str, str],
) -> dict[str, Any] | None:
    """Fill `models` and `optimizers` from the latest checkpoint in `root`; return its `run_state`, or None without one.

    A collective. Models and optimizers that the checkpoint has beyond those are left alone. Raises `UserError`, on
    every rank and before anything is changed, for a missing or damaged file, another identity, or a part it lacks.
    """
    folder = _from_first(lambda: latest(root), f"checkpoint {root}")
    if folder is None:
        return None
    listed = _together(lambda: files.listed_files(folder), f"checkpoint {folder}")
    mine = {name: listed[name] for name in _my_share(sorted(listed))}
    _together(lambda: _raise_if(files.damages(folder, mine)), f"checkpoint {folder}")
    state = _together(lambda: files.read_state(folder / files.STATE_FILE), f"checkpoint {folder}")
    _together(lambda: _raise_if(_differences(folder, state, models, optimizers, identity)), f"checkpoint {folder}")
    tensors = folder / files.TENSORS_FOLDER
    for name, model in models.items():
        unwrap(model).load_state_dict(_load_tensors(_sharded_model(name, model), tensors))
    for name, optimizer in optimizers.items():
        for kind in optimizer.kinds:  # one kind at a time: each needs a full copy in host memory
            optimizer.load_tensors(kind, _load_tensors(_sharded_optimizer(name, optimizer, kind, True), tensors))
        optimizer.load_state_dict(state["optimizers"][name]["scalars"])
    return state["run"]


def _differences(
    folder: Path,
    state: Mapping[str, Any],
    models: Mapping[str, torch.nn.Module],
    optimizers: Mapping[str, ShardedOptimizer],
    identity: Mapping[str, str],
) -> list[str]:
    saved = state["identity"]
    problems = [
        f"{key}: found {saved.get(key)!r} in {folder}, but this run has {identity.get(key)!r}; "
        "resume with what the checkpoint was made with, or start in another run.dir"
        for key in sorted({*saved, *identity})
        if saved.get(key) != identity.get(key)
    ]
    for name, model in models.items():
        if state["models"].get(name) != _dtype(model):
            problems.append(
                f"model {name}: found {state['models'].get(name, 'none')} in {folder}, but this run has {_dtype(model)}"
            )
    for name, optimizer in optimizers.items():
        kinds = state["optimizers"].get(name, {}).get("kinds")
        if kinds != list(optimizer.kinds):
            problems.append(f"optimizer {name}: found {kinds} in {folder}, but this run has {list(optimizer.kinds)}")
    return problems


def _dtype(model: torch.nn.Module) -> str:
    return str(unwrap(model).config.params_dtype).removeprefix("torch.")


def _sharded(models: Mapping[str, torch.nn.Module], optimizers: Mapping[str, ShardedOptimizer]) -> dict[str, Any]:
    parts: dict[str, Any] = {f"model.{name}": _sharded_model(name, model) for name, model in models.items()}
    for name, optimizer in optimizers.items():
        for kind in optimizer.kinds:
            if tensors := _sharded_optimizer(name, optimizer, kind, False):  # nothing on some data ranks
                parts[f"optimizer.{name}.{kind}"] = tensors
    return parts


def _sharded_model(name: str, model: torch.nn.Module) -> dict[str, Any]:
    sharded = unwrap(model).sharded_state_dict()
    add_prefix_for_sharding(sharded, f"model.{name}.")
    return sharded


def _sharded_optimizer(name: str, optimizer: ShardedOptimizer, kind: str, loading: bool) -> dict[str, Any]:
    sharded = optimizer.sharded_tensors(kind, loading)
    add_prefix_for_sharding(sharded, f"optimizer.{name}.")
    return sharded


def _load_tensors(sharded: dict[str, Any], folder: Path) -> dict[str, Any]:
    _together(lambda: _raise_if(_unfit(sharded, folder)), f"checkpoint {folder}")
    with _failing_as_runtime_error(f"checkpoint {folder}: cannot be read"):
        return dist_checkpointing.load(sharded, str(folder), validate_access_integrity=False)


def _unfit(sharded: dict[str, Any], folder: Path) -> list[str]:
    """Tensors that the checkpoint lacks or has in another shape, as messages."""
    stored = dist_checkpointing.load_tensors_metadata(str(folder))
    problems = []
    for wanted in nested_values(sharded):
        if not isinstance(wanted, ShardedTensor):  # factories and extra states have no shape to compare
            continue
        if wanted.key not in stored:
            problems.append(f"{folder}: no tensor {wanted.key}, which this run needs")
        elif not wanted.allow_shape_mismatch and stored[wanted.key].global_shape != wanted.global_shape:
            found = stored[wanted.key].global_shape
            problems.append(f"{folder}: {wanted.key}: found shape {found}, but this run has {wanted.global_shape}")
    return problems


def _my_share(names: list[str]) -> list[str]:
    return [names[index] for index in split_evenly(len(names), dist.get_world_size(), dist.get_rank())]


def _raise_if(problems: list[str]) -> None:
    if problems:
        raise UserError(problems)


@contextmanager
def _failing_as_runtime_error(what: str) -> Iterator[None]:
    """torch raises this on every rank when one fails; it is no `Exception`, and would pass by every handler."""
    try:
        yield
    except CheckpointException as error:
        raise RuntimeError(f"{what}: {error}") from error


def _from_first(action: Callable[[], T], what: str) -> T:
    """`action()` on rank 0 alone, its result on every rank; if it fails, an error on every rank."""
    return broadcast_object(_together(lambda: action() if dist.get_rank() == 0 else None, what))


def _together(action: Callable[[], T], what: str) -> T:
    """`action()` on every rank; if it fails on any, an error on every rank, so that none waits for the failed one."""
    result, failure = None, None
    try:
        result = action()
    except Exception as error:  # whatever it is, the other ranks must hear of it
        failure = error
    reports = gather_objects(None if failure is None else (isinstance(failure, UserError), _messages(failure)))
    failed = {rank: report for rank, report in enumerate(reports) if report is not None}
    if not failed:
        return result  # type: ignore[return-value]
    if all(by_user for by_user, _ in failed.values()):
        raise UserError(list(dict.fromkeys(m for _, messages in failed.values() for m in messages))) from failure
    detail = "; ".join(f"rank {rank}: {', '.join(messages)}" for rank, (_, messages) in failed.items())
    raise RuntimeError(f"{what}: {detail}") from failure


def _messages(error: Exception) -> list[str]:
    return list(error.problems) if isinstance(error, UserError) else [f"{type(error).__name__}: {error}"]
