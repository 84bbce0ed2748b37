"""What of the trainer leaves the device while the engine runs: optimizer states and gradients, or the weights too.

Gradients hold nothing between two steps and are dropped. Everything else comes back bit for bit.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from functools import partial

import torch

from megatron_ac2.model.chunks import chunks_of, gpt_models
from megatron_ac2.parallel.host_memory import HostSwap
from megatron_ac2.training.optimizer import SharedWeightsOptimizer

KINDS = ("none", "optimizer", "all")


class Offload:
    """`kind`: none, optimizer or all. `models` by role, frozen ones among them, and the optimizers of the trained ones.

    Takes as much host memory as it frees on the device, gradients apart.
    """

    def __init__(
        self, kind: str, models: Mapping[str, torch.nn.Module], optimizers: Mapping[str, SharedWeightsOptimizer]
    ):
        if kind not in KINDS:
            raise ValueError(f"kind: found {kind!r}, accepted: {', '.join(KINDS)}")
        weights = {role: partial(_weights, model) for role, model in models.items()}
        self._weights = {role: HostSwap(tensors) for role, tensors in weights.items()} if kind == "all" else {}
        self._states: list[HostSwap] = []
        if kind != "none":
            # An fp32 weight is its own master weight, whole or in part: it goes with the weights.
            self._states += [HostSwap(o.tensors, but=partial(_weights, o.model)) for o in optimizers.values()]
            self._states += [HostSwap(partial(_gradients, o.model), keep=False) for o in optimizers.values()]

    @property
    def is_on(self) -> bool:
        return bool(self._states)

    def leave(self, but: Collection[str] = ()) -> int:
        """Bytes freed. The weights of the roles in `but` stay, or come back."""
        freed = sum(swap.to_host() for swap in self._states)
        for role, swap in self._weights.items():
            if role not in but:
                freed += swap.to_host()
        if freed and torch.cuda.is_available():
            torch.cuda.empty_cache()  # what torch keeps for itself the engine cannot have
        for role in self._weights.keys() & set(but):
            self._weights[role].to_device()
        return freed

    def come_back(self) -> None:
        for swap in (*self._weights.values(), *self._states):
            swap.to_device()


def _weights(model: torch.nn.Module) -> Iterator[torch.Tensor]:
    for bare in gpt_models(model):  # Megatron's DDP has its own idea of `buffers`
        yield from bare.parameters()
        yield from bare.buffers()


def _gradients(model: torch.nn.Module) -> Iterator[torch.Tensor]:
    for chunk in chunks_of(model):
        for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
            yield buffer.grad_data
