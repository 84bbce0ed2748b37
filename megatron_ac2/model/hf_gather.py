"""Pieces of Hugging Face tensors -> whole ones on every rank: over tensor ranks, expert ranks, pipeline stages."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron_ac2.model.families import Cut
from megatron_ac2.model.hf_table import Table, cut_dim
from megatron_ac2.parallel.topology import Topology


@dataclass(frozen=True, slots=True)
class Entry:
    """A rank's piece of a tensor, and of an expert's the pieces in its place on the other expert ranks."""

    names: tuple[str, ...]  # HF names, one an expert rank for an expert's
    cut: Cut
    of_expert: bool
    shape: tuple[int, ...]  # of one piece
    dtype: torch.dtype


def gather(piece: torch.Tensor, entry: Entry, table: Table, topology: Topology) -> list[torch.Tensor]:
    """This rank's piece -> the full HF tensors of `entry.names`, contiguous, without the vocabulary's padded rows."""
    group = topology.pg.expt_tp if entry.of_expert else topology.pg.tp
    if entry.cut != "whole" and cut_degree(entry.of_expert, topology) > 1:
        piece = torch.cat(_all_gather(piece, group), dim=cut_dim(entry.cut))
    if entry.cut == "vocab":
        piece = piece[: table.vocab_size]
    return _all_gather(piece, topology.pg.ep) if len(entry.names) > 1 else [piece.contiguous()]


def _all_gather(piece: torch.Tensor, group: dist.ProcessGroup) -> list[torch.Tensor]:
    piece = piece.contiguous()
    pieces = [torch.empty_like(piece) for _ in range(dist.get_world_size(group))]
    dist.all_gather(pieces, piece, group=group)
    return pieces


def from_stage(full: torch.Tensor | None, entry: Entry, stage: int, table: Table, topology: Topology) -> torch.Tensor:
    """The tensor, which the ranks of pipeline stage `stage` pass as `full`, on every rank."""
    if full is None:
        shape = table.full_shape(entry.cut, entry.shape, cut_degree(entry.of_expert, topology))
        full = torch.empty(shape, dtype=entry.dtype, device=topology.device)
    if topology.pipeline > 1:
        dist.broadcast(full, src=dist.get_global_rank(topology.pg.pp, stage), group=topology.pg.pp)
    return full


def cut_degree(of_expert: bool, topology: Topology) -> int:
    """Over how many ranks a tensor is cut."""
    return topology.expert_tensor if of_expert else topology.tensor
