"""JSON that others wrote: whatever is wrong with it comes out as one line, and never as the parser's own exception."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from megatron_ac2.types import UserError

_MAX_SHOWN, _MAX_REASON = 60, 300
_GZIP = b"\x1f\x8b"
_SHORT = reprlib.Repr()  # of a deep value a plain `repr` raises RecursionError, of a large one it is as large
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = _MAX_SHOWN + 1
_SHORT.maxlist = _SHORT.maxdict = _SHORT.maxtuple = 20


def shown(value: Any) -> str:
    """A value for a message: on one line, and short."""
    text = "nothing" if value is None else repr(value[:_MAX_SHOWN]) if isinstance(value, str) else _SHORT.repr(value)
    return text if len(text) <= _MAX_SHOWN else text[: _MAX_SHOWN - 3] + "..."


def reason(error: BaseException) -> str:
    """What a library's exception says, on one line, and not at any length; its name, if it says nothing."""
    text = " ".join(str(error).split()).encode(errors="backslashreplace").decode() or type(error).__name__
    return text if len(text) <= _MAX_REASON else text[: _MAX_REASON - 3] + "..."


def text_error(value: Any) -> str | None:
    """Why a value is no text to work with, as the end of a message; None if it is."""
    if not isinstance(value, str) or not value.strip():
        return f"found {shown(value)}; accepted: text"
    return _surrogate_error(value)


def nested_error(value: Any, max_depth: int = 100) -> str | None:
    """Why a value cannot be hashed, pickled and written as it is, as the end of a message; None if it can."""
    left = [(value, 0)]
    while left:
        item, depth = left.pop()
        if depth > max_depth:
            return f"nested more than {max_depth} deep; accepted: at most that"
        if isinstance(item, float) and item - item != 0:
            return f"found {item}; accepted: finite numbers"
        if isinstance(item, str) and (error := _surrogate_error(item)):
            return error
        if isinstance(item, dict):
            left += [(key, depth) for key in item] + [(child, depth + 1) for child in item.values()]
        elif isinstance(item, (list, tuple)):
            left += [(child, depth + 1) for child in item]
    return None


def parse_json(text: str | bytes) -> Any:
    """Raises `ValueError` of one line, also where the parser raises another exception or lets a second key pass."""
    try:
        decoded = text.decode("utf-8-sig") if isinstance(text, bytes) else text
        return json.loads(decoded, object_pairs_hook=_object)
    except RecursionError:
        raise ValueError("nested too deep") from None
    except ValueError as error:
        raise ValueError(reason(error)) from None


def read_lines(path: Path) -> Iterator[tuple[int, Any]]:
    """(number from 1, value) of every line of a JSONL file that is not blank; one that is no JSON comes out as the
    `ValueError` it caused. Raises `UserError` for a file that is none."""
    try:
        with path.open("rb") as file:
            if file.read(len(_GZIP)) == _GZIP:
                raise UserError(f"{path}: found gzip's compression; accepted: plain text, so unpack it (gunzip)")
            file.seek(0)
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield number, _value_or_error(line)
    except (OSError, ValueError) as error:  # the latter: a path that can be none
        raise UserError(f"{path}: cannot be read: {reason(error)}") from error


def read_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises `UserError` with the file's name if there is none."""
    try:
        value = parse_json(path.read_bytes())
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read as JSON: {reason(error)}; accepted: a JSON object") from error
    if not isinstance(value, dict):
        raise UserError(f"{path}: found {shown(value)}; accepted: a JSON object")
    return value


def _value_or_error(line: bytes) -> Any:
    try:
        return parse_json(line)
    except ValueError as error:
        return error


def _object(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"an object holds {shown(twice)} twice")
    return found


def _surrogate_error(text: str) -> str | None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = f"half of a surrogate pair at character {error.start + 1}"
        return f"found {shown(text)}, with {half}; accepted: text that UTF-8 can hold"
    return None
