"""The bytes of real models, buffers, optimizers and saved tensors against the memory plan's, in one job.

usage: torchrun ... memory_cases.py
"""

from __future__ import annotations

import os
from functools import partial

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from transformers import LlamaConfig, PretrainedConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig

from megatron_ac2.config_training import OptimizerConfig, ParallelConfig
from megatron_ac2.memory.activations import Microbatch, chunk_bytes, ends_terms
from megatron_ac2.memory.shapes import Widths, chunk_parameters, stage_chunks
from megatron_ac2.memory.states import States, model_states, weight_bytes
from megatron_ac2.model.build import build_model, check_layout
from megatron_ac2.model.chunks import chunks_of, gpt_models
from megatron_ac2.model.data_parallel import wrap_ddp
from megatron_ac2.model.experts import expert_tensor_degree, is_sparse
from megatron_ac2.model.value_head import HEAD_OUTPUTS
from megatron_ac2.parallel.topology import Topology, init_topology
from megatron_ac2.training.optimizer import SharedWeightsOptimizer
from tests.distributed.groups import run_cases

# Widths that are no multiple of 64: Megatron's padding is at work in every buffer.
_SIZES = dict(
    vocab_size=250, hidden_size=48, intermediate_size=72, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=512,
    rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
)  # fmt: skip
FAMILIES = {
    "qwen3": (Qwen3Config, {"head_dim": 24, "architectures": ["Qwen3ForCausalLM"]}),
    "qwen2": (Qwen2Config, {"architectures": ["Qwen2ForCausalLM"]}),
    "experts": (
        Qwen3MoeConfig,
        {
            "head_dim": 24,
            "architectures": ["Qwen3MoeForCausalLM"],
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 40,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [1],
        },
    ),
    "llama": (LlamaConfig, {"architectures": ["LlamaForCausalLM"], "head_dim": 32}),
}
LAYOUTS = {
    1: [ParallelConfig()],
    2: [
        ParallelConfig(),
        ParallelConfig(tensor=2),
        ParallelConfig(tensor=2, sequence=True),
        ParallelConfig(pipeline=2),
        ParallelConfig(pipeline=2, virtual_pipeline=2),
        ParallelConfig(expert=2),
        ParallelConfig(context=2),
    ],
}
RECOMPUTE = (
    {},
    {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1},
)
LENGTHS = (20, 28)


def hf_config(family: str, tied: bool) -> PretrainedConfig:
    kind, fields = FAMILIES[family]
    return kind(**_SIZES, **fields, tie_word_embeddings=tied)


def check_states(
    config: PretrainedConfig, topology: Topology, parallel: ParallelConfig, dtype: torch.dtype, distributed: bool,
    value_head: str | None,
) -> None:  # fmt: skip
    """Names, shapes and every byte of weights, gradient buffers, master weights and two sets of moments."""
    outputs = HEAD_OUTPUTS[value_head] if value_head else 1
    model = build_model(config, topology, parallel, dtype, "value" if value_head else "lm", value_outputs=outputs)
    chunks = stage_chunks(config, parallel, topology.pipeline_rank)
    parameters = [chunk_parameters(config, parallel, dtype, chunk, value_head) for chunk in chunks]
    found = [(name, tuple(p.shape), p.dtype) for gpt in gpt_models(model) for name, p in gpt.named_parameters()]
    assert found == [(p.name, p.shape, p.dtype) for chunk in parameters for p in chunk], found
    assert sum(map(weight_bytes, parameters)) == num_bytes(model.parameters())
    roles = {name: OptimizerConfig(distributed=distributed) for name in ("actor", "critic")}
    ddp = wrap_ddp(model, distributed)
    optimizer = SharedWeightsOptimizer(ddp, roles, dtype)
    num_ranks = topology.world_size // topology.pipeline
    expert_ranks = parallel.expert * expert_tensor_degree(parallel)
    planned = model_states(parameters, num_ranks, distributed, parallel.tensor, expert_ranks)[topology.rank % num_ranks]
    assert counted(ddp, optimizer, distributed) == planned, (counted(ddp, optimizer, distributed), planned)


