"""What one rank holds of a model: a GPTModel, or with an interleaved pipeline several of them ("chunks").

With pipeline 2 and virtual_pipeline 2 a model of 8 layers lies as rank 0: 0-1, 4-5; rank 1: 2-3, 6-7. Everything that
takes a `model` takes either kind; what must look inside goes through the functions below.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_ac2.parallel.active import active


class ModelChunks(torch.nn.Module):
    """A rank's chunks in the order of their virtual stages, bare or each in Megatron's DDP."""

    def __init__(self, chunks: Sequence[torch.nn.Module]):
        super().__init__()
        self.chunks = torch.nn.ModuleList(chunks)

    @property
    def config(self) -> TransformerConfig:
        """One for all chunks."""
        return self.chunks[0].config

    @property
    def ddp_config(self) -> DistributedDataParallelConfig:
        return self.chunks[0].ddp_config

    def zero_grad_buffer(self) -> None:
        for chunk in self.chunks:
            chunk.zero_grad_buffer()


def chunks_of(model: torch.nn.Module) -> list[torch.nn.Module]:
    """What Megatron's schedules and optimizers take as their list of model chunks."""
    return list(model.chunks) if isinstance(model, ModelChunks) else [model]


def joined(chunks: Sequence[torch.nn.Module]) -> torch.nn.Module:
    """The inverse of `chunks_of`."""
    return ModelChunks(chunks) if len(chunks) > 1 else chunks[0]


def gpt_models(model: torch.nn.Module) -> list[GPTModel]:
    """The GPTModels inside, out of Megatron's DDP. The last one of the last pipeline stage has the model's output."""
    return [_unwrap(chunk) for chunk in chunks_of(model)]


def groups_of(model: torch.nn.Module) -> ProcessGroupCollection:
    """The process groups of the model's layout."""
    return gpt_models(model)[0].pg_collection


@torch.no_grad()
def gather_parameters(model: torch.nn.Module) -> None:
    """Bring every parameter up to date, for whoever reads one outside of a forward pass. A collective of data ranks.

    With parallel.overlap the distributed optimizer leaves each rank with its own part of the new weights; the rest
    comes during the next forward pass. Does nothing if it has come, or without that.
    """
    for chunk in chunks_of(model):
        if getattr(chunk, "use_forward_hook", False):
            for group in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups):
                if not group.param_gather_dispatched or group.param_gather_handle is not None:
                    group.start_param_sync(force_sync=True)


def named_parameters(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """Every parameter of this rank, bare or in DDP under the same name; layers count from the chunk's first.

    Their values may be old: see `gather_parameters`.
    """
    return {
        f"{index}.{name}": parameter
        for index, chunk in enumerate(gpt_models(model))
        for name, parameter in chunk.named_parameters()
    }


def sharded_state(model: torch.nn.Module, metadata: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """For Megatron's distributed checkpoint, whose keys name the whole model's layers: free of the layout. A collective
    of data ranks, as `gather_parameters` is."""
    gather_parameters(model)
    with active(groups_of(model)):
        return {
            str(index): chunk.sharded_state_dict(metadata=None if metadata is None else dict(metadata))
            for index, chunk in enumerate(gpt_models(model))
        }


def load_state(model: torch.nn.Module, loaded: Mapping[str, Any]) -> None:
    """Take over what was loaded into `sharded_state(model)`."""
    for index, chunk in enumerate(gpt_models(model)):
        chunk.load_state_dict(loaded[str(index)])


def _unwrap(chunk: torch.nn.Module) -> GPTModel:
    while not isinstance(chunk, GPTModel):
        chunk = chunk.module
    return chunk
