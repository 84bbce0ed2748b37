"""The tensors of a checkpoint, in Megatron's torch_dist format: copied to host memory, written, loaded.

Megatron's own writer forks a process a file and spawns another that imports the main module anew (seconds, with vLLM in
it); if one of them dies, the save waits for ever. torch's writer does neither, and tells every rank of one's failure.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.strategies import torch as torch_dist
from megatron.core.dist_checkpointing.utils import add_prefix_for_sharding
from torch.distributed import checkpoint
from torch.distributed.checkpoint.api import CheckpointException

from megatron_ac2.model.chunks import gpt_models, load_state, sharded_state
from megatron_ac2.parallel.failures import from_first, together
from megatron_ac2.parallel.host_memory import check_here
from megatron_ac2.parallel.megatron_versions import write_common_file
from megatron_ac2.types import UserError

_NUM_THREADS = 2  # and files a rank
_MODEL, _OPTIMIZER = "model.", "optimizer."  # what tensors' keys begin with


class ShardedOptimizer(Protocol):
    """What is saved of an optimizer (training.optimizer.SharedWeightsOptimizer)."""

    @property
    def kinds(self) -> tuple[str, ...]: ...

    def sharded_tensors(self, kind: str, loading: bool) -> dict[str, Any]:
        """A collective. When saving (not `loading`): copies in host memory, which later steps leave alone."""

    def load_tensors(self, kind: str, tensors: Mapping[str, torch.Tensor]) -> None: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, saved: Mapping[str, Any]) -> None: ...


@dataclass(frozen=True, slots=True)
class HostCopy:
    """This rank's part of what a checkpoint holds, in host memory that nothing else writes to."""

    tensors: dict[str, Any]  # as torch.distributed.checkpoint takes them
    common: dict[str, Any]  # what Megatron keeps apart, in a file of rank 0


def copy_to_host(
    models: Mapping[str, torch.nn.Module], optimizers: Mapping[str, ShardedOptimizer], validate: bool = True
) -> HostCopy:
    """A collective. Of tensors that several ranks hold, one of them copies. Takes as much host memory as it copies.

    `validate` that every element of every tensor has exactly one rank that writes it: a gather of all layouts.
    """
    sharded, common = save_preprocess(_sharded(models, optimizers), validate)
    mine, _, _ = torch_dist._replace_state_dict_keys_with_sharded_keys(sharded, True)
    for pieces in mine.values():
        for piece in pieces:
            if isinstance(piece, ShardedTensor) and piece.key.startswith(_MODEL):  # an optimizer's are copies already
                piece.data = piece.data.detach().to("cpu", copy=True).contiguous()
    return HostCopy(torch_dist.mcore_to_pyt_state_dict(mine, False), common)


def write_tensors(copy: HostCopy, folder: Path, group: dist.ProcessGroup | None) -> None:
    """Into `folder`, which exists. A collective of `group` and of no other. Raises RuntimeError on every rank."""

    def write_common() -> None:
        write_common_file(folder, copy.common)
        save_config(CheckpointingConfig("torch_dist", 1), str(folder))

    from_first(write_common, f"checkpoint {folder}: cannot be written", group)
    with _failing_as_runtime_error(f"checkpoint {folder}: cannot be written"):
        checkpoint.save(
            copy.tensors,
            storage_writer=checkpoint.FileSystemWriter(folder, thread_count=_NUM_THREADS, sync_files=True),
            planner=torch_dist.MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False),
            process_group=group,
        )


def load_model(name: str, model: torch.nn.Module, folder: Path) -> None:
    """A collective. Raises `UserError` on every rank, and changes nothing, for a tensor that lacks or is misshapen."""
    load_state(model, _load(_sharded_model(name, model), folder))


def load_optimizer(name: str, optimizer: ShardedOptimizer, folder: Path) -> None:
    """As `load_model`. One kind of tensors at a time: each needs a full copy in host memory."""
    for kind in optimizer.kinds:
        optimizer.load_tensors(kind, _load(_sharded_optimizer(name, optimizer, kind, True), folder))


def dtype_name(model: torch.nn.Module) -> str:
    return str(gpt_models(model)[0].config.params_dtype).removeprefix("torch.")


def _sharded(models: Mapping[str, torch.nn.Module], optimizers: Mapping[str, ShardedOptimizer]) -> dict[str, Any]:
    parts: dict[str, Any] = {f"{_MODEL}{name}": _sharded_model(name, model) for name, model in models.items()}
    for name, optimizer in optimizers.items():
        for kind in optimizer.kinds:
            if tensors := _sharded_optimizer(name, optimizer, kind, False):  # nothing on some data ranks
                parts[f"{_OPTIMIZER}{name}.{kind}"] = tensors
    return parts


def _sharded_model(name: str, model: torch.nn.Module) -> dict[str, Any]:
    check_here(next(model.parameters()), f"the weights of {name}")
    sharded = sharded_state(model)
    add_prefix_for_sharding(sharded, f"{_MODEL}{name}.")
    return sharded


def _sharded_optimizer(name: str, optimizer: ShardedOptimizer, kind: str, loading: bool) -> dict[str, Any]:
    sharded = optimizer.sharded_tensors(kind, loading)
    add_prefix_for_sharding(sharded, f"{_OPTIMIZER}{name}.")
    return sharded


def _load(sharded: dict[str, Any], folder: Path) -> dict[str, Any]:
    def check() -> None:
        if problems := _unfit(sharded, folder):
            raise UserError(problems)

    together(check, f"checkpoint {folder}")
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


@contextmanager
def _failing_as_runtime_error(what: str) -> Iterator[None]:
    """torch raises this on every rank when one fails; it is no `Exception`, and would pass by every handler."""
    try:
        yield
    except CheckpointException as error:
        raise RuntimeError(f"{what}: {error}") from error
