"""The memory plan of a configuration: what is resident on a GPU of each pipeline stage, and what each phase adds.

Weights, gradients and optimizer states are counted to the byte, activations by the lists of activations.py. What cannot
be known from here is an estimate or an assumption, and says so.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import torch
from transformers import PretrainedConfig

from megatron_ac2.config import Config, critic_kind, critic_parallel
from megatron_ac2.config_training import OptimizerConfig, ParallelConfig
from megatron_ac2.memory import activations
from megatron_ac2.memory.activations import Microbatch, Modules
from megatron_ac2.memory.engine import EngineMemory
from megatron_ac2.memory.result import Item, MemoryPlan, Stage
from megatron_ac2.memory.shapes import Parameter, Widths, chunk_parameters, stage_chunks
from megatron_ac2.memory.states import States, model_states, weight_bytes
from megatron_ac2.model.build import padded_vocab_size
from megatron_ac2.model.experts import expert_tensor_degree, is_sparse
from megatron_ac2.perf import GIB

RESERVE = 3 * GIB  # CUDA context, NCCL buffers, CUDA graphs, fragmentation
_TILE_BYTES = 1 << 30  # of the fused loss on a GPU
_ALIGNMENT = 16  # tokens, for each tensor rank


@dataclass(frozen=True, slots=True)
class _Model:
    """A trained model and how it is cut."""

    name: str
    hf_config: PretrainedConfig
    parallel: ParallelConfig
    value_head: str | None
    optimizer: OptimizerConfig
    adams: tuple[str, ...]  # names of its Adam states


def plan_memory(
    config: Config,
    hf_config: PretrainedConfig,
    critic_hf_config: PretrainedConfig | None,
    num_gpus: int,
    modules: Modules = "transformer_engine",
) -> MemoryPlan:
    """`critic_hf_config`: of a value head's model, if there is one. The layout must fit (check_layout, check_world)."""
    dtype = getattr(torch, config.model.dtype)
    models = _models(config, hf_config, critic_hf_config)
    stages = tuple(
        Stage(index, tuple(_resident(config, models, index, num_gpus, dtype)),
              _phases(config, models, index, num_gpus, dtype, modules))
        for index in range(max(model.parallel.pipeline for model in models))
    )  # fmt: skip
    engine = EngineMemory.of(hf_config, config.engine, dtype)
    longest = min(_longest(config, critic=False), hf_config.max_position_embeddings)
    utilization, offload = config.engine.gpu_memory_utilization, config.run.offload
    return MemoryPlan(stages, engine, utilization, offload, longest, tuple(_notes(config, models)))


def _models(config: Config, hf_config: PretrainedConfig, critic_hf_config: PretrainedConfig | None) -> list[_Model]:
    adams = ("actor", "critic") if critic_kind(config) == "generative" else ("actor",)
    found = [_Model("actor", hf_config, config.parallel, None, config.actor.optimizer, adams)]
    if critic_hf_config is not None:
        found.append(_Model("critic", critic_hf_config, critic_parallel(config), config.critic.head,
                            config.critic.optimizer, ("critic",)))  # fmt: skip
    return found


def _chunks(model: _Model, stage: int, dtype: torch.dtype) -> list[list[Parameter]]:
    chunks = stage_chunks(model.hf_config, model.parallel, stage)
    return [chunk_parameters(model.hf_config, model.parallel, dtype, chunk, model.value_head) for chunk in chunks]


def _states(model: _Model, stage: int, num_gpus: int, dtype: torch.dtype) -> States:
    """On the fullest data rank. A critic cut into fewer stages than the actor: its own fullest stage."""
    stages = [stage] if stage < model.parallel.pipeline else range(model.parallel.pipeline)
    parallel = model.parallel
    ranks, expert_ranks = num_gpus // parallel.pipeline, parallel.expert * expert_tensor_degree(parallel)
    found = [
        states
        for index in stages
        for states in model_states(
            _chunks(model, index, dtype), ranks, model.optimizer.distributed, parallel.tensor, expert_ranks
        )
    ]
    return max(found, key=lambda states: sum(asdict(states).values()))


def _resident(config: Config, models: list[_Model], stage: int, num_gpus: int, dtype: torch.dtype) -> list[Item]:
    found = []
    for model in models:
        states = _states(model, stage, num_gpus, dtype)
        found += [
            Item(f"{model.name}: weights", states.weights, "counted"),
            Item(f"{model.name}: gradients, fp32", states.gradients, "counted"),
            Item(f"{model.name}: master weights, fp32", states.master, "counted"),
        ]
        found += [Item(f"{name}: Adam moments", states.moments, "counted") for name in model.adams]
    frozen = []
    if config.actor.reference_kl.coefficient:
        frozen.append(("reference model: weights", models[0]))
    if models[-1].value_head is not None and config.critic.fit == "nstep":
        frozen.append(("critic snapshot: weights", models[-1]))
    for name, model in frozen:
        index = min(stage, model.parallel.pipeline - 1)
        found.append(Item(name, sum(map(weight_bytes, _chunks(model, index, dtype))), "counted"))
    found.append(Item("CUDA context, NCCL, graphs", RESERVE, "assumed"))
    return [item for item in found if item.num_bytes]


