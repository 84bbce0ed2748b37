"""Rotary position settings of a Hugging Face config -> arguments of Megatron's GPTModel."""

from __future__ import annotations

import math
from typing import Any

from transformers import PretrainedConfig

from megatron_ac2.data.json_text import shown
from megatron_ac2.types import UserError

# Llama 3's scaling, as far as Megatron's RotaryEmbedding has it fixed; only `factor` is an argument.
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
_ROPE_TYPES = ("default", "llama3")


def rope_arguments(hf_config: PretrainedConfig) -> dict[str, Any]:
    """GPTModel's rotary_base, rope_scaling and rope_scaling_factor. Raises `UserError` for what it cannot compute."""
    problems = rope_problems(hf_config)
    if problems:
        raise UserError(problems)
    rope = _rope(hf_config)
    scaled = rope["rope_type"] == "llama3"
    factor = {"rope_scaling_factor": float(rope["factor"])} if scaled else {}
    return {"rotary_base": rope["rope_theta"], "rope_scaling": scaled, **factor}


def rope_problems(hf_config: PretrainedConfig) -> list[str]:
    """Why Megatron would rotate by other angles than transformers; empty if it does not."""
    rope = _rope(hf_config)
    if rope["rope_theta"] is None:
        return ["rope_theta: found none, neither at the top nor in rope_parameters"]
    problems = []
    if not _is_positive(rope["rope_theta"]):
        problems.append(f"rope_parameters.rope_theta: found {shown(rope['rope_theta'])}, accepted: a number above 0")
    if rope["rope_type"] not in _ROPE_TYPES:
        accepted = ", ".join(_ROPE_TYPES)
        problems.append(f"rope_parameters.rope_type: found {shown(rope['rope_type'])}, accepted: {accepted}")
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        problems.append(
            f"rope_parameters.partial_rotary_factor: found {shown(rope['partial_rotary_factor'])}, accepted: 1.0"
        )
    if rope["rope_type"] == "llama3":
        problems += [
            f"rope_parameters.{name}: found {shown(rope.get(name))}, accepted with rope_type llama3: {fixed}, which "
            "Megatron has built in"
            for name, fixed in _LLAMA3.items()
            if rope.get(name) != fixed
        ]
        if not (_is_positive(factor := rope.get("factor")) and factor >= 1):
            problems.append(f"rope_parameters.factor: found {shown(factor)}, accepted: a number of 1 or more")
    return problems


def _is_positive(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < math.inf


def _rope(hf_config: PretrainedConfig) -> dict[str, Any]:
    """transformers 5 keeps rope settings in `rope_parameters`; before, theta stood beside `rope_scaling`."""
    rope = dict(getattr(hf_config, "rope_parameters", None) or getattr(hf_config, "rope_scaling", None) or {})
    rope.setdefault("rope_theta", getattr(hf_config, "rope_theta", None))
    rope.setdefault("rope_type", rope.get("type", "default"))
    return rope
