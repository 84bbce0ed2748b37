"""YAML files and dotted overrides -> a checked configuration; every error at once, before any rank starts."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial, reduce
from operator import getitem
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import GrammarParseError

from megatron_ac2.config import Config
from megatron_ac2.config_checks import check_config
from megatron_ac2.config_values import cut, shown, value_problems
from megatron_ac2.config_yaml import parse_yaml, read_yaml
from megatron_ac2.types import UserError

COMMAND_LINE = "command line"
MISSING = "???"
_OVERRIDE = re.compile(r"[A-Za-z_][\w.\[\]-]*=")
_KEY = re.compile(r"[A-Za-z_][\w-]*(\.[\w-]+)*")
_NOT_A_SECTION = re.compile(r"not a subclass of|^Cannot assign \w+ to Dict|incompatible container|is not Optional")
Keys = tuple[str, ...]  # from the top down
Tree = dict[str, Any]


@dataclasses.dataclass(frozen=True, slots=True)
class _Source:
    """A file, or one override: what it says, or why it cannot be read."""

    origin: str
    tree: Tree
    problems: list[str]


def split_arguments(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """`BASE.yaml [OVERLAY.yaml ...] [section.field=value ...]`, in any order -> files, overrides.

    Raises `UserError` for every argument that is neither, and when no file is named.
    """
    overrides = [argument for argument in arguments if _OVERRIDE.match(argument)]
    others = [argument for argument in arguments if not _OVERRIDE.match(argument)]
    paths = [text for text in others if Path(text).suffix in (".yaml", ".yml") or os.path.isfile(text)]
    problems = [
        f"command line: found {shown(text)}, accepted: FILE.yaml or section.field=value"
        for text in others
        if text not in paths
    ]
    if not paths:
        problems.append("command line: no configuration: BASE.yaml [OVERLAY.yaml ...] [section.field=value ...]")
    if problems:
        raise UserError(problems)
    return paths, overrides


def load_config(
    path: str | Path | Sequence[str | Path], overrides: Sequence[str] | None = None, schema: type = Config
) -> Any:
    """YAML files, each laid over those before it, then dotted overrides -> a checked `schema` instance.

    Lists are replaced, sections merged. Raises `UserError` listing, with the file that each stands in, every unknown
    key and bad type, or else every missing value and failing reference, or else every impossible value and
    combination. It raises nothing else.
    """
    paths = [path] if isinstance(path, (str, Path)) else list(path)
    sources = [_source(str(path), partial(_read_file, path)) for path in paths]
    sources += [_source(COMMAND_LINE, partial(_read_override, text)) for text in overrides or []]
    merged, problems = _merge(_base(schema), sources)
    if not problems:
        config, problems = _resolve(merged, sources, ", ".join(map(str, paths)))
    if not problems:
        problems = check_config(config) if isinstance(config, Config) else value_problems(config)
    if problems:
        raise UserError([_one_line(problem) for problem in problems])
    return config


@cache
def _base(schema: type) -> DictConfig:
    """Nothing changes it: merging copies."""
    return OmegaConf.structured(schema)


def _source(origin: str, read: Callable[[], Tree]) -> _Source:
    try:
        return _Source(origin, read(), [])
    except UserError as error:
        return _Source(origin, {}, error.problems)


def _read_file(path: str | Path) -> Tree:
    if not os.path.lexists(path):
        raise UserError(f"config file not found: {path}")
    try:
        tree = read_yaml(Path(path))
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise UserError(f"{path}: cannot be read as YAML: {error}") from error
    if not isinstance(tree, (dict, type(None))):
        raise UserError(f"{path}: expected a mapping of sections at the top, found {type(tree).__name__}")
    return tree or {}


def _read_override(text: str) -> Tree:
    key, equals, written = text.partition("=")
    if not (equals and _KEY.fullmatch(key)):
        raise UserError(f"{COMMAND_LINE}: found {shown(text)}, accepted: section.field=value")
    try:
        return _nest(key.split("."), parse_yaml(written))
    except ValueError as error:
        reason = f"cannot be read as YAML: {error}"
        raise UserError(_message(key.split("."), reason, written, COMMAND_LINE)) from error


def _merge(base: DictConfig, sources: Sequence[_Source]) -> tuple[DictConfig | None, list[str]]:
    """All at once where nothing is wrong; else leaf by leaf, so that one bad key does not hide the next."""
    whole = ""
    if not any(source.problems for source in sources):
        try:
            return OmegaConf.merge(base, *(source.tree for source in sources)), []
        except Exception as error:  # OmegaConf's own, and Python's of conversions
            whole = f"{', '.join(dict.fromkeys(source.origin for source in sources))}: {_reason(error)}"
    problems = []
    for source in sources:
        reasons = ((keys, _merge_error(base, keys, value), value) for keys, value in _leaves(source.tree))
        problems += source.problems
        problems += [_message(keys, reason, value, source.origin) for keys, reason, value in reasons if reason]
    return None, problems or [whole]


def _merge_error(base: DictConfig, keys: Sequence[str], value: Any) -> str | None:
    try:
        if len(keys) > 1 and keys[0] in base:  # the section alone, which takes a tenth of the time
            OmegaConf.merge(base[keys[0]], _nest(keys[1:], value))
        else:
            OmegaConf.merge(base, _nest(keys, value))
    except Exception as error:
        return _reason(error)
    return None


def _resolve(merged: DictConfig, sources: Sequence[_Source], names: str) -> tuple[Any, list[str]]:
    """The instance, with references (`${section.field}`) followed; or every missing value and failing reference."""
    leaves = sorted(_leaves(OmegaConf.to_container(merged, resolve=False)))
    problems = [
        f"{_name(keys)}: required, but {names} does not set it" for keys, value in leaves if MISSING in _texts(value)
    ]
    for keys, value in leaves:
        if any("${" in text for text in _texts(value)) and (reason := _reference_error(merged, keys)):
            problems.append(_message(keys, reason, value, _origin(sources, keys)))
    if problems:
        return None, problems
    try:
        config = OmegaConf.to_object(merged)
    except Exception as error:
        return None, [f"{names}: {_reason(error)}"]
    return config, [
        f"{_name(keys)}: found {shown(value)}, which would be taken for a reference when the run is read back"
        for keys, value in _leaves(to_dict(config))
        if any("${" in text or text == MISSING for text in _texts(value))
    ]


def _reference_error(merged: DictConfig, keys: Sequence[str]) -> str | None:
    """Reading a value follows its references and converts what they give to the field's type."""
    try:
        value = reduce(getitem, keys, merged)
        if OmegaConf.is_config(value):
            OmegaConf.to_container(value, resolve=True)
    except Exception as error:  # a resolver may raise anything
        return _reason(error)
    return None


