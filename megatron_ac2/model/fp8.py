"""FP8 training: what a recipe asks of the platform, of lengths and of weights' shapes, and Megatron's fields for it.

Transformer Engine runs it; `fp8.emulate` only rounds as it would (model/fp8_linear.py). Never neither of the two:
Megatron without Transformer Engine takes the same fields and trains unquantised without a word.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Mapping
from typing import Any

import torch
from megatron.core.utils import is_te_min_version
from transformers import PretrainedConfig

from megatron_ac2.config_training import Fp8Config, ParallelConfig
from megatron_ac2.model.experts import expert_tensor_degree, is_sparse, sparse_layers
from megatron_ac2.model.hf_table import head_dim

RECIPES = ("delayed", "tensorwise", "blockwise", "mxfp8")
# TransformerConfig's fields that follow from the section fp8.
OWNED_FIELDS = (
    "fp8", "fp8_recipe", "fp8_margin", "fp8_amax_history_len", "fp8_amax_compute_algo", "first_last_layers_bf16",
    "num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16",
)  # fmt: skip
# Transformer Engine's own answer, and the version from which Megatron takes the recipe (megatron/core/fp8_utils.py).
_SUPPORT: dict[str, tuple[str, str]] = {
    "delayed": ("check_fp8_support", "1.0"),
    "tensorwise": ("check_fp8_support", "2.2.0.dev0"),
    "blockwise": ("check_fp8_block_scaling_support", "2.3.0.dev0"),
    "mxfp8": ("check_mxfp8_support", "2.1.0"),
}
_SUPPORT_MODULES = ("transformer_engine.pytorch.quantization", "transformer_engine.pytorch.fp8")  # since 2.9, before

# Tokens of a rank, which the weight gradient's GEMM contracts, are multiples of it.
# 16: cuBLAS's leading dimension of FP8 operands (Transformer Engine, common/gemm/cublaslt_gemm.cu: "Caller must pad").
# 128: whole blocks; 16 would run, but under sequence parallel Float8BlockQuantizer.is_quantizable then refuses the
# shard, and it is gathered unquantised. 32: whole blocks; other shapes raise (pytorch/csrc/quantizer.cpp, MXFP8).
_TOKEN_MULTIPLE = {"delayed": 16, "tensorwise": 16, "blockwise": 128, "mxfp8": 32}
# Both dims of every rank's weights: each is contracted by one of the three GEMMs. The same sources; 128 not needed.
_WEIGHT_MULTIPLE = {"delayed": 16, "tensorwise": 16, "blockwise": 16, "mxfp8": 32}


def token_multiple(fp8: Fp8Config) -> int:
    """What the number of tokens of a rank must be a multiple of, after any split of the sequence."""
    return 1 if fp8.recipe == "none" else _TOKEN_MULTIPLE[fp8.recipe]


def backward_format(fp8: Fp8Config) -> str:
    """e4m3 | hybrid (gradients in e5m2). `auto` is Transformer Engine's default of the recipe."""
    if fp8.format != "auto":
        return fp8.format
    return "hybrid" if fp8.recipe in ("delayed", "tensorwise") else "e4m3"


def megatron_fields(fp8: Fp8Config) -> dict[str, Any]:
    """TransformerConfig's fields for Transformer Engine; none where nothing is quantised or it is emulated."""
    if fp8.recipe == "none" or fp8.emulate:
        return {}
    kept = max(fp8.keep_first_layers, fp8.keep_last_layers) > 0
    return {
        "fp8": backward_format(fp8),
        "fp8_recipe": fp8.recipe,
        "fp8_margin": fp8.margin,
        "fp8_amax_history_len": fp8.amax_history_len,
        "fp8_amax_compute_algo": fp8.amax_algorithm,
        "first_last_layers_bf16": kept,
        "num_layers_at_start_in_bf16": fp8.keep_first_layers,
        "num_layers_at_end_in_bf16": fp8.keep_last_layers,
    }


