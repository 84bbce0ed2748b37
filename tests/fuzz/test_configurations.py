"""Whatever a configuration holds, it is loaded or refused in words: no other exception, no number out of range."""

from __future__ import annotations

import copy
import math
import typing
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ac2.config import Config
from megatron_ac2.config_file import load_config, split_arguments, to_dict, to_yaml
from megatron_ac2.types import UserError

MINIMAL = {"model": {"path": "m"}, "data": {"train": "t.jsonl"}}


def schema_kinds(schema: type, prefix: str = "") -> Iterator[tuple[str, type]]:
    """Sections and fields, those of a section that may be null too, with what they hold where they hold something."""
    hints = typing.get_type_hints(schema)
    for field in fields(schema):
        kind = next((k for k in typing.get_args(hints[field.name]) if is_dataclass(k) or k in (int, float, str)), None)
        kind = hints[field.name] if kind is None or hints[field.name] == dict[str, Any] else kind
        yield f"{prefix}{field.name}", kind
        if is_dataclass(kind):
            yield from schema_kinds(kind, f"{prefix}{field.name}.")


def runs(max_examples: int) -> Callable:
    return settings(max_examples=max_examples, derandomize=True, deadline=None, database=None)


KINDS = dict(schema_kinds(Config))
KEYS = [*KINDS, "megatron.x", "megatron.x.y", "engine.options.seed-like", "nonsense", "run.nonsense", "run.seed.x"]
TEXTS = [
    "", " ", "x", "1", "nan", "1e999", "9" * 5000, "\0", "\x1b[0m", "\ud800", "a\nb", "\u2028", "a" * 300, "a/" * 2000,
    "???", r"\???", "\\", "=", "~", "<<", "2020-01-01", "1:30",
]  # fmt: skip
REFERENCES = [
    "${run.name}", "${run.dir}", "${nope}", "${oc.env:NOPE}", "${oc.env:HOME}", "${foo:1}", "${", "${}", "${.seed}",
    "${..x}", "${...run.seed}", "x${run.seed}", r"\${x}", "${critic}", "${parallel}", "${megatron}", "${model}",
    "${oc.decode:'???'}", "${oc.decode:'[1,2]'}", "${oc.create:{a: 1}}", "${oc.create:{1: 2}}", "${oc.dict.keys:run}",
    "${[1]}", "${run[0]}", "${data.train}", "${actor.optimizer.betas}", "${" * 60,
]  # fmt: skip
NUMBERS = [
    math.nan, math.inf, -math.inf, -1, 0, 1, 2, -0.0, 0.5, 1e300, -1e300, 5e-324, 10**23, -(10**23), 2**31, 2**63,
    10**400, 10**5000,
]  # fmt: skip
REFERENCE, TEXT, NUMBER = map(st.sampled_from, (REFERENCES, TEXTS, NUMBERS))
SCALARS = st.one_of(REFERENCE, TEXT, NUMBER, st.sampled_from([None, True, False]), st.floats(), st.text(max_size=8))
VALUES = st.one_of(
    NUMBER,
    REFERENCE,
    TEXT,
    st.integers(1, 100),
    st.floats(0, 1),
    SCALARS,
    st.lists(SCALARS, max_size=3),
    st.dictionaries(st.sampled_from(["", "tensor", "x", "a.b", "\ud800", "keys", "_content"]), SCALARS, max_size=2),
    st.sampled_from([[0.9, 0.99], [math.nan, 0.5], {"a": {"b": [math.nan]}}, {1: 2}, {None: 3}, [[[]]], [{}]]),
)
OF_KIND = {
    int: st.one_of(st.integers(-1, 100), NUMBER, REFERENCE),
    float: st.one_of(st.floats(0, 1), st.floats(), NUMBER, REFERENCE),
    str: st.one_of(TEXT, REFERENCE, st.text(max_size=8)),
}
KEY = st.sampled_from(KEYS)
CHANGE = KEY.flatmap(lambda key: st.tuples(st.just(key), OF_KIND.get(KINDS.get(key), VALUES)))
CHANGES = st.lists(st.one_of(CHANGE, CHANGE, st.tuples(KEY, VALUES)), min_size=1, max_size=2).map(dict)


