"""Hugging Face config -> TransformerConfig -> this rank's GPTModel."""

from __future__ import annotations

import dataclasses
import math
import os
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig
from transformers import PretrainedConfig

from megatron_ac2.architecture import sparse_layers
from megatron_ac2.config_training import Fp8Config, ParallelConfig
from megatron_ac2.model import fp8 as fp8_training
from megatron_ac2.model.chunks import joined
from megatron_ac2.model.experts import expert_fields, expert_problems, layout_problems, refused_fields
from megatron_ac2.model.families import family_of, refusals
from megatron_ac2.model.hf_fields import head_problems, read_config
from megatron_ac2.model.hf_groups import group_problems
from megatron_ac2.model.hf_table import head_dim
from megatron_ac2.model.hidden_head import HiddenModel
from megatron_ac2.model.layer_spec import layer_spec
from megatron_ac2.model.pipeline import p2p_fields, p2p_problems, pipeline_fields, stage_problems
from megatron_ac2.model.rope import rope_arguments, rope_problems
from megatron_ac2.model.value_head import ValueModel
from megatron_ac2.parallel.active import active
from megatron_ac2.parallel.topology import Topology
from megatron_ac2.types import UserError

_VOCAB_MULTIPLE = 128  # the same padding for every usual tensor degree, so that checkpoints reshard

_CPU_FIELDS: dict[str, Any] = {
    "use_cpu_initialization": True,
    "gradient_accumulation_fusion": False,
    "masked_softmax_fusion": False,
    "bias_activation_fusion": False,
    "bias_dropout_fusion": False,
    "apply_rope_fusion": False,
    "persist_layer_norm": False,
    "batch_p2p_sync": False,
    "deallocate_pipeline_outputs": False,
}

# Other ways to share a sequence, of which packed batches know nothing.
_CONTEXT_FIELDS: dict[str, tuple[Any, ...]] = {
    "cp_comm_type": (None, "p2p"),
    "hierarchical_context_parallel_sizes": (None,),
    "hybrid_context_parallel": (False,),
}


def load_hf_config(path: str | Path) -> PretrainedConfig:
    """The folder's config.json. Raises `UserError` if there is none or it asks for what no family implements."""
    folder, file = Path(path), Path(path) / "config.json"
    if not os.path.isdir(folder):
        raise UserError(f"model.path: found {str(path)!r}, which is not a folder; give a local Hugging Face folder")
    if not os.path.isfile(file):
        raise UserError(f"model.path: no config.json in {folder}; give a Hugging Face folder")
    hf_config = read_config(folder)
    try:
        family = family_of(hf_config)
        problems = refusals(family, hf_config) + rope_problems(hf_config) + head_problems(hf_config)
        problems += expert_problems(hf_config) if family.expert_rules else []
    except UserError as error:
        problems = error.problems
    if problems:
        raise UserError([f"{file}: {problem}" for problem in problems])
    return hf_config


def padded_vocab_size(hf_config: PretrainedConfig, tensor: int) -> int:
    """Rows of the embedding and output matrices: the vocabulary rounded up so that every tensor rank gets as many.

    The rows added hold zeros and are never sampled nor trained: a log-prob masks columns >= hf_config.vocab_size.
    """
    multiple = math.lcm(_VOCAB_MULTIPLE, tensor)
    return math.ceil(hf_config.vocab_size / multiple) * multiple


def check_layout(hf_config: PretrainedConfig, parallel: ParallelConfig) -> list[str]:
    """Every way in which the model cannot be cut into `parallel`, as messages; empty if it can."""
    counts = {"attention heads": hf_config.num_attention_heads}
    if not all(sparse_layers(hf_config)):
        counts["feed-forward channels"] = hf_config.intermediate_size
    problems = [
        f"parallel.tensor: found {parallel.tensor}, model has {count} {name}; accepted: divisors of {count}"
        for name, count in counts.items()
        if parallel.tensor < 1 or count % parallel.tensor
    ]
    problems += group_problems(hf_config, parallel) + stage_problems(hf_config, parallel)
    if parallel.sequence and parallel.tensor == 1:
        problems.append("parallel.sequence: found true with parallel.tensor 1; sequence parallel needs tensor > 1")
    return problems + layout_problems(hf_config, parallel)


def transformer_config(
    hf_config: PretrainedConfig,
    parallel: ParallelConfig,
    dtype: torch.dtype,
    extra: dict[str, Any] | None = None,
    fp8: Fp8Config | None = None,
) -> TransformerConfig:
    """Megatron's config of the model. `extra` holds further TransformerConfig fields (the `megatron` section).

    Raises `UserError` for fields in `extra` that are unknown, derived from elsewhere, or impossible here, and for an
    FP8 recipe that this platform or the model's shapes do not take.
    """
    fp8 = fp8 or Fp8Config()
    extra = dict(extra or {})
    problems = config_problems(hf_config, parallel, extra, fp8)
    if problems:
        raise UserError(problems)
    derived = {**_derived_fields(hf_config, parallel, dtype), **fp8_training.megatron_fields(fp8)}
    platform = p2p_fields(parallel) | ({} if torch.cuda.is_available() else _CPU_FIELDS)
    try:
        return TransformerConfig(**{**platform, **extra, **derived})
    except (ValueError, AssertionError, TypeError) as error:
        raise UserError(f"megatron: TransformerConfig refuses {extra}: {error}") from error


