"""Work that may fail on one rank, such as on files: every rank hears of it, so that none waits for the failed one."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from megatron_ac2.parallel.collectives import broadcast_object, gather_objects
from megatron_ac2.types import UserError

T = TypeVar("T")


def together(action: Callable[[], T], what: str, group: dist.ProcessGroup | None = None) -> T:
    """`action()` on every rank of `group` (default: the world); its own result. A collective.

    If it fails on any rank, all raise: `UserError` with every rank's problems where each of the failures is one, else
    RuntimeError that begins with `what`. `action` itself must hold no collective.
    """
    result, failure = None, None
    try:
        result = action()
    except Exception as error:  # whatever it is, the other ranks must hear of it
        failure = error
    report = None if failure is None else (isinstance(failure, UserError), _messages(failure))
    failed = {rank: found for rank, found in enumerate(gather_objects(report, group)) if found is not None}
    if not failed:
        return result  # type: ignore[return-value]
    if all(by_user for by_user, _ in failed.values()):
        raise UserError(list(dict.fromkeys(m for _, messages in failed.values() for m in messages))) from failure
    detail = "; ".join(f"rank {rank}: {', '.join(messages)}" for rank, (_, messages) in failed.items())
    raise RuntimeError(f"{what}: {detail}") from failure


def from_first(action: Callable[[], T], what: str, group: dist.ProcessGroup | None = None) -> T:
    """`action()` on rank 0 alone, its result on every rank of `group`, of which rank 0 is one. Fails as `together`."""
    return broadcast_object(together(lambda: action() if dist.get_rank() == 0 else None, what, group), group=group)


def _messages(error: Exception) -> list[str]:
    return list(error.problems) if isinstance(error, UserError) else [f"{type(error).__name__}: {error}"]
