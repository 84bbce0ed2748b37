"""Several layouts over the same processes, such as an actor's and a critic's of its own.

Megatron's modules read groups, ranks and random states from module globals of `parallel_state` and `random`, in many
places even where they are handed a `ProcessGroupCollection`. Those globals hold one layout at a time, the active one;
the others' values are kept here. Whatever runs a model of a layout does it inside `active(its groups)`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, TypeVar

from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import random

T = TypeVar("T")
_Globals = dict[str, Any]

_RNG_TRACKER = "_CUDA_RNG_STATE_TRACKER"
_STATE = re.compile(r"_[A-Z0-9_]+|_global_process_group_list")  # what parallel_state calls its mutable globals

_blank: _Globals = {}  # before any layout
_kept: dict[int, tuple[ProcessGroupCollection, _Globals]] = {}  # by id of the groups, which are held so that it stays
_active: ProcessGroupCollection | None = None


@contextmanager
def active(groups: ProcessGroupCollection) -> Iterator[None]:
    """Inside, Megatron's globals are those of the layout of `groups`. Not for two threads at once.

    A layout that was never registered (Megatron's own tools make such) is taken to be the one that is there.
    """
    former = _active
    if former is None or groups is former or id(groups) not in _kept:
        yield
        return
    _switch_to(groups)
    try:
        yield
    finally:
        _switch_to(former)


def in_own_layout(method: Callable[..., T]) -> Callable[..., T]:
    """A method of an object whose `groups` are those of its model's layout."""

    @wraps(method)
    def run(self: Any, *args: Any, **kwargs: Any) -> T:
        with active(self.groups):
            return method(self, *args, **kwargs)

    return run


def forget_layouts() -> None:
    """No layout is left: Megatron's globals must have been cleared, and are remembered as what comes before one."""
    global _active, _blank
    _kept.clear()
    _active = None
    _blank = _read()


@contextmanager
def another_layout() -> Iterator[None]:
    """Inside, Megatron's globals are clear, for a layout to be made and registered; the one before is active again
    afterwards. Raises RuntimeError without a layout before."""
    global _active
    former = _active
    if former is None:
        raise RuntimeError("a further layout needs a first one: call init_topology before add_topology")
    _kept[id(former)] = (former, _read())
    _write(_blank)
    try:
        yield
    finally:
        if _active is not None and _active is not former:
            _kept[id(_active)] = (_active, _read())
        _write(_kept[id(former)][1])
        _active = former


def register(groups: ProcessGroupCollection) -> None:
    """Megatron's globals hold the layout of `groups` from now on."""
    global _active
    _active = groups
    _kept[id(groups)] = (groups, _read())


def layouts() -> list[_Globals]:
    """Megatron's globals of every layout, for whoever ends their groups one by one."""
    return [_read() if groups is _active else values for groups, values in _kept.values()]


def _switch_to(groups: ProcessGroupCollection) -> None:
    global _active
    assert _active is not None
    _kept[id(_active)] = (_active, _read())  # a schedule moves some of them, and draws move the random states
    _write(_kept[id(groups)][1])
    _active = groups


def _read() -> _Globals:
    values = {name: value for name, value in vars(parallel_state).items() if _STATE.fullmatch(name)}
    return values | {_RNG_TRACKER: getattr(random, _RNG_TRACKER)}


def _write(values: _Globals) -> None:
    for name, value in values.items():
        setattr(random if name == _RNG_TRACKER else parallel_state, name, value)
