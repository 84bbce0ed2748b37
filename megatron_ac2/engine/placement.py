"""Where the engine keeps each Hugging Face tensor: one table by vLLM layer class, and how to read a layer back.

vLLM fuses q/k/v and gate/up, shards over its tensor-parallel ranks, and on CPU repacks a linear's weight into a layout
of its own and drops the original. Such a layer is asked for the rows of its weight by multiplying it with unit vectors,
exactly what it will multiply activations with. Written against vLLM 0.32.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    LinearBase,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

from megatron_ac2.engine.experts import read_experts

_ALL = slice(None)
_EXPERTS = ("w13_weight", "w2_weight")  # gate and up projections one after the other, and the down projections
_UNIT_VECTORS = 1024  # a block of [1024, output] activations at a time


@dataclass(frozen=True, slots=True)
class Placement:
    """`hf_name`[rows, columns] lies in rows `local_rows` of the layer's `parameter`, "weight" or "bias"; of experts, in
    the rows of all of them one after another."""

    hf_name: str
    local_rows: slice
    rows: slice
    columns: slice
    parameter: str = "weight"


def placements(model: nn.Module) -> dict[str, tuple[nn.Module, list[Placement]]]:
    """Engine layer name -> the layer and what it holds. Raises RuntimeError for a parameter that the table lacks."""
    table = {}
    for name, layer in model.named_modules():
        parameters = dict(layer.named_parameters(recurse=False))
        if not parameters:
            continue
        known = {"weight", "bias"} if "bias" in parameters and isinstance(layer, QKVParallelLinear) else {"weight"}
        known = set(_EXPERTS) if isinstance(layer, RoutedExperts) else known
        if set(parameters) != known:
            raise RuntimeError(f"engine layer {name} ({type(layer).__name__}) has parameters {sorted(parameters)}; "
                               "only plain weights, experts' and a bias of q, k and v can be verified: "
                               "set engine.verify_weights=false")  # fmt: skip
        table[name] = (layer, _placements_of(model, name, layer))
    return table


def _placements_of(model: nn.Module, name: str, layer: nn.Module) -> list[Placement]:
    match layer:
        case QKVParallelLinear():
            return _qkv(name, layer)
        case MergedColumnParallelLinear():
            parts = model.packed_modules_mapping[name.rpartition(".")[2]]
            sizes = [size // layer.tp_size for size in layer.output_sizes]
            return _stacked(name, parts, sizes, [layer.tp_rank] * len(parts))
        case ColumnParallelLinear():
            return _stacked(name, [name.rpartition(".")[2]], [layer.output_size_per_partition], [layer.tp_rank])
        case RowParallelLinear():
            width = layer.input_size_per_partition
            columns = slice(layer.tp_rank * width, (layer.tp_rank + 1) * width)
            return [Placement(f"{name}.weight", _ALL, _ALL, columns)]
        case VocabParallelEmbedding():  # ParallelLMHead is one too
            start, end = layer.shard_indices.org_vocab_start_index, layer.shard_indices.org_vocab_end_index
            return [Placement(_vocab_name(model, name, layer), slice(0, end - start), slice(start, end), _ALL)]
        case RMSNorm() | ReplicatedLinear():  # the latter routes tokens to experts
            return [Placement(f"{name}.weight", _ALL, _ALL, _ALL)]
        case RoutedExperts():
            return _experts(name, layer)
    raise RuntimeError(f"engine layer {name}: class {type(layer).__name__} is not in the placement table; "
                       "set engine.verify_weights=false")  # fmt: skip


def _qkv(name: str, layer: QKVParallelLinear) -> list[Placement]:
    head = layer.head_size
    kv_rank = layer.tp_rank // layer.num_kv_head_replicas
    sizes = [layer.num_heads * head, layer.num_kv_heads * head, layer.num_kv_heads * layer.v_head_size]
    held = ["weight"] if layer.bias is None else ["weight", "bias"]
    parts, ranks = ["q_proj", "k_proj", "v_proj"], [layer.tp_rank, kv_rank, kv_rank]
    return [part for parameter in held for part in _stacked(name, parts, sizes, ranks, parameter)]


def _stacked(
    name: str, parts: list[str], sizes: list[int], ranks: list[int], parameter: str = "weight"
) -> list[Placement]:
    """Parts lie one after another; this rank holds the `ranks[i]`-th shard, of `sizes[i]` rows, of part i."""
    parent = name.rpartition(".")[0]
    found, at = [], 0
    for part, size, rank in zip(parts, sizes, ranks, strict=True):
        hf_name = f"{parent}.{part}.{parameter}" if parent else f"{part}.{parameter}"
        rows = slice(rank * size, (rank + 1) * size)
        found.append(Placement(hf_name, slice(at, at + size), rows, _ALL, parameter))
        at += size
    return found


def _experts(name: str, layer: RoutedExperts) -> list[Placement]:
    if layer.local_num_experts != layer.global_num_experts:
        raise RuntimeError(f"engine layer {name}: holds {layer.local_num_experts} of {layer.global_num_experts} "
                           "experts, and only whole sets can be verified: set engine.verify_weights=false")  # fmt: skip
    width, rank = layer.moe_config.intermediate_size_per_partition, layer.moe_config.tp_rank
    mine, hidden, padded = slice(rank * width, (rank + 1) * width), layer.hidden_size, layer.w13_weight.shape[1] // 2
    parent, found = name.rpartition(".")[0], []
    for expert in range(layer.global_num_experts):
        for index, part in enumerate(("gate_proj", "up_proj")):
            at = (2 * expert + index) * padded
            rows = slice(at, at + width)
            found.append(Placement(f"{parent}.{expert}.{part}.weight", rows, mine, _ALL, _EXPERTS[0]))
        rows = slice(expert * hidden, (expert + 1) * hidden)
        found.append(Placement(f"{parent}.{expert}.down_proj.weight", rows, _ALL, mine, _EXPERTS[1]))
    return found


def _vocab_name(model: nn.Module, name: str, layer: nn.Module) -> str:
    """A tied output layer holds the embedding's tensor."""
    tied = isinstance(layer, ParallelLMHead) and model.config.tie_word_embeddings
    return "model.embed_tokens.weight" if tied else f"{name}.weight"


def read_parameter(layer: nn.Module, parameter: str) -> Iterator[tuple[int, torch.Tensor]]:
    """(first column, [rows, columns] or [rows]) blocks of what the layer computes with, exactly."""
    if parameter == "bias":
        yield 0, layer.bias.to(layer.params_dtype)  # vLLM widens the bias of a small bf16 layer to fp32
        return
    if parameter in _EXPERTS:
        yield 0, read_experts(layer, parameter).flatten(0, 1)
        return
    packed = hasattr(layer, "cpu_linear") and isinstance(layer, LinearBase | ParallelLMHead)
    if not packed:
        yield 0, layer.weight
        return
    sizes = ("input_size_per_partition", "embedding_dim", "input_size")
    width = next(getattr(layer, size) for size in sizes if getattr(layer, size, None))
    for start in range(0, width, _UNIT_VECTORS):
        size = min(_UNIT_VECTORS, width - start)
        units = torch.zeros(size, width, dtype=layer.weight.dtype)
        units[torch.arange(size), torch.arange(start, start + size)] = 1.0
        yield start, layer.cpu_linear(units, layer.weight, None).t()
