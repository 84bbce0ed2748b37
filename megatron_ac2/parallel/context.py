"""Context parallel: which positions of packed sequences each rank holds, and gathers over these ranks.

Of `context` ranks, rank r holds of every sequence, whose length is a multiple of 2 x context, the slices r and
2 x context - 1 - r of 2 x context equal ones. Under a causal mask all ranks then have as much to do. Transformer
Engine's attention (its `thd_get_partitioned_indices`) and Megatron's rotary embedding take exactly this for granted.
`cu_seqlens` int32[S + 1] always counts positions of the whole batch [T]; a rank holds T / context of them.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor


def length_multiple(context: int) -> int:
    """What the length of every packed sequence, with its padding, must be a multiple of."""
    return 1 if context == 1 else 2 * context


def held_positions(cu_seqlens: Tensor, context: int, num_held: int) -> Tensor:
    """int64[context, num_held]: the positions in the whole batch that each rank holds, in its order; num_held is
    T / context. On the device of `cu_seqlens`, without a wait."""
    starts = cu_seqlens.long()
    lengths = starts.diff()
    owners = torch.repeat_interleave(lengths // context, output_size=num_held)
    slice_len = (lengths // (2 * context))[owners]
    place = torch.arange(num_held, device=starts.device) - starts[owners] // context  # in what is held of a sequence
    second = place >= slice_len
    ranks = torch.arange(context, device=starts.device).unsqueeze(1)
    slices = torch.where(second, 2 * context - 1 - ranks, ranks)
    return starts[owners] + slices * slice_len + place - second * slice_len


def gather_whole(held: Tensor, cu_seqlens: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[T / context, ...] on each rank -> [T, ...] on all of them, in the order of the whole batch. A collective.

    Differentiable where each rank goes its own way with the whole: gradients are summed over the ranks.
    """
    gathered = _GatherSummed.apply(held, group)
    if group.size() == 1:
        return gathered
    positions = held_positions(cu_seqlens, group.size(), len(held)).flatten()
    return gathered[torch.empty_like(positions).scatter_(0, positions, torch.arange(len(positions)).to(positions))]


def gather_replicated(held: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[N, ...] on each rank -> [context x N, ...], rank after rank, on all of them. A collective.

    Differentiable where all ranks compute the same from it: each rank's gradient is its own part.
    """
    return _GatherReplicated.apply(held, group)


class _GatherSummed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, held, group):  # type: ignore[no-untyped-def]
        ctx.group = group
        return _all_gather(held, group)

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        if ctx.group.size() > 1:
            gradient = gradient.clone(memory_format=torch.contiguous_format)  # it may be somebody else's
            dist.all_reduce(gradient, group=ctx.group)
        return gradient.chunk(ctx.group.size())[ctx.group.rank()], None


class _GatherReplicated(torch.autograd.Function):
    @staticmethod
    def forward(ctx, held, group):  # type: ignore[no-untyped-def]
        ctx.group = group
        return _all_gather(held, group)

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        return gradient.chunk(ctx.group.size())[ctx.group.rank()], None


def _all_gather(held: Tensor, group: dist.ProcessGroup) -> Tensor:
    if group.size() == 1:
        return held.view_as(held)
    gathered = held.new_empty(group.size() * len(held), *held.shape[1:])
    dist.all_gather_into_tensor(gathered, held.contiguous(), group=group)
    return gathered