def _phases(
    config: Config, models: list[_Model], stage: int, num_gpus: int, dtype: torch.dtype, modules: Modules
) -> dict[str, tuple[Item, ...]]:
    actor, critic = models[0], models[-1]
    loss = "naive" if config.actor.loss_op == "naive" else "fused"
    phases = {"actor update": _update(config, actor, stage, dtype, modules, loss, for_critic=False)}
    if len(critic.adams) + len(models) > 2:
        loss = loss if critic.value_head is None else "value"
        phases["critic update"] = _update(config, critic, stage, dtype, modules, loss, for_critic=True)
    numbers = max(_states(model, stage, num_gpus, dtype).moments // 2 for model in models)
    phases["optimizer step"] = (Item("weights before the step, fp32", numbers, "counted"),)
    largest = padded_vocab_size(actor.hf_config, 1) * actor.hf_config.hidden_size * dtype.itemsize
    copies = 1 + (actor.parallel.tensor > 1)  # the gathered pieces, and joined
    phases["reshard"] = (Item("the largest tensor, whole", copies * largest, "derived"),)
    return phases


def _update(
    config: Config, model: _Model, stage: int, dtype: torch.dtype, modules: Modules, loss: str, for_critic: bool
) -> tuple[Item, ...]:
    stage = min(stage, model.parallel.pipeline - 1)
    widths, batch = Widths.of(model.hf_config, model.parallel), _microbatch(config, model, dtype, for_critic)
    rows = padded_vocab_size(model.hf_config, model.parallel.tensor) // model.parallel.tensor
    chunks = stage_chunks(model.hf_config, model.parallel, stage)
    found = (activations.chunk_bytes(chunk, widths, batch, modules, config.megatron) for chunk in chunks)
    kept, rebuilt = map(max, zip(*found, strict=True))
    copies = activations.in_flight(model.parallel, stage)
    name = f"activations: {chunks[0].num_layers} layers"
    items = [
        Item(f"{name} x {copies} in flight" if copies > 1 else name, copies * kept, "derived"),
        Item("activations rebuilt at a time", rebuilt, "derived"),
        Item("a layer's backward pass", activations.working_bytes(widths, batch), "estimated"),
    ]
    if model.parallel.pipeline > 1:
        sent = batch.local_tokens * widths.hidden * batch.itemsize
        items.append(Item("outputs sent on", copies * sent, "derived"))
    for chunk in chunks:
        cut = model.parallel.tensor > 1
        terms = activations.ends_terms(chunk, widths, batch, modules, rows, cut, loss, _TILE_BYTES)
        items += [Item(name, num_bytes, "derived") for name, num_bytes in terms.items()]
    return tuple(item for item in items if item.num_bytes)


def _microbatch(config: Config, model: _Model, dtype: torch.dtype, for_critic: bool) -> Microbatch:
    section = config.critic if for_critic else config.actor
    longest = min(_longest(config, for_critic), model.hf_config.max_position_embeddings)
    tokens = max(section.max_tokens_per_microbatch, longest)  # a longer sequence has a microbatch to itself
    multiple, context = model.parallel.tensor * _ALIGNMENT, model.parallel.context
    local = -(-tokens // (context * multiple)) * multiple
    return Microbatch(local, dtype.itemsize, model.parallel.tensor if model.parallel.sequence else 1, longest)


def _longest(config: Config, critic: bool) -> int:
    """Tokens of the longest sequence, prompt and wording left out: a critic may read a reference as well."""
    if critic and config.critic.max_context_len is not None:
        return config.critic.max_context_len
    budget = config.sampling.response_budget
    return budget * (2 if critic and config.critic.use_references else 1)


def _notes(config: Config, models: list[_Model]) -> list[str]:
    notes = []
    if unknown := activations.unknown_recompute(config.megatron):
        notes.append(f"megatron.recompute_modules: {', '.join(unknown)} counted as if not recomputed")
    if config.fp8.recipe != "none":
        notes.append("fp8: counted as without; its copies of weights come on top, its inputs are smaller")
    for name in ("quantization", "kv_cache_dtype", "cpu_offload_gb"):
        if config.engine.options.get(name):
            notes.append(f"engine.options.{name}: not counted")
    if any(is_sparse(model.hf_config) for model in models):
        notes.append("experts: counted as if chosen equally often; a rank whose experts are chosen more needs more")
    notes.append("prompts are not known here: a microbatch of one long sequence is longer by its prompt")
    return notes
