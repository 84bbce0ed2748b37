"""The parameters a rank holds, by pipeline stage: names, shapes and order as Megatron builds them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from transformers import PretrainedConfig

from megatron_ac2.architecture import sparse_layers
from megatron_ac2.config_training import ParallelConfig
from megatron_ac2.model.build import padded_vocab_size
from megatron_ac2.model.experts import expert_tensor_degree, is_sparse
from megatron_ac2.model.families import family_of
from megatron_ac2.model.hf_table import head_dim
from megatron_ac2.model.value_head import HEAD_OUTPUTS


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter of this rank's shard. `shared_embedding`: one of two copies, on the first and the last stage.
    `expert`: of an expert, whose copies are on other ranks than those of the rest."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    shared_embedding: bool = False
    expert: bool = False

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Chunk:
    """A run of layers that one model of a pipeline stage holds; `first` has the embedding, `last` the output layer.
    `sparse`: of each layer, whether it has experts."""

    sparse: tuple[bool, ...]
    first: bool
    last: bool

    @property
    def num_layers(self) -> int:
        return len(self.sparse)


@dataclass(frozen=True, slots=True)
class Widths:
    """Sizes of one layer on one tensor rank, in numbers a token."""

    hidden: int
    query: int
    key_value: int  # both
    fused: int  # queries, keys and values that it holds at once: all ranks' where several share a key-value head
    ffn: int
    num_heads: int
    num_groups: int
    head_dim: int
    qk_norm: bool
    num_experts: int = 0  # of a sparse layer, on all ranks
    chosen: int = 0  # experts a token
    expert_ffn: int = 0  # an expert's channels on one of the ranks that it is cut over
    expert_ranks: int = 1  # these
    probs_of_all: bool = False  # the router's softmax is over all experts, not over the chosen

    @classmethod
    def of(cls, hf_config: PretrainedConfig, parallel: ParallelConfig) -> Widths:
        tensor, size = parallel.tensor, head_dim(hf_config)
        experts = {}
        if is_sparse(hf_config):
            degree = expert_tensor_degree(parallel)
            experts = {
                "num_experts": hf_config.num_experts, "chosen": hf_config.num_experts_per_tok,
                "expert_ffn": hf_config.moe_intermediate_size // degree, "expert_ranks": degree,
                "probs_of_all": not hf_config.norm_topk_prob,
            }  # fmt: skip
        heads, groups = hf_config.num_attention_heads // tensor, max(1, hf_config.num_key_value_heads // tensor)
        cut = tensor if tensor <= hf_config.num_key_value_heads else 1
        return cls(
            hidden=hf_config.hidden_size, query=heads * size, key_value=2 * groups * size,
            fused=(hf_config.num_attention_heads + 2 * hf_config.num_key_value_heads) * size // cut,
            ffn=hf_config.intermediate_size // tensor, num_heads=heads, num_groups=groups, head_dim=size,
            qk_norm=bool(family_of(hf_config).megatron_fields["qk_layernorm"]), **experts,
        )  # fmt: skip


def stage_chunks(hf_config: PretrainedConfig, parallel: ParallelConfig, stage: int) -> list[Chunk]:
    """What pipeline rank `stage` holds: one chunk, or with an interleaved pipeline every `pipeline`-th one."""
    interleaved = virtual_pipeline(parallel)
    num_layers = hf_config.num_hidden_layers // (parallel.pipeline * interleaved)
    places, sparse = [stage + turn * parallel.pipeline for turn in range(interleaved)], sparse_layers(hf_config)
    return [
        Chunk(tuple(sparse[place * num_layers : (place + 1) * num_layers]), place == 0,
              place == parallel.pipeline * interleaved - 1)
        for place in places
    ]  # fmt: skip


def virtual_pipeline(parallel: ParallelConfig) -> int:
    """Chunks a pipeline rank holds."""
    return parallel.virtual_pipeline or 1


def chunk_parameters(
    hf_config: PretrainedConfig, parallel: ParallelConfig, dtype: torch.dtype, chunk: Chunk, value_head: str | None
) -> list[Parameter]:
    """In the order of Megatron's `named_parameters`. `value_head`: what critic.head names, None for a language model.

    With Transformer Engine a norm is named and ordered as part of the linear layer after it, and experts' matrices are
    named otherwise; sizes are the same.
    """
    rows = padded_vocab_size(hf_config, parallel.tensor) // parallel.tensor
    vocab = (rows, hf_config.hidden_size)
    tied = bool(hf_config.tie_word_embeddings) and value_head is None
    shared = tied and parallel.pipeline > 1
    shared_out = parallel.expert > 1  # else Megatron treats experts like the rest
    found = []
    if chunk.first:
        found.append(Parameter("embedding.word_embeddings.weight", vocab, dtype, shared))
    for layer, sparse in enumerate(chunk.sparse):
        found += [Parameter(f"decoder.layers.{layer}.{name}", shape, dtype, expert=shared_out and ".experts." in name)
                  for name, shape in _layer_shapes(hf_config, parallel, sparse)]  # fmt: skip
    if chunk.last:
        found.append(Parameter("decoder.final_layernorm.weight", (hf_config.hidden_size,), dtype))
        if value_head is not None:
            head = (HEAD_OUTPUTS[value_head], hf_config.hidden_size)
            found.append(Parameter("output_layer.weight", head, torch.float32))
        elif not (tied and chunk.first):
            found.append(Parameter("output_layer.weight", vocab, dtype, shared))
    return found


def _layer_shapes(
    hf_config: PretrainedConfig, parallel: ParallelConfig, sparse: bool
) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Of those that the model's family has."""
    w = Widths.of(hf_config, parallel)
    qkv = (hf_config.num_attention_heads + 2 * hf_config.num_key_value_heads) * w.head_dim // parallel.tensor
    shapes = {
        "input_layernorm.weight": (w.hidden,),
        "self_attention.linear_proj.weight": (w.hidden, w.query),
        "self_attention.linear_qkv.weight": (qkv, w.hidden),
        "self_attention.linear_qkv.bias": (qkv,),
        "self_attention.q_layernorm.weight": (w.head_dim,),
        "self_attention.k_layernorm.weight": (w.head_dim,),
        "pre_mlp_layernorm.weight": (w.hidden,),
        "mlp.linear_fc1.weight": (2 * w.ffn, w.hidden),
        "mlp.linear_fc2.weight": (w.hidden, w.ffn),
    }
    family = family_of(hf_config)
    names = {rule.megatron for rule in family.layer_rules + (() if sparse else family.dense_rules)}
    if sparse:
        shapes["mlp.router.weight"] = (w.num_experts, w.hidden)
        names.add("mlp.router.weight")
        for expert in range(w.num_experts // parallel.expert):
            matrices = {"linear_fc1": (2 * w.expert_ffn, w.hidden), "linear_fc2": (w.hidden, w.expert_ffn)}
            for name, shape in matrices.items():
                shapes[f"mlp.experts.local_experts.{expert}.{name}.weight"] = shape
        names |= {name for name in shapes if ".experts." in name}
    if unknown := sorted(names - shapes.keys()):
        raise NotImplementedError(f"memory/shapes.py: no shape for {unknown}")
    yield from ((name, shape) for name, shape in shapes.items() if name in names)
