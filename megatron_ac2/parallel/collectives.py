"""The few gathers and reductions of the host side, named by purpose. Each works in a world of one."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Mapping
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")
_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


def split_evenly(n: int, parts: int, index: int) -> range:
    """The `index`-th of `parts` contiguous shares of `range(n)`; sizes differ by at most one, the first are larger."""
    size, rest = divmod(n, parts)
    start = index * size + min(index, rest)
    return range(start, start + size + (index < rest))


def gather_objects(obj: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """Every rank's `obj`, in rank order, on every rank of `group` (default: the world). Objects must pickle."""
    gathered: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, obj, group=group)
    return gathered


def broadcast_object(obj: T | None, source: int = 0, group: dist.ProcessGroup | None = None) -> T:
    """World rank `source`'s object, on every rank of `group` (default: the world)."""
    holder = [obj]
    dist.broadcast_object_list(holder, src=source, group=group)
    return holder[0]  # type: ignore[return-value]


def all_ranks_agree(value: Any, name: str) -> None:
    """Raise RuntimeError on every rank if `value` is not the same everywhere; compared by the hash of its pickle."""
    digest = hashlib.sha256(pickle.dumps(value, protocol=5)).hexdigest()
    digests = gather_objects(digest)
    odd = [rank for rank, other in enumerate(digests) if other != digests[0]]
    if odd:
        raise RuntimeError(f"{name}: ranks {odd} hold another value than rank 0; the job's host state has diverged")


def reduce_scalars(
    values: Mapping[str, float],
    op: Literal["sum", "max", "min"] = "sum",
    group: dist.ProcessGroup | None = None,
) -> dict[str, float]:
    """Reduce named scalars over `group` (default: the world) in float64; every rank passes the same keys."""
    if not values:
        return {}
    names = sorted(values)
    tensor = torch.tensor([float(values[name]) for name in names], dtype=torch.float64, device=_device(group))
    dist.all_reduce(tensor, op=_OPS[op], group=group)
    return dict(zip(names, tensor.tolist(), strict=True))


def barrier(group: dist.ProcessGroup | None = None) -> None:
    dist.barrier(group=group)


def _device(group: dist.ProcessGroup | None) -> torch.device:
    nccl = dist.get_backend(group) == "nccl"
    return torch.device("cuda", torch.cuda.current_device()) if nccl else torch.device("cpu")
