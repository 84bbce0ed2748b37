"""Trainer -> engine: Megatron's shards become Hugging Face tensors, one after another, and go straight into vLLM."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from megatron_ac2.engine.rounding import RoundingError, round_weights
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
    rounding: str = "none",
    loaded: Callable[[], None] = lambda: None,
) -> dict[str, float]:
    """Make the trainer's weights the engine's, as `version`. A collective over the whole job.

    Tensors are gathered, loaded and freed one by one; peak extra memory is one fused engine layer. With `verify`
    (default: `engine.verify_weights`) every tensor is read back and compared by a checksum of its bits; a difference
    raises `WeightSyncError` naming it. `rounding` (engine/rounding.py) is what the engine's matrices lose on the way;
    the trainer's stay. `loaded` is called when the model is needed no more. Returns metrics: seconds, GiB in the
    engine's name space, and with rounding its relative error.
    """
    start = time.perf_counter()
    counter, error = _Counter(), RoundingError()
    stream = round_weights(export_hf_weights(model, hf_config, topology), rounding, error)
    engine.load_weights(counter.count(stream), version, verify, loaded)
    metrics = {"reshard/seconds": time.perf_counter() - start, "reshard/gib": counter.num_bytes / 2**30}
    return metrics if rounding == "none" else metrics | {"reshard/rounding_error": error.relative}


class _Counter:
    num_bytes = 0

    def count(self, named_tensors: Iterator[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in named_tensors:
            self.num_bytes += tensor.numel() * tensor.element_size()
            yield name, tensor
