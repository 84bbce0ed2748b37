"""A model's gradients over its data-parallel ranks: Megatron's DDP, and what hides its communication."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads

from megatron_ac2.model.chunks import chunks_of, groups_of, joined
from megatron_ac2.parallel.active import active


def wrap_ddp(
    model: torch.nn.Module, distributed_optimizer: bool, overlap: bool = False, bucket_size: int | None = None
) -> torch.nn.Module:
    """Megatron's DDP around the model, or around each of its chunks: gradients summed in fp32 over data-parallel ranks,
    then divided by the global token count.

    `overlap`: gradients are summed during the backward pass of the last microbatch, in buckets of at least
    `bucket_size` parameters (None: Megatron's choice), and a distributed optimizer's new weights are gathered during
    the next forward pass. Whoever reads weights in between calls model.chunks.gather_parameters.
    """
    config = model.config
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, use_distributed_optimizer=distributed_optimizer, overlap_grad_reduce=overlap,
        overlap_param_gather=overlap and distributed_optimizer, bucket_size=bucket_size,
    )  # fmt: skip
    # Later chunks need no buckets: their communication has the other chunks' computation to hide behind.
    with active(groups_of(model)):
        wrapped = [
            DistributedDataParallel(config, ddp_config, chunk, disable_bucketing=index > 0)
            for index, chunk in enumerate(chunks_of(model))
        ]
    config.finalize_model_grads_func = finalize_model_grads
    if overlap:
        config.no_sync_func = _one_or_all([chunk.no_sync for chunk in wrapped])
        config.grad_sync_func = _one_or_all([chunk.start_grad_sync for chunk in wrapped])
    return joined(wrapped)


def _one_or_all(functions: list[Callable[..., Any]]) -> Callable[..., Any] | list[Callable[..., Any]]:
    """Megatron's schedules take a list for an interleaved pipeline only."""
    return functions if len(functions) > 1 else functions[0]
