"""AdamW over a Megatron model: one or several Adam states over one set of fp32 master weights; norms of a step.

The generative critic is the actor's own weights under a second optimizer. Two Megatron optimizers would each hold
master weights, which drift apart in bf16; here one holds them, and moments and hyper-parameters are swapped in before
a step.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer import MegatronOptimizer, get_megatron_optimizer
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate
from megatron.core.transformer.module import param_is_not_shared

from megatron_ac2.config_training import OptimizerConfig
from megatron_ac2.model.chunks import chunks_of, groups_of, named_parameters
from megatron_ac2.parallel.active import active, in_own_layout
from megatron_ac2.parallel.host_memory import check_here
from megatron_ac2.training.adam_state import MOMENTS, AdamState
from megatron_ac2.training.optimizer_shards import Sharded, Stepped, receive_tensors, shard_tensors

_MASTER = "master"


@dataclass(frozen=True, slots=True)
class StepResult:
    """Of one optimizer step, equal on every rank. `update_norm` is the L2 norm of the fp32 weights' change."""

    ok: bool  # False: a gradient was not finite, nothing has changed
    grad_norm: float  # before clipping
    update_norm: float


class SharedWeightsOptimizer:
    """Several named Adam states over the weights of one model, which is in DDP (model/data_parallel.py).

    A checkpoint takes this object rather than its views, each of which stands for all of it: so it is saved once.
    """

    def __init__(self, ddp_model: torch.nn.Module, configs: Mapping[str, OptimizerConfig], dtype: torch.dtype):
        distributed = ddp_model.ddp_config.use_distributed_optimizer
        for name, config in configs.items():
            if config.distributed != distributed:
                raise ValueError(f"optimizer {name}: distributed={config.distributed}, but the model has {distributed}")
        self.model = ddp_model
        self.dtype = dtype
        self.groups = groups_of(ddp_model)
        with active(self.groups):
            self._parts = _build_megatron(ddp_model, next(iter(configs.values())), dtype)
        self.states = {name: AdamState(config, self._parts) for name, config in configs.items()}

    def for_role(self, name: str) -> Optimizer:
        """The view that steps with the state `name`."""
        return Optimizer(self, name)

    def tensors(self) -> Iterator[torch.Tensor]:
        """Master weights, of fp32 models the weights themselves, and the moments of every state."""
        for state in self.states.values():
            for parameter, moments in state.moments.items():
                yield parameter
                yield from (moments[name] for name in MOMENTS)

    def zero_grad(self) -> None:
        self.model.zero_grad_buffer()
        for part in self._parts:
            part.zero_grad()

    @torch.no_grad()
    @in_own_layout
    def step(self, name: str) -> StepResult:
        """Clip the model's gradients to the state's `grad_clip` (0: no clipping) and step. A collective.

        Gradients that are not finite on any rank are dropped and change nothing on any rank.
        """
        state = self.states[name]
        self._check_here()
        state.put_in(self._parts)
        for part in self._parts:
            part.prepare_grads()
        grad_norm = math.hypot(*(float(part.get_grad_norm()) for part in self._parts))
        if not math.isfinite(grad_norm):
            self.zero_grad()
            return StepResult(ok=False, grad_norm=grad_norm, update_norm=0.0)
        if state.config.grad_clip > 0:
            for part in self._parts:
                if parameters := part.get_parameters():  # none: a stage without experts
                    clip_grad_by_total_norm_fp32(parameters, state.config.grad_clip, grad_norm)
        before = [[parameter.detach().clone() for parameter in _counted_once(part)] for part in self._parts]
        for part in self._parts:
            part.step_with_ready_grads()
        state.num_steps += 1
        update_norm = math.hypot(*(self._change_since(old, part) for old, part in zip(before, self._parts)))
        # A gradient left on a parameter is an alias of the buffer: the next backward pass would count it twice.
        for part in self._parts:
            part.zero_grad()
        return StepResult(ok=True, grad_norm=grad_norm, update_norm=update_norm)

    def _check_here(self) -> None:
        for tensor in islice(self.tensors(), 2):  # a weight and its moment
            check_here(tensor, "the optimizer's states")

    def _change_since(self, before: list[torch.Tensor], part: MegatronOptimizer) -> float:
        """Global L2 norm of the change. Overwrites `before`, so that no second copy of the weights is made."""
        square = torch.zeros((), dtype=torch.float64, device=next(self.model.parameters()).device)
        for old, parameter in zip(before, _counted_once(part), strict=True):
            square += torch.linalg.vector_norm(old.sub_(parameter.detach())).double() ** 2
        dist.all_reduce(square, group=part.get_grad_stats_parallel_group())
        return math.sqrt(square.item())

    @property
    def kinds(self) -> tuple[str, ...]:
        """Names of the tensors kept for each parameter. fp32 models are their own master weights."""
        moments = [f"{name}.{moment}" for name in self.states for moment in MOMENTS]
        return tuple(moments if self.dtype == torch.float32 else [_MASTER, *moments])

    @in_own_layout
    def sharded_tensors(self, kind: str, loading: bool) -> dict[str, Sharded]:
        """One entry a parameter, for Megatron's distributed checkpoint; free of the layout, and of `distributed`.

        A collective. When saving, copies in host memory, on the first data-parallel rank alone; when loading, every
        rank gets tensors to be filled. Of the distributed optimizer these are full, in host memory.
        """
        self._check_here()
        return shard_tensors(self.model, self._parameters(kind), partial(self._pick, kind), kind, loading)

    @in_own_layout
    def load_tensors(self, kind: str, tensors: Mapping[str, torch.Tensor]) -> None:
        """Take over what a checkpoint has put into `sharded_tensors(kind, loading=True)`."""
        receive_tensors(self._parameters(kind), partial(self._pick, kind), tensors)

    def _parameters(self, kind: str) -> list[Stepped]:
        """An fp32 parameter of a bf16 model (the value head) is its own master weight, saved with the model."""
        named = named_parameters(self.model).items()
        kept = {name: p for name, p in named if kind != _MASTER or p.dtype != torch.float32}
        # Which of its two Megatron gives a parameter to; with one, there are no parameters of the second kind.
        shared = {name: p for name, p in kept.items() if getattr(p, "allreduce", True)}
        experts = {name: p for name, p in kept.items() if name not in shared}
        return list(zip(self._parts, (shared, experts)))

    def _pick(self, kind: str, master: torch.Tensor) -> torch.Tensor:
        if kind == _MASTER:
            return master
        name, moment = kind.rsplit(".", 1)
        return self.states[name].moments[master][moment]

    def state_dict(self) -> dict[str, Any]:
        """Step counts and learning rates by name, as JSON scalars."""
        return {name: state.state_dict() for name, state in self.states.items()}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        for name, state in self.states.items():
            state.load_state_dict(saved[name], self._parts)


