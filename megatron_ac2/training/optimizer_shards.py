"""Optimizer tensors in the shape of the model's parameters, so that a checkpoint knows nothing of how they are cut.

The distributed optimizer gives each data-parallel rank a flat range of a parameter, which may start in the middle of a
row; it is put together for saving and cut again after loading. Megatron's own way (`fully_reshardable`) does the same
but knows one Adam state an optimizer, and with torch's AdamW it fails on `step` at load.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory, is_main_replica
from megatron.core.dist_checkpointing.optimizer import make_sharded_optimizer_tensor
from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories
from megatron.core.optimizer import DistributedOptimizer, MegatronOptimizer

from megatron_ac2.model.chunks import sharded_state

Sharded = ShardedTensor | ShardedTensorFactory
Picker = Callable[[torch.Tensor], torch.Tensor]  # fp32 weight (of this rank's range) -> a tensor of its shape
Master = tuple[torch.Tensor, slice]
Stepped = tuple[
    MegatronOptimizer, Mapping[str, torch.nn.Parameter]
]  # an optimizer and the parameters it steps, by name


def shard_tensors(
    model: torch.nn.Module, stepped: Sequence[Stepped], pick: Picker, kind: str, loading: bool
) -> dict[str, Sharded]:
    """{parameter name: picked tensor in the parameter's shape, under the key "kind.parameter's key"}. A collective.

    When saving, copies in host memory, each on one of the ranks that hold the parameter; the others have no entry.
    """
    found, _ = extract_sharded_tensors_and_factories(sharded_state(model))
    layouts = {id(sharded.data): sharded for sharded in nested_values(found)}
    sharded = {}
    for megatron, parameters in stepped:
        masters = _master_weights(megatron, parameters)
        for name, parameter in parameters.items():
            master, where = masters.get(name, (None, slice(0, 0)))
            layout = layouts[id(parameter)]
            if loading:
                whole = not isinstance(megatron, DistributedOptimizer)
                full = pick(master) if whole else torch.empty(parameter.shape, dtype=torch.float32)
            elif isinstance(megatron, DistributedOptimizer):
                full = _put_together(megatron, parameter, None if master is None else pick(master), where)
            else:
                full = pick(master).detach().to("cpu", copy=True) if is_main_replica(layout.replica_id) else None
            if full is not None:
                sharded[name] = make_sharded_optimizer_tensor(layout, full, kind)
    return sharded


@torch.no_grad()
def receive_tensors(stepped: Sequence[Stepped], pick: Picker, tensors: Mapping[str, torch.Tensor]) -> None:
    """Copy tensors in the parameters' shapes into the picked ones, each rank its own range."""
    for megatron, parameters in stepped:
        for name, (master, where) in _master_weights(megatron, parameters).items():
            target = pick(master)
            target.copy_(tensors[name].reshape(-1)[where].reshape(target.shape))


def _master_weights(megatron: MegatronOptimizer, parameters: Mapping[str, torch.nn.Parameter]) -> dict[str, Master]:
    """{name: fp32 weights that this rank steps for the parameter, and which flat range of it they are}."""
    if not isinstance(megatron, DistributedOptimizer):
        return {name: (getattr(p, "main_param", p), slice(None)) for name, p in parameters.items()}
    # Not by `model_param_group_index_map`: it is wrong where a group has parameters of both bf16 and fp32.
    pairs = [
        *zip(megatron.model_float16_groups, megatron.shard_fp32_from_float16_groups, strict=True),
        *zip(megatron.model_fp32_groups, megatron.shard_fp32_groups, strict=True),
    ]
    shards = {id(p): shard for group in pairs for p, shard in zip(*group, strict=True)}
    mine = {name: p for name, p in parameters.items() if id(p) in shards}
    ranges = {name: megatron._get_model_param_range_map(p)["param"] for name, p in mine.items()}
    return {name: (shards[id(p)], slice(ranges[name].start, ranges[name].end)) for name, p in mine.items()}


def _put_together(
    megatron: DistributedOptimizer, parameter: torch.nn.Parameter, shard: torch.Tensor | None, where: slice
) -> torch.Tensor | None:
    """The ranks' ranges as one host tensor on the first data-parallel rank; None on the others. A collective."""
    full = torch.zeros(parameter.numel(), dtype=torch.float32, device=parameter.device)
    if shard is not None:
        full[where] = shard.detach().reshape(-1)
    group = megatron.data_parallel_group
    dist.reduce(full, dst=dist.get_global_rank(group, 0), group=group)
    return full.view(parameter.shape).cpu() if group.rank() == 0 else None
