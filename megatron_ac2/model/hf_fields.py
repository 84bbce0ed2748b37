"""What config.json must say, and of which type, before anything is computed from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

from transformers import CONFIG_MAPPING, AutoConfig, PretrainedConfig

from megatron_ac2.data.json_text import read_object, reason, shown
from megatron_ac2.model.families import family_of
from megatron_ac2.model.hf_table import head_dim
from megatron_ac2.types import UserError


@dataclass(frozen=True, slots=True)
class _Field:
    """`low` and `high`: the range of a number, both ends in it, save that a `positive` one is above 0."""

    kind: Literal["integer", "number", "true or false", "object", "list of integers"]
    low: int = 1
    high: int = 10_000
    required: bool = False  # else it may be missing
    or_null: bool = False

    def accepts(self, value: Any) -> bool:
        if value is None:
            return self.or_null
        if self.kind in ("integer", "number"):
            numbers = int if self.kind == "integer" else (int, float)
            is_number = isinstance(value, numbers) and not isinstance(value, bool)
            return is_number and self.low <= value <= self.high and (value > 0 or self.kind == "integer")
        if self.kind == "list of integers":
            return isinstance(value, list) and all(type(item) is int for item in value)
        return isinstance(value, bool if self.kind == "true or false" else dict)

    @property
    def accepted(self) -> str:
        ranges = {"integer": f", {self.low:,} to {self.high:,}", "number": f" above 0, up to {self.high:,}"}
        article = "" if self.kind == "true or false" else "an " if self.kind[0] in "io" else "a "
        return article + self.kind + ranges.get(self.kind, "") + (", or null" if self.or_null else "")


# Far beyond any model that there is: so that no list of layers or names fills the memory.
_FIELDS: Mapping[str, _Field] = {
    "vocab_size": _Field("integer", high=10_000_000, required=True),
    "hidden_size": _Field("integer", high=1_000_000, required=True),
    "intermediate_size": _Field("integer", high=10_000_000, required=True),
    "num_hidden_layers": _Field("integer", high=1000, required=True),
    "num_attention_heads": _Field("integer", required=True),
    "num_key_value_heads": _Field("integer", or_null=True),
    "head_dim": _Field("integer", or_null=True),
    "max_position_embeddings": _Field("integer", high=2**31 - 1),
    "rms_norm_eps": _Field("number", low=0, high=1),
    "rope_theta": _Field("number", low=0, high=10**12, or_null=True),
    "rope_parameters": _Field("object", or_null=True),
    "rope_scaling": _Field("object", or_null=True),
    "tie_word_embeddings": _Field("true or false"),
    "num_experts": _Field("integer", low=0, high=4096, or_null=True),
    "num_experts_per_tok": _Field("integer", low=0),
    "moe_intermediate_size": _Field("integer", high=10_000_000),
    "decoder_sparse_step": _Field("integer", low=0),
    "mlp_only_layers": _Field("list of integers", or_null=True),
    "norm_topk_prob": _Field("true or false"),
    "num_labels": _Field("integer", low=0, high=100_000),  # transformers writes a label out for each
}


def read_config(folder: Path) -> PretrainedConfig:
    """What the folder's config.json says. Code that the folder brings along is never run.

    Raises one `UserError` with all that `_FIELDS` refuses, or else with what transformers itself refuses.
    """
    file = folder / "config.json"
    check_fields(file)
    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:
        raise UserError(f"{file}: {_blamed(read_object(file))}cannot be read: {reason(error)}") from error


def _blamed(fields: dict[str, Any]) -> str:
    """The field without which transformers would take the others; "" if there is none such."""
    kind = CONFIG_MAPPING[fields["model_type"]]
    for name in fields:
        try:
            kind.from_dict({other: value for other, value in fields.items() if other != name})
        except Exception:
            continue
        return f"{name}: found {_value(fields[name])}; "
    return ""


def check_fields(file: Path) -> None:
    """Raises one `UserError` with all that config.json itself shows to be wrong."""
    found = read_object(file)
    problems = _named_problems(found)
    for name, field in _FIELDS.items():
        if name not in found and field.required:
            problems.append(f"{name}: missing; accepted: {field.accepted}")
        elif name in found and not field.accepts(found[name]):
            problems.append(f"{name}: found {_value(found[name])}; accepted: {field.accepted}")
    if problems:
        raise UserError([f"{file}: {problem}" for problem in problems])


def head_problems(hf_config: PretrainedConfig) -> list[str]:
    """Where the sizes of attention do not fit one another, as messages."""
    heads, groups, hidden = hf_config.num_attention_heads, hf_config.num_key_value_heads, hf_config.hidden_size
    problems = []
    if heads % groups:
        problems.append(f"num_key_value_heads: found {groups}; accepted: divisors of num_attention_heads ({heads})")
    if not getattr(hf_config, "head_dim", None) and hidden % heads:
        problems.append(f"num_attention_heads: found {heads}; accepted without head_dim: divisors of {hidden}")
    elif head_dim(hf_config) % 2 or not head_dim(hf_config):
        problems.append(f"head_dim: found {head_dim(hf_config)}; accepted: even numbers, rotary positions turn pairs")
    return problems


def _named_problems(found: Mapping[str, Any]) -> list[str]:
    """Of architecture and kind, and of code that a folder brings along."""
    problems, names = [], found.get("architectures")
    if found.get("auto_map"):
        problems.append(
            f"auto_map: found {shown(found['auto_map'])}; code that a model's folder brings along is never run; "
            "accepted: a model that needs none, whose config.json has no auto_map"
        )
    if names is not None and (not isinstance(names, list) or not all(isinstance(name, str) for name in names)):
        return [*problems, f"architectures: found {shown(names)}; accepted: a list with one name"]
    try:
        family_of(SimpleNamespace(architectures=names, model_type=found.get("model_type")))
    except UserError as error:
        problems += error.problems
    return problems


def _value(value: Any) -> str:
    return "null" if value is None else shown(value)
