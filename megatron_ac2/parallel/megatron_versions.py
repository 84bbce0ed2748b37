"""What differs between the Megatron-Core versions that we run with, told apart by what is there, not by number.

A builder, in a layer's spec, is what Megatron calls to make a module: a class, or a class with the builders of its
parts. The latter is a ModuleSpec throughout 0.16; in 0.19 a feed-forward, an expert layer and its experts are partials.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from typing import Any

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


def routing_bytes_per_expert() -> int:
    """What the dropless permutation keeps for the backward pass, for each token and expert: the place of each choice in
    the order of all, int64; before 0.19 whether the expert is chosen, and how likely it is, in fp32."""
    from megatron.core.transformer.moe.moe_utils import permute

    return 8 if "tokens_per_expert" in inspect.signature(permute).parameters else 1 + 4
