"""Rows of a problem file, as they are and what is wrong with each; data/problems.py says what a row holds."""

from __future__ import annotations

import os
import unicodedata
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from megatron_ac2.data.json_text import nested_error, parse_json, read_lines, reason, shown, text_error
from megatron_ac2.types import UserError

_GRADING = ("answer", "reasoning_gym", "rubric")
_COLUMNS = ("id", "prompt", *_GRADING)
_ACCEPTED_GRADING = '"answer" (text), "reasoning_gym" ({"dataset", "entry"}) or "rubric" (text)'
_MAX_ID = 256
_LINE_BREAKING = ("Cc", "Zl", "Zp")  # Unicode's categories of control characters, line and paragraph separators
# What their verifiers ask is in the metadata; every other data set compares with its answer, and cannot with none.
WITHOUT_ANSWER = frozenset({"boxnet", "graph_color", "propositional_logic", "rubiks_cube", "rush_hour"})


def read_rows(path: Path) -> Iterator[tuple[str, Any]]:
    """(place for messages, row); a row that cannot be read comes out as a `ValueError` that says why."""
    if not os.path.isfile(path):  # the path's own method raises for a name too long, or a closed folder
        raise UserError(f"{path}: problem file not found")
    if path.suffix == ".jsonl":
        for number, row in read_lines(path):
            is_json = not isinstance(row, ValueError)
            error = None if is_json else ValueError(f"not valid JSON: {row}; accepted: one JSON object a line")
            yield f"{path}: line {number}", row if is_json else error
    elif path.suffix == ".parquet":
        for number, row in enumerate(_read_parquet(path), start=1):
            yield f"{path}: row {number}", row
    else:
        raise UserError(f"{path}: found a file named *{path.suffix}; accepted: .jsonl or .parquet")


def grading_of(row: dict[str, Any]) -> dict[str, Any]:
    return {key: row[key] for key in _GRADING if row.get(key) is not None}


def row_errors(row: Any) -> list[str]:
    """What is wrong with a row, or with the reading of it."""
    if isinstance(row, ValueError):
        return [str(row)]
    if not isinstance(row, dict):
        return [f"found {shown(row)}; accepted: a JSON object"]
    given = grading_of(row)
    errors = [f"prompt: {error}"] if (error := text_error(row.get("prompt"))) else []
    if not given:
        errors.append(f"found no way to grade it; accepted: {_ACCEPTED_GRADING}")
    if "answer" in given and "reasoning_gym" in given:
        errors.append('found both "answer" and "reasoning_gym"; accepted: one of them')
    texts = {key: text_error(value) for key, value in given.items() if key != "reasoning_gym"}
    errors += [f"{key}: {error}" for key, error in texts.items() if error]
    if "reasoning_gym" in given:
        errors += _reasoning_gym_errors(given["reasoning_gym"])
    if row.get("id") is not None and (error := _id_error(row["id"])):
        errors.append(f"id: {error}")
    return errors


def _id_error(value: Any) -> str | None:
    """Ids stand in messages and checkpoints."""
    if (error := text_error(value)) is not None:
        return f"{error}, or none"
    if len(value) > _MAX_ID:
        return f"found {shown(value)}, {len(value)} characters; accepted: at most {_MAX_ID}"
    if any(unicodedata.category(character) in _LINE_BREAKING for character in value):
        return f"found {shown(value)}; accepted: text of one line, without control characters"
    return None


def _reasoning_gym_errors(source: Any) -> list[str]:
    from reasoning_gym.factory import DATASETS  # a second of import, for those who use it

    if isinstance(source, ValueError):
        return [f"reasoning_gym: not valid JSON: {source}; accepted: an object, or its JSON text"]
    if not isinstance(source, dict):
        return [f'reasoning_gym: found {shown(source)}; accepted: {{"dataset", "entry"}}']
    if (error := nested_error(source)) is not None:
        return [f"reasoning_gym: {error}"]
    errors = []
    name = source.get("dataset")
    if not isinstance(name, str) or name not in DATASETS:
        errors.append(f"reasoning_gym.dataset: found {shown(name)}; accepted: the name of a reasoning-gym data set")
    elif name == "composite":
        errors.append(
            f"reasoning_gym.dataset: found {name!r}, which has no verifier of its own; accepted: the data set that "
            "the entry's metadata.source_dataset names"
        )
    return errors + _entry_errors(source.get("entry"), name)


def _entry_errors(entry: Any, dataset: Any) -> list[str]:
    missing = {"question", "answer", "metadata"} - set(entry if isinstance(entry, dict) else ())
    if missing:
        return [f"reasoning_gym.entry: found no {', '.join(sorted(missing))}; accepted: an entry as generated"]
    answer = entry["answer"]
    without = isinstance(dataset, str) and dataset in WITHOUT_ANSWER
    wrong = {
        "question": None if isinstance(entry["question"], str) else "text",
        "answer": None if isinstance(answer, str) or (answer is None and without) else "text",
        "metadata": None if isinstance(entry["metadata"], dict) else "an object",
    }
    return [
        f"reasoning_gym.entry.{key}: found {shown(entry[key])}; accepted: {accepted}, as generated"
        for key, accepted in wrong.items()
        if accepted
    ]


def _read_parquet(path: Path) -> list[Any]:
    """Only the columns that a row is made of: the others may hold what Python cannot, and more than memory can."""
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            names = file.schema_arrow.names
            table = None if _column_errors(names) else file.read(columns=[name for name in names if name in _COLUMNS])
    except Exception as error:  # pyarrow's own, of half a dozen kinds
        raise UserError(f"{path}: cannot be read as Parquet: {reason(error)}") from error
    if errors := _column_errors(names):
        raise UserError([f"{path}: {error}" for error in errors])
    try:
        rows = table.to_pylist()
    except Exception:
        rows = [_parquet_row(table, number) for number in range(table.num_rows)]
    return [_with_json(row) for row in rows]


def _column_errors(names: Sequence[str]) -> list[str]:
    errors = [f"found the column {name!r} twice; accepted: once" for name in _COLUMNS if names.count(name) > 1]
    return errors if "prompt" in names else [*errors, f'found the columns {shown(names)}; accepted: with a "prompt"']


def _parquet_row(table: Any, number: int) -> Any:
    try:
        return table.slice(number, 1).to_pylist()[0]
    except Exception as error:  # text that is no UTF-8, a time that Python cannot hold
        return ValueError(f"cannot be read: {reason(error)}; accepted: text")


def _with_json(row: Any) -> Any:
    """`row` with the object that its "reasoning_gym" says in JSON."""
    if isinstance(row, ValueError) or not isinstance(row.get("reasoning_gym"), str):
        return row
    try:
        return row | {"reasoning_gym": parse_json(row["reasoning_gym"])}
    except ValueError as error:
        return row | {"reasoning_gym": error}
