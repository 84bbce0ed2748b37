"""YAML files and dotted overrides -> a checked configuration; every error at once, before any rank starts."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from megatron_ac2.config import Config
from megatron_ac2.config_checks import check_config
from megatron_ac2.types import UserError

COMMAND_LINE = "command line"
_OVERRIDE = re.compile(r"[A-Za-z_][\w.\[\]-]*=")


def split_arguments(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """`BASE.yaml [OVERLAY.yaml ...] [section.field=value ...]`, in any order -> files, overrides.

    Raises `UserError` for every argument that is neither, and when no file is named.
    """
    overrides = [argument for argument in arguments if _OVERRIDE.match(argument)]
    others = [argument for argument in arguments if not _OVERRIDE.match(argument)]
    paths = [text for text in others if Path(text).suffix in (".yaml", ".yml") or Path(text).is_file()]
    problems = [
        f"command line: found {text!r}, accepted: FILE.yaml or section.field=value"
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
    key and bad type, or else every missing value, or else every impossible value and combination.
    """
    paths = [path] if isinstance(path, (str, Path)) else list(path)
    base = OmegaConf.structured(schema)
    trees, problems = [], []
    readers = [(str(path), partial(_read_file, Path(path))) for path in paths]
    for origin, read in [*readers, (COMMAND_LINE, partial(_read_overrides, overrides or []))]:
        try:
            trees.append(read())
            problems += _merge_errors(base, trees[-1], origin)
        except UserError as error:
            problems += error.problems
    if problems:
        raise UserError(problems)
    merged = OmegaConf.merge(base, *trees)
    if missing := sorted(OmegaConf.missing_keys(merged)):
        names = ", ".join(map(str, paths))
        raise UserError([f"{key}: required, but {names} does not set it" for key in missing])
    config = OmegaConf.to_object(merged)
    if isinstance(config, Config) and (problems := check_config(config)):
        raise UserError(problems)
    return config


def _read_file(path: Path) -> DictConfig:
    if not path.is_file():
        raise UserError(f"config file not found: {path}")
    try:
        tree = OmegaConf.load(path)
    except Exception as error:  # yaml's own message names the line
        raise UserError(f"{path}: cannot be read as YAML: {error}") from error
    if not isinstance(tree, DictConfig):
        raise UserError(f"{path}: expected a mapping of sections at the top, found {type(tree).__name__}")
    return tree


def _read_overrides(overrides: Sequence[str]) -> DictConfig:
    try:
        return OmegaConf.from_dotlist(list(overrides))
    except Exception as error:
        raise UserError(f"{COMMAND_LINE}: cannot be read as section.field=YAML: {error}") from error


def _merge_errors(base: DictConfig, changes: DictConfig, origin: str) -> list[str]:
    """All at once where nothing is wrong; else leaf by leaf, so that one bad key does not hide the next."""
    whole = _merge_error(base, changes)
    if whole is None:
        return []
    parts = [(key, value, _merge_error(base, _nest(key, value))) for key, value in _leaves(changes)]
    found = [f"{key}: {reason} (found {value!r}, in {origin})" for key, value, reason in parts if reason]
    return found or [f"{origin}: {whole}"]


def _merge_error(base: DictConfig, changes: DictConfig) -> str | None:
    try:
        OmegaConf.merge(base, changes)
    except OmegaConfBaseException as error:
        return str(error).splitlines()[0]
    return None


def _leaves(tree: DictConfig, prefix: str = "") -> list[tuple[str, Any]]:
    raw = OmegaConf.to_container(tree, resolve=False)
    found: list[tuple[str, Any]] = []

    def walk(node: Any, key: str) -> None:
        if isinstance(node, dict) and node:
            for name, child in node.items():
                walk(child, f"{key}.{name}" if key else str(name))
        elif key:
            found.append((key, node))

    walk(raw, prefix)
    return found


def _nest(key: str, value: Any) -> DictConfig:
    for part in reversed(key.split(".")):
        value = {part: value}
    return OmegaConf.create(value)


def to_yaml(config: Any) -> str:
    """The resolved configuration, as it is printed and saved with the run."""
    return OmegaConf.to_yaml(OmegaConf.structured(config), resolve=True)


def to_dict(config: Any) -> dict[str, Any]:
    return dataclasses.asdict(config)
