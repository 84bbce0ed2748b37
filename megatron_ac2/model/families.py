"""The model families, as data: a family is its tensors, its fields of TransformerConfig, and what it refuses.

All are decoders with RMSNorm, rotary positions, grouped-query attention and a gated SiLU feed-forward, or experts of
that kind (experts.py). A Megatron parameter is a fusion of one or more Hugging Face (HF) tensors. Each HF tensor is cut
over tensor ranks (an expert's over expert-tensor ranks) into contiguous equal pieces along one dim, and the pieces of
one rank fuse into that rank's Megatron parameter: cut first, fuse after.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

from transformers import PretrainedConfig

from megatron_ac2.data.json_text import shown
from megatron_ac2.types import UserError

Cut = Literal["whole", "rows", "columns", "vocab"]  # "vocab": rows, after zero rows were appended


@dataclass(frozen=True, slots=True)
class Rule:
    """One Megatron parameter and the HF tensors fused in it."""

    megatron: str
    parts: tuple[str, ...]
    cut: Cut
    fusion: Literal["none", "qkv", "gate_up"] = "none"
    of_expert: bool = False  # one parameter an expert, on the rank that has it; {expert} in `parts` is its number


_DENSE = (
    Rule("mlp.linear_fc1.weight", ("mlp.gate_proj.weight", "mlp.up_proj.weight"), "rows", "gate_up"),
    Rule("mlp.linear_fc2.weight", ("mlp.down_proj.weight",), "columns"),
)


@dataclass(frozen=True, slots=True)
class Family:
    """`layer_rules` name a layer's tensors without their prefix, save those of the feed-forward: `dense_rules` in a
    dense layer, `expert_rules` in a layer of experts (none: the family has no such layers). `accepts`: fields of the HF
    config that change the computation, with the one value that is implemented; a field that the config lacks does not
    apply."""

    architecture: str
    model_type: str
    layer_rules: tuple[Rule, ...]
    megatron_fields: Mapping[str, Any]
    accepts: Mapping[str, Any]
    dense_rules: tuple[Rule, ...] = _DENSE
    expert_rules: tuple[Rule, ...] = ()


def _qkv(kind: str) -> Rule:
    parts = tuple(f"self_attn.{name}_proj.{kind}" for name in "qkv")
    return Rule(f"self_attention.linear_qkv.{kind}", parts, "rows", "qkv")


_LAYER = (
    Rule("input_layernorm.weight", ("input_layernorm.weight",), "whole"),
    _qkv("weight"),
    Rule("self_attention.linear_proj.weight", ("self_attn.o_proj.weight",), "columns"),
    Rule("pre_mlp_layernorm.weight", ("post_attention_layernorm.weight",), "whole"),
)
_QK_NORM = (
    Rule("self_attention.q_layernorm.weight", ("self_attn.q_norm.weight",), "whole"),
    Rule("self_attention.k_layernorm.weight", ("self_attn.k_norm.weight",), "whole"),
)
_EXPERTS = (
    Rule("mlp.router.weight", ("mlp.gate.weight",), "whole"),
    Rule(
        "mlp.experts.linear_fc1.weight",
        ("mlp.experts.{expert}.gate_proj.weight", "mlp.experts.{expert}.up_proj.weight"),
        "rows",
        "gate_up",
        of_expert=True,
    ),
    Rule("mlp.experts.linear_fc2.weight", ("mlp.experts.{expert}.down_proj.weight",), "columns", of_expert=True),
)
_ACCEPTS = {"hidden_act": "silu", "quantization_config": None}

_QWEN3 = Family(
    architecture="Qwen3ForCausalLM",
    model_type="qwen3",
    layer_rules=_LAYER + _QK_NORM,
    megatron_fields=MappingProxyType({"qk_layernorm": True, "add_qkv_bias": False}),
    accepts=MappingProxyType(_ACCEPTS | {"attention_bias": False, "use_sliding_window": False}),
)
_QWEN3_MOE = Family(
    architecture="Qwen3MoeForCausalLM",
    model_type="qwen3_moe",
    layer_rules=_LAYER + _QK_NORM,
    megatron_fields=_QWEN3.megatron_fields,
    accepts=_QWEN3.accepts,
    expert_rules=_EXPERTS,
)
_QWEN2 = Family(  # Qwen2.5 is of this architecture
    architecture="Qwen2ForCausalLM",
    model_type="qwen2",
    layer_rules=(*_LAYER, _qkv("bias")),
    megatron_fields=MappingProxyType({"qk_layernorm": False, "add_qkv_bias": True}),
    accepts=MappingProxyType(_ACCEPTS | {"use_sliding_window": False}),
)
_LLAMA = Family(  # Llama 2 and 3, SmolLM2
    architecture="LlamaForCausalLM",
    model_type="llama",
    layer_rules=_LAYER,
    megatron_fields=MappingProxyType({"qk_layernorm": False, "add_qkv_bias": False}),
    accepts=MappingProxyType(_ACCEPTS | {"attention_bias": False, "mlp_bias": False}),
)
FAMILIES: Mapping[str, Family] = MappingProxyType({f.architecture: f for f in (_QWEN3, _QWEN3_MOE, _QWEN2, _LLAMA)})


def family_of(hf_config: PretrainedConfig) -> Family:
    """The family that config.json names. Raises `UserError` if it names none of FAMILIES, or contradicts itself."""
    found = list(getattr(hf_config, "architectures", None) or [])
    if len(found) != 1 or found[0] not in FAMILIES:
        raise UserError(f"architectures: found {shown(found)}, accepted: one of {', '.join(FAMILIES)}")
    family = FAMILIES[found[0]]
    if hf_config.model_type != family.model_type:
        raise UserError(
            f"model_type: found {shown(hf_config.model_type)} with architecture {family.architecture}, "
            f"accepted: {family.model_type}"
        )
    return family


def refusals(family: Family, hf_config: PretrainedConfig) -> list[str]:
    """What the config asks for and the family does not implement, one message a field."""
    found = {name: getattr(hf_config, name, accepted) for name, accepted in family.accepts.items()}
    odd = sorted({*(getattr(hf_config, "layer_types", None) or ())} - {"full_attention"})
    layers = [f"layer_types: found {', '.join(odd)}, accepted for {family.architecture}: full_attention"] if odd else []
    return layers + [
        f"{name}: found {shown(found[name])}, accepted for {family.architecture}: {accepted!r}"
        for name, accepted in family.accepts.items()
        if found[name] != accepted
    ]