def counted(ddp: torch.nn.Module, optimizer: SharedWeightsOptimizer, distributed: bool) -> States:
    buffers = [buffer for chunk in chunks_of(ddp) for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)]
    weights = num_bytes(b.param_data for b in buffers) if distributed else num_bytes(ddp.parameters())
    masters = [p for part in optimizer._parts for p in part.get_parameters() if not _is_models_own(p, ddp)]
    moments = [num_bytes(value for state in adam.moments.values() for name, value in state.items() if name != "step")
               for adam in optimizer.states.values()]  # fmt: skip
    assert moments[0] == moments[1]
    return States(weights, num_bytes(b.grad_data for b in buffers), num_bytes(masters), moments[0])


def _is_models_own(parameter: torch.Tensor, ddp: torch.nn.Module) -> bool:
    """Not a copy: an fp32 weight, or a range of one."""
    storages = {p.untyped_storage().data_ptr() for p in ddp.parameters()}
    return parameter.numel() == 0 or parameter.untyped_storage().data_ptr() in storages


def num_bytes(tensors) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def check_activations(
    config: PretrainedConfig, topology: Topology, parallel: ParallelConfig, dtype: torch.dtype, extra: dict
) -> None:
    """Every storage that a forward pass of two packed sequences saves for the backward pass, parameters left out."""
    model = build_model(config, topology, parallel, dtype, "hidden", extra)
    saved: dict[int, tuple[int, torch.Tensor]] = {}
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            saved[storage.data_ptr()] = (storage.nbytes(), tensor)  # kept alive: no address is used twice
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        forward(model, config, topology, parallel, dtype)
    found = sum(size for size, _ in saved.values())
    chunk = stage_chunks(config, parallel, topology.pipeline_rank)[0]
    widths = Widths.of(config, parallel)
    batch = Microbatch(sum(LENGTHS), dtype.itemsize, parallel.tensor if parallel.sequence else 1, max(LENGTHS))
    layers, _ = chunk_bytes(chunk, widths, batch, "torch", extra)
    ends = ends_terms(chunk, widths, batch, "torch", 0, parallel.tensor > 1, "fused", 0)
    planned = layers + sum(size for name, size in ends.items() if not name.startswith("loss"))
    assert found == planned, f"{found} bytes saved, {planned} planned: {layers} in layers, {ends}"


def forward(
    model: torch.nn.Module, config: PretrainedConfig, topology: Topology, parallel: ParallelConfig, dtype: torch.dtype
) -> torch.Tensor:
    tokens = sum(LENGTHS)
    bounds = torch.tensor([0, *LENGTHS], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    ids = torch.arange(tokens)[None] % config.vocab_size
    positions = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    if not topology.is_first_stage:
        local = tokens // (parallel.tensor if parallel.sequence else 1)
        model.set_input_tensor(torch.randn(local, 1, config.hidden_size, dtype=dtype, requires_grad=True))
    longest = max(LENGTHS)
    packed = PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=bounds, cu_seqlens_kv=bounds, max_seqlen_q=longest, max_seqlen_kv=longest
    )
    return model(ids, positions, None, packed_seq_params=packed)


def run_layout(parallel: ParallelConfig) -> None:
    topology = init_topology(parallel, seed=0, timeout_minutes=2)
    for family in FAMILIES:
        sparse = is_sparse(hf_config(family, True))
        if check_layout(hf_config(family, True), parallel):
            assert sparse != (parallel.expert > 1)  # the two that do not go together
            continue
        for dtype in (torch.float32, torch.bfloat16):
            for distributed in (True, False):
                check_states(hf_config(family, True), topology, parallel, dtype, distributed, None)
            check_states(hf_config(family, False), topology, parallel, dtype, True, None)
            check_states(hf_config(family, True), topology, parallel, dtype, True, "two_hot")
            # Of one chunk; with shared experts the router's choice decides; context ranks gather keys here on CPU.
            counted_here = parallel.expert == parallel.context == 1 and not parallel.virtual_pipeline
            for extra in RECOMPUTE if counted_here else ():
                check_activations(hf_config(family, False), topology, parallel, dtype, extra)


def main() -> None:
    layouts = LAYOUTS[int(os.environ["WORLD_SIZE"])]
    run_cases({str(parallel): partial(run_layout, parallel) for parallel in layouts})


if __name__ == "__main__":
    main()