def config_problems(
    hf_config: PretrainedConfig, parallel: ParallelConfig, extra: dict[str, Any], fp8: Fp8Config
) -> list[str]:
    """What is wrong with the sections `megatron` (`extra`) and `fp8` for this model, here, as messages."""
    derived = _derived_fields(hf_config, parallel, torch.float32)
    problems = _extra_errors(extra, derived) + refused_fields(extra) + p2p_problems(extra, parallel)
    return problems + fp8_training.fp8_problems(fp8, hf_config, parallel, extra)


def _derived_fields(hf_config: PretrainedConfig, parallel: ParallelConfig, dtype: torch.dtype) -> dict[str, Any]:
    return {
        "num_layers": hf_config.num_hidden_layers,
        "hidden_size": hf_config.hidden_size,
        "ffn_hidden_size": hf_config.intermediate_size,
        "num_attention_heads": hf_config.num_attention_heads,
        "num_query_groups": hf_config.num_key_value_heads,
        "kv_channels": head_dim(hf_config),
        "normalization": "RMSNorm",
        "layernorm_epsilon": hf_config.rms_norm_eps,
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "add_bias_linear": False,
        **family_of(hf_config).megatron_fields,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "attention_softmax_in_fp32": True,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        "tensor_model_parallel_size": parallel.tensor,
        **pipeline_fields(parallel),
        "sequence_parallel": parallel.sequence,
        "context_parallel_size": parallel.context,
        **expert_fields(hf_config, parallel, grouped=torch.cuda.is_available()),
        "calculate_per_token_loss": True,
        "variable_seq_lengths": True,
        "moe_token_dispatcher_type": "alltoall",  # variable_seq_lengths asks for it, of dense models too
    }


def _extra_errors(extra: dict[str, Any], derived: dict[str, Any]) -> list[str]:
    known = {field.name for field in dataclasses.fields(TransformerConfig)}
    problems = []
    for name, value in extra.items():
        if name not in known:
            problems.append(f"megatron.{name}: found {value!r}; TransformerConfig has no such field")
        elif name in derived:
            problems.append(f"megatron.{name}: found {value!r}; it follows from the model and the parallel section")
        elif name in _CONTEXT_FIELDS and value not in _CONTEXT_FIELDS[name]:
            accepted = ", ".join(map(repr, _CONTEXT_FIELDS[name]))
            problems.append(f"megatron.{name}: found {value!r}; sequences are cut for a ring, accepted: {accepted}")
        elif name in fp8_training.OWNED_FIELDS:
            problems.append(f"megatron.{name}: found {value!r}; it follows from the section fp8: set fp8.recipe")
        elif name.startswith(("fp8", "fp4")) and value:
            problems.append(f"megatron.{name}: found {value!r}; not supported, accepted: null or false")
    return problems


def build_model(
    hf_config: PretrainedConfig,
    topology: Topology,
    parallel: ParallelConfig,
    dtype: torch.dtype,
    head: Literal["lm", "hidden", "value"] = "lm",
    extra: dict[str, Any] | None = None,
    seed: int = 0,
    value_outputs: int = 1,
    fp8: Fp8Config | None = None,
) -> torch.nn.Module:
    """This rank's stage and shard, freshly initialised: a GPTModel, or with a virtual pipeline ModelChunks of several.

    On the last stage it returns logits [B, S, V / tensor] ("lm"), hidden states [B, S, H] for a loss that is fused with
    the output layer ("hidden", the same weights as "lm"), or value logits fp32 [B, S, value_outputs] ("value";
    model.value_head.HEAD_OUTPUTS has what critic.head needs).

    Raises `UserError` if the layout does not fit the model, or on CUDA without Transformer Engine.
    """
    problems = check_layout(hf_config, parallel)
    if problems:
        raise UserError(problems)
    config = transformer_config(hf_config, parallel, dtype, extra, fp8)
    arguments: dict[str, Any] = {
        "vocab_size": padded_vocab_size(hf_config, topology.tensor),
        "max_sequence_length": hf_config.max_position_embeddings,
        "share_embeddings_and_output_weights": bool(hf_config.tie_word_embeddings),
        "position_embedding_type": "rope",
        **rope_arguments(hf_config),
        "parallel_output": True,
        "pg_collection": topology.pg,
    }
    if head == "value":
        arguments |= {"device": topology.device, "head_seed": seed, "num_outputs": value_outputs}
    kind = {"lm": GPTModel, "hidden": HiddenModel, "value": ValueModel}[head]
    virtual = parallel.virtual_pipeline
    devices = [] if topology.on_cpu else [topology.device]
    with active(topology.pg), torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        return joined([
            kind(
                config, layer_spec(config, topology, fp8 or Fp8Config(), vp_stage), vp_stage=vp_stage,
                pre_process=topology.is_first_stage and not vp_stage,
                post_process=topology.is_last_stage and vp_stage in (None, (virtual or 0) - 1),
                **arguments,
            )
            for vp_stage in (range(virtual) if virtual else (None,))
        ])  # fmt: skip
