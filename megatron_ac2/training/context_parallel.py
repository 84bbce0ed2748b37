"""The one place where packed batches are cut over context-parallel ranks, and what is put together again.

A batch is packed whole on every rank and cut here; from then on a rank works on the positions that it holds, and what
it keeps in `fields` stays beside them. Sums over tokens need nothing more: they are summed over context ranks together
with data ranks (training/step.py).
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.distributed as dist

from megatron_ac2.algorithm.objective import PolicyTokens
from megatron_ac2.data.packing import sequence_ids
from megatron_ac2.parallel.context import gather_replicated, gather_whole, held_positions
from megatron_ac2.parallel.topology import Topology
from megatron_ac2.training import step
from megatron_ac2.types import PackedBatch

_BY_TOKEN = ("current", "proximal", "behavior", "advantages", "mask", "entropy", "reference")


def held_part(batch: PackedBatch, topology: Topology) -> PackedBatch:
    """What this context rank holds of a whole batch, on its device; `cu_seqlens` and `max_seq_len` stay the whole's.

    Raises ValueError for a batch that was cut before, or with a sequence of a length that cannot be cut.
    """
    if topology.context > 1:
        if batch.context > 1 or bool((batch.cu_seqlens % (2 * topology.context)).any()):
            raise ValueError(
                f"lengths {batch.cu_seqlens.diff().tolist()}, cut {batch.context} ways: a whole batch is needed, of "
                f"lengths that are multiples of {2 * topology.context}"
            )
        num_held = batch.token_ids.shape[1] // topology.context
        mine = held_positions(batch.cu_seqlens, topology.context, num_held)[topology.context_rank]
        per_token = ["token_ids", "position_ids", "labels", "loss_mask"]
        per_token += ["routed_experts"] if batch.routed_experts is not None else []
        batch = replace(
            batch,
            **{name: getattr(batch, name)[:, mine] for name in per_token},
            fields={name: field[:, mine] for name, field in batch.fields.items()},
            context=topology.context,
        )
    return step.to_device(batch, topology.device)


def whole_values(held: torch.Tensor, batch: PackedBatch, topology: Topology) -> torch.Tensor:
    """Values [T / context, ...] of the positions each rank holds -> [T, ...] of the whole batch, on every rank."""
    return gather_whole(held, batch.cu_seqlens, topology.pg.cp)


def whole_rows(values: torch.Tensor, rows: torch.Tensor, batch: PackedBatch, topology: Topology) -> torch.Tensor:
    """[R] at some positions int64[R] of those each rank holds -> all ranks' values, in the order of the whole batch."""
    marked = values.new_zeros(batch.token_ids.shape[1], 2)
    marked[rows] = torch.stack([values, torch.ones_like(values)], -1)
    whole = whole_values(marked, batch, topology)
    return whole[whole[:, 1] != 0, 0]


def whole_tokens(
    tokens: PolicyTokens, rows: torch.Tensor, batch: PackedBatch, group: dist.ProcessGroup
) -> PolicyTokens:
    """A loss's tokens at positions int64[R] on each rank -> those of all ranks, sequences whole. A collective.

    Rank after rank, one entry a position, masked where there is no token. Gradients by what the ranks now hold in
    common come back to each rank for its own tokens, so that the loss must count once (`count_once`).
    """
    names = [name for name in _BY_TOKEN if getattr(tokens, name) is not None]
    columns = torch.stack([getattr(tokens, name) for name in names], -1)
    dense = columns.new_zeros(batch.token_ids.shape[1], len(names)).index_copy(0, rows, columns)
    whole = dict(zip(names, gather_replicated(dense, group).unbind(-1), strict=True))
    # Every rank holds equally much of each sequence, at the same places.
    owners = sequence_ids(batch)[0].repeat(group.size())
    return replace(tokens, **whole, sequence_ids=owners, top_current=None, top_behavior=None)


def count_once(
    loss: torch.Tensor, sums: dict[str, torch.Tensor], group: dist.ProcessGroup
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The same loss and sums on all ranks -> 0 on all but the first, the loss with its gradient everywhere."""
    if group.rank() == 0:
        return loss, sums
    return loss - loss.detach(), {name: torch.zeros_like(value) for name, value in sums.items()}
