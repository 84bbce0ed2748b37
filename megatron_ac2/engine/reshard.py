"""Trainer -> engine: Megatron's shards become Hugging Face tensors, one after another, and go straight into vLLM."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from megatron_ac2.model.hf_weights import export_hf_weights

if TYPE_CHECKING:
    from megatron_ac2.engine.engine import ColocatedEngine
    from megatron_ac2.parallel.topology import Topology


def publish(
    model: torch.nn.Module,
    hf_config: Any,
    topology: Topology,
    engine: ColocatedEngine,
    version: int,
    verify: bool | None = None,
) -> dict[str, float]:
    """Make the trainer's weights the engine's, as `version`. A collective over the whole job.

    Tensors are gathered, loaded and freed one by one; peak extra memory is one fused engine layer. With `verify`
    (default: `engine.verify_weights`) every tensor is read back and compared by a checksum of its bits; a difference
    raises `WeightSyncError` naming it. Returns metrics: seconds, and GiB in the engine's name space.
    """
    start = time.perf_counter()
    counter = _Counter()
    engine.load_weights(counter.count(export_hf_weights(model, hf_config, topology)), version, verify)
    return {"reshard/seconds": time.perf_counter() - start, "reshard/gib": counter.num_bytes / 2**30}


class _Counter:
    num_bytes = 0

    def count(self, named_tensors: Iterator[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in named_tensors:
            self.num_bytes += tensor.numel() * tensor.element_size()
            yield name, tensor
