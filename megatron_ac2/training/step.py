"""One Megatron forward-backward over microbatches. Every factor between a loss and its gradient is listed here.

A loss function returns the SUM of the losses of its microbatch's units (tokens, labelled positions, pairs) and their
count. The gradient is the one of (sum over the whole job) / (count over the whole job), whatever the layout:

| factor                     | where it could be applied              | what applies here                             |
|----------------------------|----------------------------------------|-----------------------------------------------|
| 1 / number of microbatches | schedules.forward_step_calc_loss       | none: calculate_per_token_loss                |
| context-parallel degree    | the same, for losses of two values     | none: the loss returns three values           |
| 1 / data-parallel degree   | DDP's gradient_scaling_factor          | 1: calculate_per_token_loss, so a plain sum   |
| tensor-parallel degree     | nowhere                                | none: each rank's backward covers its columns |
| 1 / count over the job     | finalize_model_grads, on all gradients | the only division: the last stage's count is  |
|                            |                                        | sent to all stages, summed over data and      |
|                            |                                        | context ranks; a count of 0 divides nothing   |
| loss scale                 | backward_step, config.grad_scale_func  | none: fp32 and bf16 need no loss scaling      |

A loss with unequal weights normalises them to mean one before it sums; dividing by the count is then right for it too.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.utils import get_model_config

from megatron_ac2.config_training import Fp8Config
from megatron_ac2.data.packing import plan_microbatches
from megatron_ac2.model.chunks import chunks_of
from megatron_ac2.model.fp8 import token_multiple
from megatron_ac2.model.router_replay import RoutedSeqParams, routers_part
from megatron_ac2.parallel.active import active
from megatron_ac2.parallel.collectives import broadcast_object, reduce_scalars
from megatron_ac2.parallel.host_memory import check_here
from megatron_ac2.parallel.topology import Topology
from megatron_ac2.training.optimizer import StepResult
from megatron_ac2.types import PackedBatch

T = TypeVar("T")
Loss = tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]  # loss sum [], count [], metric sums and maxima []
LossFunction = Callable[[torch.Tensor, PackedBatch], Loss]


class Optimizer(Protocol):
    """What a training step needs of one: it reads the model's gradients, and refuses non-finite ones (ok False)."""

    def step(self) -> StepResult: ...


def forward_backward(
    model: torch.nn.Module, microbatches: Sequence[PackedBatch], loss_function: LossFunction, topology: Topology
) -> dict[str, float]:
    """Fill the model's gradients anew; return the loss's metrics over the job, plus "count" and "loss" (the mean).

    A collective: every rank of a pipeline passes as many microbatches, all-masked ones if need be: at least one, and a
    multiple of topology.microbatch_multiple.
    Metrics named "*_max" are maxima, all others sums; every rank gets the same dict. With a count of 0, loss and
    gradient are 0.
    """
    _check_scaling(model)
    check_here(next(model.parameters()).main_grad, "the model's gradients")
    model.zero_grad_buffer()

    def loss(batch: PackedBatch, output: torch.Tensor) -> Loss:
        total, count, metrics = loss_function(output, batch)
        # Cloned, for Megatron may scale or free the loss in place.
        return total, count.to(torch.int), {**metrics, "loss_sum": total.detach().clone(), "count": count}

    collected = _run(model, microbatches, loss, topology, forward_only=False)
    metrics = reduce_metrics(collected, topology)
    metrics["loss"] = metrics.pop("loss_sum") / max(metrics["count"], 1.0)
    return metrics


@torch.no_grad()
def forward_only(
    model: torch.nn.Module,
    microbatches: Sequence[PackedBatch],
    function: Callable[[torch.Tensor, PackedBatch], T],
    topology: Topology,
) -> list[T]:
    """`function(output, batch)` of every microbatch on the last pipeline stage; an empty list on the other stages.

    A collective, like `forward_backward`. Tensor ranks each get their own shard of the output.
    """

    def keep(batch: PackedBatch, output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, T]:
        zero = torch.zeros((), dtype=torch.int, device=output.device)
        return output.new_zeros(()), zero, function(output, batch)

    return _run(model, microbatches, keep, topology, forward_only=True)


def apply_step(optimizer: Optimizer, metrics: Mapping[str, float]) -> dict[str, float]:
    """Step the optimizer unless nothing was trained on or the loss is not finite. All ranks decide alike, for the
    metrics are the job's. Returns grad_norm, update_norm and stepped (0 or 1)."""
    if metrics["count"] == 0 or not math.isfinite(metrics["loss"]):
        return {"grad_norm": 0.0, "update_norm": 0.0, "stepped": 0.0}
    result = optimizer.step()
    return {"grad_norm": result.grad_norm, "update_norm": result.update_norm, "stepped": float(result.ok)}


