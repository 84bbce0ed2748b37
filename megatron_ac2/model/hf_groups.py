"""Queries, keys and values where tensor ranks outnumber key-value heads: several ranks share a head.

Megatron cuts the fused matrix, a head's queries with its key and value after one another, into equal slices whatever
they hold; it gathers what the slices give and takes each rank's queries and the shared head out (SelfAttention,
get_query_key_value_tensors). So a rank's slice is no fusion of pieces: fuse first, cut after.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from transformers import PretrainedConfig

from megatron_ac2.config_training import ParallelConfig
from megatron_ac2.model.families import Rule
from megatron_ac2.model.hf_files import HfReader
from megatron_ac2.model.hf_table import Table, head_dim
from megatron_ac2.parallel.topology import Topology


def is_shared(rule: Rule, table: Table, topology: Topology) -> bool:
    """Whether the parameter is a slice of a fusion, and not a fusion of slices."""
    return rule.fusion == "qkv" and topology.tensor > table.num_groups


def whole_shape(slice_: torch.Tensor, topology: Topology) -> torch.Tensor:
    """The fused tensor of all heads, on the meta device."""
    return torch.empty(slice_.shape[0] * topology.tensor, *slice_.shape[1:], dtype=slice_.dtype, device="meta")


def gather_whole(slice_: torch.Tensor, topology: Topology) -> torch.Tensor:
    """A collective of the tensor ranks: the fused tensor of all heads."""
    slices = [torch.empty_like(slice_) for _ in range(topology.tensor)]
    dist.all_gather(slices, slice_.contiguous(), group=topology.pg.tp)
    return torch.cat(slices)


def read_slice(reader: HfReader, rule: Rule, table: Table, topology: Topology) -> torch.Tensor:
    """This rank's slice of the fusion, of which only the head that it shares is read."""
    sharing = topology.tensor // table.num_groups
    group, place = divmod(topology.tensor_rank, sharing)
    pieces = []
    for name in rule.parts:
        rows = reader.shape(name)[0] // table.num_groups
        pieces.append(reader.read_range(name, 0, group * rows, (group + 1) * rows))
    return table.fuse(rule, pieces).chunk(sharing)[place]


def group_problems(hf_config: PretrainedConfig, parallel: ParallelConfig) -> list[str]:
    """Why the key-value heads cannot be cut or shared, as messages."""
    tensor, groups = parallel.tensor, hf_config.num_key_value_heads
    if tensor >= 1 and groups % tensor == 0:
        return []
    if tensor < 1 or tensor % groups:
        return [
            f"parallel.tensor: found {tensor}, model has {groups} key-value heads; accepted: divisors of {groups}, "
            "and multiples, where ranks share a head"
        ]
    rows, sharing = (hf_config.num_attention_heads // groups + 2) * head_dim(hf_config), tensor // groups
    if rows % sharing:
        return [
            f"parallel.tensor: found {tensor}, so that {sharing} ranks share a key-value head; accepted: degrees that "
            f"cut the {rows} channels of the head, its key and its queries evenly"
        ]
    return []