def in_yaml(value: Any) -> str:
    """Numbers that Python does not print, too."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{in_yaml(key)}: {in_yaml(member)}" for key, member in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(in_yaml, value)) + "]"
    if isinstance(value, int) and not isinstance(value, bool):
        return hex(value) if abs(value) > 10**500 else str(value)  # which no limit of Python's keeps from being read
    if isinstance(value, str):
        return yaml.safe_dump(value, default_style='"', width=math.inf).strip()
    return yaml.safe_dump(value).removesuffix("...\n").strip()


def in_file(changes: dict[str, Any]) -> str:
    tree: dict[str, Any] = {}
    for key, value in changes.items():
        *above, last = key.split(".")
        section = tree
        for name in above:
            section = section.setdefault(name, {}) if isinstance(section.get(name, {}), dict) else section
        section[last] = copy.deepcopy(value)
    return in_yaml(tree)


def check(load: Callable[[], Any], folder: Path) -> bool:
    """Whether it was accepted. Fails for anything that is neither a good configuration nor a list of problems."""
    try:
        config = load()
    except UserError as error:
        assert error.problems
        for problem in error.problems:
            assert problem.isprintable() and ": " in problem and len(problem) < 2000, problem
        return False
    for key, value in numbers(to_dict(config)):
        assert math.isfinite(value), (key, value)
    path = folder / "again.yaml"
    path.write_text(to_yaml(config), encoding="utf-8")
    assert to_yaml(load_config(path)) == to_yaml(config)  # an open section may refer to one with tuples: lists, now
    return True


def numbers(value: Any, key: str = "") -> Iterator[tuple[str, float]]:
    if isinstance(value, dict):
        for name, member in value.items():
            yield from numbers(member, f"{key}.{name}" if key else name)
    elif isinstance(value, (list, tuple)):
        for member in value:
            yield from numbers(member, key)
    elif isinstance(value, (int, float)):
        yield key, value


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("fuzz")
    (path / "base.yaml").write_text(yaml.safe_dump(MINIMAL))
    return path


@runs(600)
@given(changes=CHANGES)
def test_hostile_values_in_a_file(folder, changes):
    path = folder / "hostile.yaml"
    path.write_text(in_file(changes))
    check(lambda: load_config([folder / "base.yaml", path]), folder)


@runs(600)
@given(changes=CHANGES)
def test_hostile_values_on_the_command_line(folder, changes):
    overrides = [f"{key}={value if isinstance(value, str) else in_yaml(value)}" for key, value in changes.items()]
    check(lambda: load_config(folder / "base.yaml", overrides), folder)


TOKENS = st.sampled_from([
    "[", "]", "{", "}", "&a ", "*a", "<<: *a", "!!python/object:x ", "!!int ", "!!binary ", "!!map ", "\t", "\0", "- ",
    ": ", "? ", "|", ">", "'", '"', "%", "@", "\ufeff", "\x85", "\n", "---\n", "...\n", "  ", "run: ", "seed", "1: ",
    "~: ", "#", "\xff", "${",
])  # fmt: skip
PIECES = [
    "run:\n  seed: 1\n  name: &a blue\n", "critic: {parallel: {tensor: 2}, kind: value_head}\n", "# words\n",
    "megatron: &b {x: [1, 2.5, .nan]}\n", "engine:\n  options:\n    <<: *b\n", "data: &c {train: t}\n",
]  # fmt: skip


@runs(600)
@given(data=st.data())
def test_mangled_text(folder, data):
    text = "".join(data.draw(st.lists(st.sampled_from(PIECES), min_size=1, max_size=4)))
    for _ in range(data.draw(st.integers(1, 4))):
        start = data.draw(st.integers(0, len(text)))
        text = text[:start] + data.draw(TOKENS) + text[start + data.draw(st.integers(0, 3)) :]
    path = folder / "mangled.yaml"
    path.write_bytes(text.encode(data.draw(st.sampled_from(["utf-8", "latin-1", "utf-16"])), "ignore"))
    check(lambda: load_config([folder / "base.yaml", path]), folder)


STARTS = st.sampled_from(["run.", ".run", "run..seed", "run[0]", "", "run.seed", "megatron.a.b.1", "\xe9"])
ARGUMENTS = st.one_of(st.text(max_size=12), st.builds("{}={}".format, STARTS, st.text(max_size=6)))


@runs(200)
@given(arguments=st.lists(ARGUMENTS, min_size=1, max_size=3))
def test_arguments_of_any_kind(folder, arguments):
    check(lambda: load_config(*split_arguments([str(folder / "base.yaml"), *arguments])), folder)
    check(lambda: load_config(folder / "base.yaml", arguments), folder)