def reduce_metrics(collected: Sequence[Mapping[str, torch.Tensor]], topology: Topology) -> dict[str, float]:
    """Scalars of the last stage's microbatches -> one dict over the whole job, on every rank ("*_max": maximum)."""
    sums: dict[str, float] = {}
    maxima: dict[str, float] = {}
    if topology.is_last_stage:
        for name in collected[0]:
            values = torch.stack([metrics[name].detach().double() for metrics in collected])
            if name.endswith("_max"):
                maxima[name] = values.amax().item()
            else:
                sums[name] = values.sum().item()
        sums = reduce_scalars(sums, "sum", topology.pg.dp_cp)
        maxima = reduce_scalars(maxima, "max", topology.pg.dp_cp)
    # The last rank of the world is on the last stage: the pipeline is the outermost axis.
    return broadcast_object({**sums, **maxima}, source=topology.world_size - 1)


def sum_to_all(values: torch.Tensor, topology: Topology) -> torch.Tensor:
    """Sum `values`, the same on all context ranks, over the data ranks of the last stage, and hand the sum to every
    stage. In place; same on all."""
    if topology.is_last_stage:
        dist.all_reduce(values, group=topology.pg.dp)
    last = dist.get_global_rank(topology.pg.pp, topology.pipeline - 1)
    dist.broadcast(values, src=last, group=topology.pg.pp)
    return values


def my_microbatches(lengths: Sequence[int], topology: Topology, max_tokens: int) -> list[list[int]]:
    """This data rank's microbatches, as indices into `lengths`, of sequences that all ranks hold and plan alike."""
    plan = plan_microbatches(lengths, topology.data, max_tokens, topology.microbatch_multiple)
    return plan[topology.data_rank]


def to_device(batch: PackedBatch, device: torch.device) -> PackedBatch:
    moved = {
        field.name: value.to(device)
        for field in dataclasses.fields(batch)
        if isinstance(value := getattr(batch, field.name), torch.Tensor)
    }
    return dataclasses.replace(batch, **moved, fields={name: x.to(device) for name, x in batch.fields.items()})


def token_alignment(topology: Topology, fp8: Fp8Config | None = None) -> int:
    """Packed lengths are multiples of it: context ranks share them, sequence parallel splits what each of these holds
    over tensor ranks, and each share is a multiple of what kernels want: 16 on CUDA, and what the FP8 recipe asks for
    (model/fp8.py has the numbers' sources)."""
    share = math.lcm(1 if topology.on_cpu else 16, token_multiple(fp8 or Fp8Config()))
    return topology.context * topology.tensor * share


def _run(
    model: torch.nn.Module, microbatches: Sequence[PackedBatch], function: Any, topology: Topology, forward_only: bool
) -> list[Any]:
    if not microbatches:
        raise ValueError("no microbatch: a rank without work passes all-masked ones, or its pipeline waits for ever")
    if len(microbatches) % topology.microbatch_multiple:
        multiple = topology.microbatch_multiple
        raise ValueError(f"{len(microbatches)} microbatches: this pipeline takes multiples of {multiple}")
    check_here(next(model.parameters()), "the model's weights")
    chunks = chunks_of(model)
    schedule = get_forward_backward_func(pp_size=topology.pipeline, vp_size=topology.virtual_pipeline)
    with active(topology.pg):
        return schedule(
            forward_step_func=partial(_forward_step, function, topology),
            data_iterator=[iter(microbatches) for _ in chunks],
            model=chunks,
            num_microbatches=len(microbatches),
            # The first one's whole length; variable_seq_lengths sends each one's shape.
            seq_length=microbatches[0].token_ids.shape[1] * topology.context,
            micro_batch_size=1,
            forward_only=forward_only,
            p2p_communicator=P2PCommunicator(topology.pg.pp, get_model_config(model)),
            pg_collection=topology.pg,
        )


def _forward_step(
    function: Any, topology: Topology, batches: Iterator[PackedBatch], model: torch.nn.Module
) -> tuple[torch.Tensor, Callable[[torch.Tensor], Any]]:
    batch = next(batches)
    packed = RoutedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=batch.cu_seqlens,
        cu_seqlens_kv=batch.cu_seqlens,
        max_seqlen_q=batch.max_seq_len,
        max_seqlen_kv=batch.max_seq_len,
    )
    if batch.context > 1:
        # Transformer Engine asks for these under context parallel; the same tensors mean: no gap behind a sequence.
        packed.cu_seqlens_q_padded = packed.cu_seqlens_kv_padded = batch.cu_seqlens
    if batch.routed_experts is not None:
        is_split = get_model_config(model).sequence_parallel
        packed.routed_experts = routers_part(batch.routed_experts[0], topology, is_split)
    output = model(batch.token_ids, batch.position_ids, attention_mask=None, packed_seq_params=packed)
    return output, partial(function, batch)


def _check_scaling(model: torch.nn.Module) -> None:
    """The table at the top holds only under these settings."""
    config = get_model_config(model)
    if not config.calculate_per_token_loss or config.grad_scale_func is not None:
        raise RuntimeError("training needs calculate_per_token_loss=True and no grad_scale_func (see training/step.py)")
    if config.finalize_model_grads_func is None:
        raise RuntimeError("training needs finalize_model_grads_func: wrap the model with model.data_parallel.wrap_ddp")
