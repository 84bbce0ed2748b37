"""Problem files as nobody should write them: either problems that a run can use come out, or lines that say where."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from megatron_ac2.data.problems import describe_problems, load_problems
from megatron_ac2.types import Problem, UserError
from tools.quickstart_model import train_tokenizer

ENTRY = {"question": "2 + 2 =", "answer": "4", "metadata": {"expression": "2 + 2"}}
GYM = {"dataset": "chain_sum", "entry": ENTRY}
ROWS = [{"id": "a", "prompt": "1+1?", "answer": "2"}, {"prompt": "2+2?", "reasoning_gym": GYM},
        {"prompt": "Prove it.", "rubric": "a full proof"}]  # fmt: skip
FIELDS = ("id", "prompt", "answer", "reasoning_gym", "rubric", "ignored", "dataset", "entry", "question", "metadata")


def fuzz(num: int):
    """So many examples, the same at every run."""
    quiet = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large]
    return settings(
        max_examples=num, derandomize=True, deadline=None, database=None, suppress_health_check=quiet
    )  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(["user assistant\n"])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("files")


def check_file(path: Path, tokenizer) -> None:
    try:
        problems = load_problems(path, tokenizer)
    except UserError as error:
        assert error.problems
        for problem in error.problems:
            assert problem.startswith(f"{path}: ") and len(problem.splitlines()) == 1, repr(problem)
            assert len(problem.encode()) < 1500
        return
    assert problems and describe_problems(problems)
    for problem in problems:
        check_problem(problem, tokenizer)


def check_problem(problem: Problem, tokenizer) -> None:
    assert problem.problem_id.encode() and len(problem.problem_id.splitlines()) == 1
    assert problem.question.strip() and problem.question.encode()
    assert problem.prompt_ids.dtype == np.int32 and problem.prompt_ids.ndim == 1 and len(problem.prompt_ids)
    assert tokenizer.decode(problem.prompt_ids)
    again = pickle.loads(pickle.dumps(problem))
    assert (again.problem_id, again.grading) == (problem.problem_id, problem.grading)
    assert problem.grading and json.dumps(problem.grading, default=str, ensure_ascii=False).encode()
    source = problem.grading.get("reasoning_gym")
    assert source is None or {"question", "answer", "metadata"} <= set(source["entry"]) and hash(source["dataset"])


def deep(num: int) -> str:
    return "[" * num + "]" * num


any_text = st.text(st.characters(exclude_categories=()), max_size=8)  # half surrogates included
snippets = st.sampled_from([
    "null", "true", "7", "-0.5", "NaN", "-Infinity", "1e999", "1" * 5000, '"\\ud800"', '"a\\u0000"', '" "', '"ok"',
    "[]", '{"a": 1, "a": 2}', '"line\\nbreak"', '"\\u2028."', json.dumps("long" * 100), deep(90), deep(300), deep(5000),
    json.dumps(GYM), json.dumps(ENTRY), '{"dataset": ["chain_sum"], "entry": {}}', '{"dataset": {}, "entry": null}',
    json.dumps(GYM | {"entry": ENTRY | {"answer": None}}), json.dumps({"dataset": "boxnet", "entry": ENTRY}),
])  # fmt: skip
values = st.one_of(snippets, any_text.map(json.dumps), st.recursive(
    st.one_of(st.none(), st.floats(), any_text), lambda inner: st.lists(inner, max_size=3), max_leaves=4
).map(json.dumps))  # fmt: skip


@st.composite
def lines(draw) -> str:
    """A good row with fields replaced, added or written twice, and perhaps an entry that is wrong inside."""
    row = {key: json.dumps(value) for key, value in draw(st.sampled_from(ROWS)).items()}
    changes = draw(st.lists(st.tuples(st.sampled_from(FIELDS), values), max_size=3))
    if "reasoning_gym" in row and draw(st.booleans()):
        inside = {key: json.dumps(value) for key, value in (ENTRY if draw(st.booleans()) else GYM).items()}
        entry = written(inside | dict(changes))
        row["reasoning_gym"] = entry if "entry" in inside else written({"dataset": '"chain_sum"', "entry": entry})
        changes = []
    elif draw(st.integers(0, 9)):
        row, changes = row | dict(changes), []
    return written(row, changes)


def written(row: dict[str, str], more: list[tuple[str, str]] = ()) -> str:
    return "{" + ", ".join(f'"{key}": {value}' for key, value in [*row.items(), *more]) + "}"


@fuzz(1300)
@given(rows=st.lists(lines(), min_size=1, max_size=3))
@example(rows=[deep(100_000)])
@example(rows=[written({"prompt": '"q"', "answer": '"1"', "ignored": deep(100_000)})])
def test_hostile_values(rows: list[str], tokenizer, folder: Path) -> None:
    path = folder / "rows.jsonl"
    path.write_text("\n".join(rows))
    check_file(path, tokenizer)


GOOD = "".join(json.dumps(row) + "\n" for row in ROWS).encode()


@st.composite
def mangled(draw, good: bytes) -> bytes:
    content = bytearray(good)
    for _ in range(draw(st.integers(0, 3))):
        start = draw(st.integers(0, len(content)))
        end = min(len(content), start + draw(st.integers(0, 9)))
        content[start:end] = draw(st.one_of(st.binary(max_size=6), st.just(bytes(content[start:end]) * 2)))
    prefix = draw(st.sampled_from([b"", b"", b"\xef\xbb\xbf", b"\x1f\x8b", b"\xff\xfe", b"\n \n", b"\0"]))
    return prefix + bytes(content[: draw(st.sampled_from([None, None, 0, 30]))])


@fuzz(500)
@given(content=mangled(GOOD))
@example(content=b"")
@example(content=b"\xef\xbb\xbf")
@example(content=GOOD.decode().encode("utf-16"))
@example(content=b"\xef\xbb\xbf" + GOOD)
def test_mangled_bytes(content: bytes, tokenizer, folder: Path) -> None:
    path = folder / "bytes.jsonl"
    path.write_bytes(content)
    check_file(path, tokenizer)


def not_utf8() -> pyarrow.Array:
    return pyarrow.array([b"q\xff", b"ok"]).view(pyarrow.string())


COLUMNS = [
    pyarrow.array(["a", "b"]), pyarrow.array(["a", None]), pyarrow.array(["1+1?", "2"]).dictionary_encode(),
    pyarrow.array([b"a", b"b"]), pyarrow.array([1, 2]), pyarrow.array([0.5, float("nan")]),
    pyarrow.array([2**62, 1], pyarrow.timestamp("us")), pyarrow.array([1, 2], pyarrow.timestamp("ns")),
    pyarrow.array([["a"], []]), pyarrow.nulls(2), pyarrow.array([GYM, None]), pyarrow.array([json.dumps(GYM), "{"]),
    pyarrow.array([[("a", 1)], []], pyarrow.map_(pyarrow.string(), pyarrow.int64())), not_utf8(),
    pyarrow.array([GYM | {"entry": ENTRY | {"metadata": {"when": 7.0, "bytes": b"b"}}}] * 2),
    pyarrow.array(["a", "b"], pyarrow.large_string()), pyarrow.array([True, False]),
    pyarrow.array([1, 2], pyarrow.timestamp("s", "Nowhere/Town")), pyarrow.array(["deep", deep(5000)]),
]  # fmt: skip
tables = st.lists(st.tuples(st.sampled_from(FIELDS[:6]), st.sampled_from(COLUMNS)), min_size=1, max_size=4)


@fuzz(200)
@given(columns=tables, good=st.booleans(), cut=st.sampled_from([None, None, None, 7, 100, -3]), data=st.data())
def test_parquet(columns, good: bool, cut: int | None, data: st.DataObject, tokenizer, folder: Path) -> None:
    path = folder / "table.parquet"
    named = ([("prompt", COLUMNS[0]), ("answer", COLUMNS[0])] if good else []) + columns
    table = pyarrow.Table.from_arrays([column for _, column in named], [name for name, _ in named])
    pyarrow.parquet.write_table(table, path)
    content = path.read_bytes()[:cut]
    path.write_bytes(data.draw(mangled(content)) if cut is None and data.draw(st.booleans()) else content)
    check_file(path, tokenizer)
