"""Causal attention over packed sequences that context-parallel ranks share, in plain torch: each gathers all keys."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_ac2.parallel.context import gather_whole

Attend = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def shared_attention(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, group: dist.ProcessGroup, attend: Attend
) -> Tensor:
    """query [T / context, heads, d], key and value [T / context, groups, d] of the positions held here, as cut by
    parallel/context.py -> [T / context, heads * d]. A collective.

    attend(q [1, heads, N, d], k and v [1, groups, M, d], mask bool[N, M]) -> [1, heads, N, d].
    """
    context, rank = group.size(), group.rank()
    whole = gather_whole(torch.stack([key, value], 1), cu_seqlens, group)
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (query, whole[:, 0], whole[:, 1]))
    pieces, bounds, done = [], cu_seqlens.tolist(), 0
    for start, end in zip(bounds[:-1], bounds[1:], strict=True):
        size = (end - start) // (2 * context)
        for index in (rank, 2 * context - 1 - rank) if size else ():
            seen = slice(start, start + (index + 1) * size)  # all up to this slice's end
            mask = torch.ones(size, (index + 1) * size, dtype=torch.bool, device=q.device).tril(index * size)
            pieces.append(attend(q[:, :, done : done + size], k[:, :, seen], v[:, :, seen], mask))
            done += size
    return torch.cat(pieces, dim=2)[0].transpose(0, 1).flatten(1)