def fp8_problems(
    fp8: Fp8Config, hf_config: PretrainedConfig, parallel: ParallelConfig, extra: Mapping[str, Any]
) -> list[str]:
    """Everything that keeps this model in this layout from this recipe here, as messages; empty if nothing does.

    `extra`: the section `megatron`.
    """
    if fp8.recipe == "none":
        return []
    problems = _platform_problems(fp8) + shape_problems(fp8, hf_config, parallel)
    if fp8.emulate and fp8.recipe == "delayed" and extra.get("recompute_granularity") == "full":
        problems.append(
            "megatron.recompute_granularity: found 'full', but under fp8.recipe delayed the second pass would round "
            "with scales that the first one moved; accepted with fp8.emulate: null or selective"
        )
    if fp8.emulate and fp8.recipe == "delayed" and extra.get("tp_only_amax_red"):
        problems.append(
            "megatron.tp_only_amax_red: found True, but the emulation reduces amaxes over data and context ranks too; "
            "accepted with fp8.emulate: null or false"
        )
    if fp8.emulate and fp8.recipe == "delayed" and is_sparse(hf_config):
        problems.append(
            "fp8.recipe: found delayed, but the experts of other ranks may have no tokens to agree on a scale of; "
            "accepted with fp8.emulate and experts: tensorwise, blockwise, mxfp8"
        )
    return problems


def why_unsupported(recipe: str) -> str | None:
    """Why this machine cannot run the recipe, or None if it can. Asks Transformer Engine, which asks the GPU."""
    if not has_transformer_engine():
        return "needs Transformer Engine, and it is not installed here"
    if not torch.cuda.is_available():
        return "needs a GPU, and there is none here"
    name, version = _SUPPORT[recipe]
    if not is_te_min_version(version):
        return f"needs Transformer Engine {version.removesuffix('.dev0')} or newer"
    check = _support_check(name)
    if check is None:
        return f"needs a Transformer Engine that has {name}"
    supported, reason = check()
    return None if supported else reason


def has_transformer_engine() -> bool:
    """Whether Transformer Engine's torch modules are there; its bare meta package, which has none, does not count."""
    if importlib.util.find_spec("transformer_engine") is None:
        return False
    return importlib.util.find_spec("transformer_engine.pytorch") is not None


def _support_check(name: str) -> Callable[[], tuple[bool, str]] | None:
    for module in _SUPPORT_MODULES:
        try:
            check = getattr(importlib.import_module(module), name, None)
        except ImportError:
            continue
        if check is not None:
            return check
    return None


def _platform_problems(fp8: Fp8Config) -> list[str]:
    if fp8.emulate:
        on_cpu = not torch.cuda.is_available()
        return (
            [] if on_cpu else ["fp8.emulate: found true; it runs on CPU (CUDA_VISIBLE_DEVICES=); accepted here: false"]
        )
    reason = why_unsupported(fp8.recipe)
    if reason is None:
        return []
    usable = [recipe for recipe in RECIPES if why_unsupported(recipe) is None]
    accepted = ", ".join(["none", *usable])
    emulation = "" if torch.cuda.is_available() else ", or fp8.emulate true, which rounds as it would"
    return [f"fp8.recipe: found {fp8.recipe}; {reason}; accepted here: {accepted}{emulation}"]


def shape_problems(fp8: Fp8Config, hf_config: PretrainedConfig, parallel: ParallelConfig) -> list[str]:
    """What in the model's shapes does not fit the recipe, as messages."""
    if fp8.recipe == "none":
        return []
    problems, multiple = [], _WEIGHT_MULTIPLE[fp8.recipe]
    if not fp8.emulate:
        problems += [
            f"fp8.recipe: found {fp8.recipe}; a rank's share of {name} is {size // degree}, and its GEMMs take "
            f"multiples of {multiple}"
            for name, size, degree in _weight_dims(hf_config, parallel)
            if degree >= 1 and size % degree == 0 and size // degree % multiple
        ]
    per_stage = hf_config.num_hidden_layers // max(parallel.pipeline, 1)
    problems += [
        f"fp8.{name}: found {found}, a pipeline stage has {per_stage} layers; accepted: up to that"
        for name, found in (("keep_first_layers", fp8.keep_first_layers), ("keep_last_layers", fp8.keep_last_layers))
        if found > per_stage
    ]
    return problems


def _weight_dims(hf_config: PretrainedConfig, parallel: ParallelConfig) -> list[tuple[str, int, int]]:
    """(what it is, its size, over how many ranks it is cut) of every dim of a layer's matrices."""
    queries, groups, tensor = hf_config.num_attention_heads, hf_config.num_key_value_heads, parallel.tensor
    dims = [
        ("the hidden size", hf_config.hidden_size, 1),
        ("the query, key and value channels", (queries + 2 * groups) * head_dim(hf_config), tensor),
        ("the attention output's channels", queries * head_dim(hf_config), tensor),
    ]
    if is_sparse(hf_config):
        dims.append(("an expert's channels", hf_config.moe_intermediate_size, expert_tensor_degree(parallel)))
    if not all(sparse_layers(hf_config)):
        dims.append(("the feed-forward channels", hf_config.intermediate_size, tensor))
    return dims
