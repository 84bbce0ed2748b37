"""What differs between the Megatron-Core versions that we run with, told apart by what is there, not by number.

A builder, in a layer's spec, is what Megatron calls to make a module: a class, or a class with the builders of its
parts. The latter is a ModuleSpec throughout 0.16; in 0.19 a feed-forward, an expert layer and its experts are partials.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

# The tests pass with these. Others may do, but we also call what Megatron changes without notice.
TESTED = ("0.16.1", "0.19.2")


def built_class(builder: Any) -> Any:
    """What a builder with parts calls: a class, or a function that returns an instance of one."""
    return builder.func if isinstance(builder, functools.partial) else builder.module


def parts_of(builder: Any) -> Any:
    """The dataclass of builders that it makes its parts with; None where it has none."""
    if isinstance(builder, functools.partial):
        return builder.keywords.get("submodules")
    return getattr(builder, "submodules", None)


def with_parts(builder: Any, parts: Any) -> Any:
    """A copy of a builder that has parts, with others in their place."""
    if isinstance(builder, functools.partial):
        return functools.partial(builder.func, *builder.args, **{**builder.keywords, "submodules": parts})
    return dataclasses.replace(builder, submodules=parts)


_COMMON_FILE = "common.pt"


def installed() -> str:
    return f"megatron-core {metadata.version('megatron-core')}"


def write_common_file(folder: Path, common: dict[str, Any]) -> None:
    """What a distributed checkpoint holds beside tensors, in a file of its own. Before 0.19 none is read without it;
    0.19 has it among the tensors, and reads the file where there is one."""
    torch.save(common, folder / _COMMON_FILE)


def common_file_problems(folder: Path, written_with: str) -> list[str]:
    """Why the Megatron here cannot read a distributed checkpoint that lacks that file, as messages."""
    from megatron.core import dist_checkpointing

    needs_it = "common_strategy" in inspect.signature(dist_checkpointing.load).parameters
    if not needs_it or (folder / _COMMON_FILE).is_file():
        return []
    return [
        f"{folder}: no {_COMMON_FILE}, which {installed()} cannot read it without; written with {written_with}: read "
        "it there, or write it anew"
    ]


def routing_bytes_per_expert() -> int:
    """What the dropless permutation keeps for the backward pass, for each token and expert: the place of each choice in
    the order of all, int64; before 0.19 whether the expert is chosen, and how likely it is, in fp32."""
    from megatron.core.transformer.moe.moe_utils import permute

    return 8 if "tokens_per_expert" in inspect.signature(permute).parameters else 1 + 4


def asks_for_replayed_experts() -> bool:
    """Whether a router calls what stands in its `router_replay` (since 0.16) for the experts of its tokens."""
    from megatron.core.transformer.moe.moe_utils import topk_routing_with_score_function

    return "router_replay" in inspect.signature(topk_routing_with_score_function).parameters
