"""Bytes of the colocated engine on a GPU: its weights, and how many tokens of keys and values fit beside them.

vLLM may use `engine.gpu_memory_utilization` of a card. Of that it takes the weights, sets aside what a profiling step
of its own needs, and divides the rest into blocks of `engine.block_size` tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from transformers import PretrainedConfig

from megatron_ac2.architecture import sparse_layers
from megatron_ac2.config import EngineConfig
from megatron_ac2.model.families import family_of
from megatron_ac2.model.hf_table import head_dim

_VOCAB_MULTIPLE = 64  # vLLM pads the vocabulary's matrices to it, and to the tensor degree
_FP32 = 4
BATCHED_TOKENS = 16_384  # of one engine step, vLLM's default on large cards for offline use


@dataclass(frozen=True, slots=True)
class EngineMemory:
    weights: int
    workspace: int  # an estimate of what vLLM's profiling finds
    block_bytes: int
    block_size: int  # tokens

    @classmethod
    def of(cls, hf_config: PretrainedConfig, engine: EngineConfig, dtype: torch.dtype) -> EngineMemory:
        return cls(
            engine_weights(hf_config, engine.tensor_parallel, dtype),
            _workspace(hf_config, engine, dtype),
            block_bytes(hf_config, engine.tensor_parallel, engine.block_size, dtype),
            engine.block_size,
        )

    def cached_tokens(self, budget: int) -> int:
        """How many tokens' keys and values fit, of `budget` bytes that the engine may use in all."""
        return max(0, budget - self.weights - self.workspace) // self.block_bytes * self.block_size


def block_bytes(hf_config: PretrainedConfig, tensor: int, block_size: int, dtype: torch.dtype) -> int:
    """2 x layers x key-value heads of this rank x head size x bytes of a number, for each token of a block.

    With more ranks than key-value heads each rank still holds one head.
    """
    heads = max(1, hf_config.num_key_value_heads // tensor)
    return 2 * hf_config.num_hidden_layers * heads * head_dim(hf_config) * dtype.itemsize * block_size


def engine_weights(hf_config: PretrainedConfig, tensor: int, dtype: torch.dtype) -> int:
    """Of one of the engine's tensor-parallel ranks."""
    size, hidden = head_dim(hf_config), hf_config.hidden_size
    query = hf_config.num_attention_heads // tensor * size
    key_value = 2 * max(1, hf_config.num_key_value_heads // tensor) * size
    fields = family_of(hf_config).megatron_fields
    norms = 2 * hidden + (2 * size if fields["qk_layernorm"] else 0)
    biases = query + key_value if fields["add_qkv_bias"] else 0
    attention = hidden * (2 * query + key_value)
    feed_forward = sum(_feed_forward(hf_config, tensor, sparse) for sparse in sparse_layers(hf_config))
    multiple = math.lcm(_VOCAB_MULTIPLE, tensor)
    rows = math.ceil(hf_config.vocab_size / multiple) * multiple // tensor
    vocab = rows * hidden * (1 if hf_config.tie_word_embeddings else 2)
    layers = hf_config.num_hidden_layers * (attention + norms + biases) + feed_forward
    return (layers + vocab + hidden) * dtype.itemsize


def _feed_forward(hf_config: PretrainedConfig, tensor: int, sparse: bool) -> int:
    """Numbers of one layer on a rank. Experts are all on each rank, cut like a dense layer; the router is whole."""
    if not sparse:
        return hf_config.hidden_size * 3 * hf_config.intermediate_size // tensor
    expert = hf_config.hidden_size * 3 * hf_config.moe_intermediate_size // tensor
    return hf_config.num_experts * (expert + hf_config.hidden_size)


def _workspace(hf_config: PretrainedConfig, engine: EngineConfig, dtype: torch.dtype) -> int:
    """A prefill step's widest tensors, and fp32 logits with their log-softmax for every sequence."""
    tokens = int(engine.options.get("max_num_batched_tokens") or BATCHED_TOKENS)
    width = 2 * hf_config.hidden_size + 3 * hf_config.intermediate_size // engine.tensor_parallel
    if any(sparse_layers(hf_config)):  # each chosen expert reads a copy of the token
        expert = 2 * hf_config.hidden_size + 3 * hf_config.moe_intermediate_size // engine.tensor_parallel
        width = max(width, hf_config.num_experts_per_tok * expert)
    return tokens * width * dtype.itemsize + 2 * engine.max_num_seqs * hf_config.vocab_size * _FP32
