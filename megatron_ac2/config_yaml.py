"""YAML text -> plain values, in a dialect that has no others; every mistake in it is a `ValueError` of one line."""

from __future__ import annotations

import re
import stat
from pathlib import Path
from typing import Any

import yaml

MAX_BYTES = 2**20  # of a file
MAX_DEPTH = 50
MAX_NODES = 10_000  # aliases written out, as OmegaConf counts
MAX_BITS = 1000  # of a whole number: what a float holds, and Python prints
_TAG = "tag:yaml.org,2002:"
_PLAIN = tuple(_TAG + name for name in ("null", "bool", "int", "float", "str", "seq", "map"))
# OmegaConf's: 1e-3 is a number too, which YAML 1.1 alone reads as text.
_FLOAT = re.compile(
    r"""[-+]?[0-9]+(?:_[0-9]+)*\.[0-9_]*(?:[eE][-+]?[0-9]+)?$
       |[-+]?[0-9]+(?:_[0-9]+)*[eE][-+]?[0-9]+$
       |\.[0-9]+(?:_[0-9]+)*(?:[eE][-+][0-9]+)?$
       |[-+]?[0-9]+(?:_[0-9]+)*(?::[0-5]?[0-9])+\.[0-9_]*$
       |[-+]?\.(?:inf|Inf|INF)$
       |\.(?:nan|NaN|NAN)$""",
    re.X,
)


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
    """Without dates, bytes, sets and objects; keys are text, and each stands once in its mapping."""

    yaml_constructors = {tag: yaml.SafeLoader.yaml_constructors[tag] for tag in (*_PLAIN, None)}
    yaml_implicit_resolvers = {
        start: [(tag, pattern) for tag, pattern in resolvers if tag not in (_TAG + "timestamp", _TAG + "value")]
        for start, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_document(self, node: yaml.Node) -> Any:
        _check_keys(node)  # here, for merge keys (<<) have not been written out yet
        return super().construct_document(node)

    def construct_yaml_int(self, node: yaml.Node) -> int:
        value = super().construct_yaml_int(node)
        if value.bit_length() > MAX_BITS:
            raise _error(node, f"a whole number of more than {MAX_BITS} bits")
        return value


_Loader.add_constructor(_TAG + "int", _Loader.construct_yaml_int)
_Loader.add_implicit_resolver(_TAG + "float", _FLOAT, list("-+0123456789."))


def parse_yaml(text: str) -> Any:
    """Mappings, lists, text, numbers, booleans and null. Raises `ValueError` for anything else."""
    try:
        _refuse_large(text)
        return yaml.load(text, Loader=_Loader)
    except Exception as error:  # yaml's own, and of conversions: `!!int x`
        raise ValueError(_reason(error)) from error


def read_yaml(path: Path) -> Any:
    """Of a file in UTF-8. Raises `ValueError` as `parse_yaml` does, `OSError` for a file that cannot be read."""
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):  # a pipe may never end
        raise ValueError("not a regular file")
    if status.st_size > MAX_BYTES:
        raise ValueError(f"found {status.st_size} bytes, accepted: at most {MAX_BYTES}")
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"found byte {error.object[error.start]:#04x} at {error.start}, accepted: UTF-8") from error
    return parse_yaml(text)


def _refuse_large(text: str) -> None:
    """Before anything is built: nesting can exhaust the stack, and aliases multiply a short text beyond any memory."""
    sizes: dict[str, int] = {}  # nodes of each anchor that is complete
    unfinished: list[list[Any]] = [[None, 0]]  # anchor and nodes so far
    for event in yaml.parse(text, Loader=_Loader):
        if isinstance(event, yaml.CollectionStartEvent):
            unfinished.append([event.anchor, 1])
            if len(unfinished) > MAX_DEPTH + 1:
                raise _error(event, f"nested more than {MAX_DEPTH} deep")
            continue
        if isinstance(event, yaml.AliasEvent):
            if event.anchor not in sizes:
                raise _error(event, f"*{event.anchor} stands for nothing, or for what it is part of")
            size = sizes[event.anchor]
        elif isinstance(event, (yaml.ScalarEvent, yaml.CollectionEndEvent)):
            anchor, size = unfinished.pop() if isinstance(event, yaml.CollectionEndEvent) else (event.anchor, 1)
            sizes |= {anchor: size} if anchor else {}
        else:
            continue
        unfinished[-1][1] += size
        if unfinished[-1][1] > MAX_NODES:
            raise _error(event, f"more than {MAX_NODES} values, aliases written out")


def _check_keys(root: yaml.Node) -> None:
    seen, waiting = set(), [root]
    while waiting:
        node = waiting.pop()
        if node in seen or isinstance(node, yaml.ScalarNode):
            continue
        seen.add(node)
        if isinstance(node, yaml.SequenceNode):
            waiting += node.value
            continue
        waiting += [value for _, value in node.value]
        names: set[str] = set()
        for key in (key for key, _ in node.value if key.tag != _TAG + "merge"):
            if key.tag != _TAG + "str" or not key.value or not key.value.isprintable():
                raise _error(key, f"found the key {key.value!r}, accepted: names, of printable text")
            if key.value in names:
                raise _error(key, f"the key {key.value!r} stands twice")
            names.add(key.value)


def _error(place: yaml.Node | yaml.Event, text: str) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=text, problem_mark=place.start_mark)


def _reason(error: Exception) -> str:
    """One line: where, and what."""
    if isinstance(error, yaml.MarkedYAMLError) and error.problem and error.problem_mark:
        return f"line {error.problem_mark.line + 1}, column {error.problem_mark.column + 1}: {error.problem}"
    return " ".join(str(error).split()) or type(error).__name__