def _origin(sources: Sequence[_Source], keys: Sequence[str]) -> str:
    """Where the value that won was written: the last place that has it."""
    for source in reversed(sources):
        node: Any = source.tree
        for key in keys:
            node = node.get(key, MISSING) if isinstance(node, dict) else node
        if node != MISSING:
            return source.origin
    return "the defaults"


def _name(keys: Sequence[Any]) -> str:
    """A resolver can make a mapping whose keys are no text."""
    return ".".join(map(str, keys))


def _message(keys: Sequence[str], reason: str, value: Any, origin: str) -> str:
    return f"{_name(keys)}: {reason} (found {shown(value)}, in {origin})"


def _reason(error: Exception) -> str:
    """OmegaConf's own words are for programmers in two cases; its further lines tell of its types."""
    text = str(error).partition("\n")[0]
    if isinstance(error, GrammarParseError):
        return f"no reference that can be read, accepted: ${{section.field}} ({cut(text)})"
    if _NOT_A_SECTION.search(text):
        return "accepted: a mapping of the fields of this section"
    return cut(text) or type(error).__name__


def _one_line(text: str) -> str:
    """Names of files, and what errors quote, may hold anything."""
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text)


def _leaves(tree: Tree, above: Keys = ()) -> Iterator[tuple[Keys, Any]]:
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, (*above, key))
        else:
            yield (*above, key), value


def _texts(value: Any) -> list[str]:
    """All strings in a leaf, those in lists included."""
    if isinstance(value, dict):
        return _texts(list(value.values()))
    if isinstance(value, (list, tuple)):
        return [text for member in value for text in _texts(member)]
    return [value] if isinstance(value, str) else []


def _nest(keys: Sequence[str], value: Any) -> Tree:
    return {keys[0]: _nest(keys[1:], value) if len(keys) > 1 else value}


def to_yaml(config: Any) -> str:
    """The resolved configuration, as it is printed and saved with the run."""
    return OmegaConf.to_yaml(OmegaConf.create(to_dict(config)))


def to_dict(config: Any) -> dict[str, Any]:
    return dataclasses.asdict(config)