class Optimizer:
    """Steps with one Adam state of a `SharedWeightsOptimizer`. What a checkpoint takes of it is the whole of that."""

    def __init__(self, shared: SharedWeightsOptimizer, name: str):
        self.shared = shared
        self.name = name
        self._state = shared.states[name]

    @property
    def lr(self) -> float:
        return self._state.lr

    def set_lr(self, lr: float) -> None:
        """Takes effect at the next step, and is part of a checkpoint."""
        self._state.lr = lr

    @property
    def num_steps(self) -> int:
        return self._state.num_steps

    def zero_grad(self) -> None:
        self.shared.zero_grad()

    def step(self) -> StepResult:
        return self.shared.step(self.name)

    @property
    def kinds(self) -> tuple[str, ...]:
        return self.shared.kinds

    def sharded_tensors(self, kind: str, loading: bool) -> dict[str, Sharded]:
        return self.shared.sharded_tensors(kind, loading)

    def load_tensors(self, kind: str, tensors: Mapping[str, torch.Tensor]) -> None:
        self.shared.load_tensors(kind, tensors)

    def state_dict(self) -> dict[str, Any]:
        return self.shared.state_dict()

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        self.shared.load_state_dict(saved)


def build_optimizer(ddp_model: torch.nn.Module, config: OptimizerConfig, dtype: torch.dtype) -> Optimizer:
    """AdamW over a model that nothing else trains. `dtype` is the model's: bfloat16 gets fp32 master weights.

    Raises ValueError if the model was wrapped for the other kind of optimizer (plain or distributed).
    """
    return SharedWeightsOptimizer(ddp_model, {"adam": config}, dtype).for_role("adam")


def _counted_once(part: MegatronOptimizer) -> list[torch.Tensor]:
    """This rank's fp32 weights, less those another rank counts: copies over tensor ranks, the tied embedding's."""
    return [
        parameter
        for parameter in part.get_parameters()
        if param_is_not_shared(parameter) and param_is_not_tensor_parallel_duplicate(parameter, part.tp_group)
    ]


def _build_megatron(ddp_model: torch.nn.Module, config: OptimizerConfig, dtype: torch.dtype) -> list[MegatronOptimizer]:
    """Megatron's own: one, and if experts are shared out over ranks a second for them, which have other copies."""
    if dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"dtype: found {dtype}, accepted: torch.float32, torch.bfloat16")
    megatron_config = MegatronOptimizerConfig(
        optimizer="adam",
        lr=config.lr,
        min_lr=config.lr,
        weight_decay=config.weight_decay,
        bf16=dtype == torch.bfloat16,
        params_dtype=dtype,
        use_distributed_optimizer=config.distributed,
        overlap_param_gather=ddp_model.ddp_config.overlap_param_gather,
    )
    chunks = chunks_of(ddp_model)
    return get_megatron_optimizer(megatron_config, chunks, use_gloo_process_groups=False).chained_optimizers
