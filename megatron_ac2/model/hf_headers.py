"""What the headers of a Hugging Face folder's files show to be wrong with its tensors: names, shapes, types."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from transformers import PretrainedConfig

from megatron_ac2.model.hf_files import VALUE_HEAD_FILE, HfReader, named_plainly
from megatron_ac2.model.hf_table import LM_HEAD, VALUE_HEAD, Table, head_dim
from megatron_ac2.model.value_head import HEAD_OUTPUTS
from megatron_ac2.types import UserError

_MAX_REPORTED = 20
_FUSED_EXPERTS = re.compile(r"\.mlp\.experts\.(gate_up_proj|down_proj)$")
_LAYER = re.compile(r"^model\.layers\.\d+\.|(?<=\.experts)\.\d+(?=\.)")  # what tensors of one shape differ in
_DTYPES = ("BF16", "F16", "F32", "F64")
# A tensor's name without layer and expert -> what its dims are.
_DIMS = {
    "model.embed_tokens.weight": ("vocab", "hidden"),
    "lm_head.weight": ("vocab", "hidden"),
    "model.norm.weight": ("hidden",),
    "input_layernorm.weight": ("hidden",),
    "post_attention_layernorm.weight": ("hidden",),
    "self_attn.q_proj.weight": ("query", "hidden"),
    "self_attn.k_proj.weight": ("key", "hidden"),
    "self_attn.v_proj.weight": ("key", "hidden"),
    "self_attn.q_proj.bias": ("query",),
    "self_attn.k_proj.bias": ("key",),
    "self_attn.v_proj.bias": ("key",),
    "self_attn.o_proj.weight": ("hidden", "query"),
    "self_attn.q_norm.weight": ("head",),
    "self_attn.k_norm.weight": ("head",),
    "mlp.gate_proj.weight": ("ffn", "hidden"),
    "mlp.up_proj.weight": ("ffn", "hidden"),
    "mlp.down_proj.weight": ("hidden", "ffn"),
    "mlp.gate.weight": ("experts", "hidden"),
    "mlp.experts.gate_proj.weight": ("expert_ffn", "hidden"),
    "mlp.experts.up_proj.weight": ("expert_ffn", "hidden"),
    "mlp.experts.down_proj.weight": ("hidden", "expert_ffn"),
}


def weight_problems(hf_config: PretrainedConfig, path: str | Path, value_outputs: int | None = None) -> list[str]:
    """What `load_hf_weights` would refuse of the folder, all of which its files' headers show, as messages: the first
    20. `value_outputs`: of a value model's head; None: a language model."""
    try:
        table, reader = Table(hf_config), HfReader(path)
        problems = name_errors(table, reader, value_outputs is not None)
        names = [name for name in table.hf_names(value_outputs is None) if name in reader.names]
        problems += _tensor_errors(hf_config, reader, names)
        if value_outputs is not None and VALUE_HEAD in reader.names:
            problems += _value_head_errors(reader, (value_outputs, hf_config.hidden_size))
    except UserError as error:
        problems = error.problems
    hidden = len(problems) - _MAX_REPORTED
    return problems[:_MAX_REPORTED] + ([f"{path}: and {hidden} more errors"] if hidden > 0 else [])


def name_errors(table: Table, reader: HfReader, value: bool) -> list[str]:
    fused = sorted(name for name in reader.names if _FUSED_EXPERTS.search(name))
    if fused:
        return [
            f"{named_plainly(fused[0])}: found in {reader.folder}, experts fused in one tensor (transformers 5 can "
            "save so, with save_original_format=False); accepted: one tensor an expert and projection, as published"
        ]
    expected = set(table.hf_names(with_lm_head=not value))
    accepted = expected | ({LM_HEAD} if value or table.tied else set()) | ({VALUE_HEAD} if value else set())
    missing = [f"{name}: missing in {reader.folder}" for name in sorted(expected - reader.names)]
    surplus = sorted(reader.names - accepted)
    unknown = [f"{named_plainly(name)}: found in {reader.folder}, but the model has no such tensor" for name in surplus]
    return missing + unknown


def head_error(reader: HfReader, found: tuple[int, ...], expected: tuple[int, ...]) -> str:
    """A head of another kind is a mistake in the configuration more often than in the file."""

    def named(shape: tuple[int, ...]) -> str:
        kinds = [kind for kind, outputs in HEAD_OUTPUTS.items() if shape == (outputs, expected[1])]
        return f"shape {shape}" + (f" ({' or '.join(kinds)})" if kinds else "")

    return (
        f"critic.head: {VALUE_HEAD} in {reader.folder} has {named(found)}, accepted: {named(expected)}; set "
        f"critic.head to the kind that was trained, or take {VALUE_HEAD_FILE} out of the folder for a fresh head"
    )


def _tensor_errors(hf_config: PretrainedConfig, reader: HfReader, names: Sequence[str]) -> list[str]:
    sizes = _sizes(hf_config)
    errors = []
    for name in names:
        expected = tuple(sizes[dim] for dim in _DIMS[_LAYER.sub("", name)])
        if (found := reader.shape(name)) != expected:
            errors.append(f"{reader.file(name)}: {name}: found shape {found}, config.json says {expected}")
        errors += _dtype_errors(reader, name)
    return errors


def _value_head_errors(reader: HfReader, expected: tuple[int, int]) -> list[str]:
    found = reader.shape(VALUE_HEAD)
    return ([] if found == expected else [head_error(reader, found, expected)]) + _dtype_errors(reader, VALUE_HEAD)


def _dtype_errors(reader: HfReader, name: str) -> list[str]:
    dtype = reader.stored_dtype(name)
    return [] if dtype in _DTYPES else [f"{reader.file(name)}: {name}: found {dtype}; accepted: {', '.join(_DTYPES)}"]


def _sizes(hf_config: PretrainedConfig) -> dict[str, int]:
    head = head_dim(hf_config)
    return {
        "vocab": hf_config.vocab_size,
        "hidden": hf_config.hidden_size,
        "query": hf_config.num_attention_heads * head,
        "key": hf_config.num_key_value_heads * head,
        "head": head,
        "ffn": hf_config.intermediate_size,
        "experts": getattr(hf_config, "num_experts", None) or 0,
        "expert_ffn": getattr(hf_config, "moe_intermediate_size", None) or 0,
    }
