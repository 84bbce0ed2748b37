"""Problem sets: rows of JSONL or Parquet -> `Problem`, and a resumable stream of them without replacement.

A row holds "prompt" and says how it is graded, by one of
  "answer": text                                                      compared by math-verify
  "reasoning_gym": {"dataset": name, "entry": {"question", "answer", "metadata"}}    its own verifier
  "rubric": text                                                      for a grader model; may stand beside either
and may hold "id" (default: a hash of the row). Other columns are ignored. In Parquet, where columns have one type,
"reasoning_gym" may also be JSON text.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from megatron_ac2.random_streams import stream
from megatron_ac2.types import Problem, UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MAX_REPORTED = 20
_ACCEPTED_GRADING = '"answer" (text), "reasoning_gym" ({"dataset", "entry"}) or "rubric" (text)'


def load_problems(path: str | Path, tokenizer: PreTrainedTokenizerBase) -> list[Problem]:
    """All problems of a file, in its order, prompts chat-templated with the generation prompt.

    Raises `UserError` that lists every broken row (the first 20 of them) with file and line.
    """
    path = Path(path)
    rows: dict[str, dict[str, Any]] = {}
    lines: dict[str, str] = {}
    errors: list[str] = []
    for place, row in _read_rows(path):
        found, problem_id = _check_row(row)
        if not found and problem_id in lines:
            found = [f'id: found {problem_id!r} again, first at {lines[problem_id]}; accepted: one row an "id"']
        errors += [f"{place}: {error}" for error in found]
        if not found:
            rows[problem_id], lines[problem_id] = row, place
    if errors:
        hidden = len(errors) - MAX_REPORTED
        raise UserError(errors[:MAX_REPORTED] + ([f"{path}: and {hidden} more errors"] if hidden > 0 else []))
    if not rows:
        raise UserError(f"{path}: found no rows; accepted: at least one problem")
    prompts = template_prompts([row["prompt"] for row in rows.values()], tokenizer)
    return [
        Problem(problem_id, np.asarray(ids, dtype=np.int32), row["prompt"], _grading(row))
        for (problem_id, row), ids in zip(rows.items(), prompts, strict=True)
    ]


def template_prompts(questions: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """Each question as the one user turn of a chat, generation prompt included."""
    if not tokenizer.chat_template:
        raise UserError("tokenizer: found no chat template; accepted: a tokenizer of a chat model")
    chats = [[{"role": "user", "content": question}] for question in questions]
    options = {"add_generation_prompt": True, "tokenize": True, "return_dict": True}
    return tokenizer.apply_chat_template(chats, **options)["input_ids"]


def _read_rows(path: Path) -> Iterator[tuple[str, Any]]:
    """(place for messages, row); a line that is no JSON comes out as the `ValueError` it caused."""
    if not path.is_file():
        raise UserError(f"{path}: problem file not found")
    if path.suffix == ".jsonl":
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield f"{path}: line {number}", _parse_json(line)
    elif path.suffix == ".parquet":
        for number, row in enumerate(_read_parquet(path), start=1):
            yield f"{path}: row {number}", row
    else:
        raise UserError(f"{path}: found a file named *{path.suffix}; accepted: .jsonl or .parquet")


def _read_parquet(path: Path) -> list[dict[str, Any]]:
    import pyarrow.parquet

    try:
        rows = pyarrow.parquet.read_table(path).to_pylist()
    except (OSError, ValueError) as error:  # pyarrow's own errors derive from these
        raise UserError(f"{path}: cannot be read as Parquet: {error}") from error
    for row in rows:
        if isinstance(row.get("reasoning_gym"), str):
            row["reasoning_gym"] = _parse_json(row["reasoning_gym"])
    return rows


def _parse_json(text: str | bytes) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        return error


def _check_row(row: Any) -> tuple[list[str], str]:
    """(what is wrong with a row, its id)."""
    if isinstance(row, ValueError):
        return [f"not valid JSON: {row}; accepted: one JSON object a line"], ""
    if not isinstance(row, dict):
        return [f"found {_shown(row)}; accepted: a JSON object"], ""
    errors = [] if _is_text(row.get("prompt")) else [f"prompt: found {_shown(row.get('prompt'))}; accepted: text"]
    given = [key for key in ("answer", "reasoning_gym", "rubric") if row.get(key) is not None]
    if not given:
        errors.append(f"found no way to grade it; accepted: {_ACCEPTED_GRADING}")
    if "answer" in given and "reasoning_gym" in given:
        errors.append('found both "answer" and "reasoning_gym"; accepted: one of them')
    errors += [
        f"{key}: found {_shown(row[key])}; accepted: text"
        for key in given
        if key != "reasoning_gym" and not _is_text(row[key])
    ]
    if "reasoning_gym" in given:
        errors += _check_reasoning_gym(row["reasoning_gym"])
    if row.get("id") is not None and not _is_text(row["id"]):
        errors.append(f"id: found {_shown(row['id'])}; accepted: text, or none")
    return errors, "" if errors else row.get("id") or _hash(row["prompt"], _grading(row))[:16]


def _check_reasoning_gym(source: Any) -> list[str]:
    from reasoning_gym.factory import DATASETS  # a second of import, for those who use it

    if not isinstance(source, dict):
        return [f'reasoning_gym: found {_shown(source)}; accepted: {{"dataset", "entry"}}']
    errors = []
    name = source.get("dataset")
    if name not in DATASETS:
        errors.append(f"reasoning_gym.dataset: found {_shown(name)}; accepted: the name of a reasoning-gym data set")
    entry = source.get("entry")
    missing = {"question", "answer", "metadata"} - set(entry if isinstance(entry, dict) else ())
    if missing:
        errors.append(f"reasoning_gym.entry: found no {', '.join(sorted(missing))}; accepted: an entry as generated")
    return errors


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _shown(value: Any) -> str:
    text = "nothing" if value is None else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _grading(row: Mapping[str, Any]) -> dict[str, Any]:
    return {key: row[key] for key in ("answer", "reasoning_gym", "rubric") if row.get(key) is not None}


def _hash(*parts: Any) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()


class ProblemStream:
    """Distinct problems, each once an epoch, in an order keyed by (seed, epoch); the same on every rank.

    A take may reach over the end of an epoch. Problems that it already holds from the old epoch then move back in the
    new order to just behind this take: none comes twice in one take, and none is skipped or repeated in any epoch.
    """

    def __init__(self, problems: Sequence[Problem], seed: int, shuffle: bool, name: str = "data.train"):
        self.by_id: dict[str, Problem] = {problem.problem_id: problem for problem in problems}
        num_repeated = len(problems) - len(self.by_id)
        if num_repeated:
            raise UserError(f"{name}: found {num_repeated} repeated problem ids; accepted: distinct ids")
        self._problems = list(problems)
        self._seed, self._shuffle, self._name = seed, shuffle, name
        self._fingerprint = _fingerprint(problems)
        self._epoch, self._position = 0, 0
        self._order = self._epoch_order(0)

    def __len__(self) -> int:
        """Problems an epoch."""
        return len(self._problems)

    def take(self, n: int) -> list[Problem]:
        if n > len(self):
            raise UserError(f"{self._name}: found {len(self)} problems, but {n} distinct ones are asked for at once")
        taken = self._order[self._position : self._position + n]
        self._position += len(taken)
        if len(taken) < n:
            num_new = n - len(taken)
            self._start_epoch(self._epoch + 1, held=taken, num_new=num_new)
            taken = np.concatenate([taken, self._order[:num_new]])
            self._position = num_new
        return [self._problems[index] for index in taken]

    def _start_epoch(self, epoch: int, held: np.ndarray, num_new: int) -> None:
        order = self._epoch_order(epoch)
        first = order[~np.isin(order, held)][:num_new]
        self._epoch, self._order = epoch, np.concatenate([first, order[~np.isin(order, first)]])

    def _epoch_order(self, epoch: int) -> np.ndarray:
        if not self._shuffle:
            return np.arange(len(self), dtype=np.int32)
        return stream(self._seed, "problem_order", epoch).permutation(len(self)).astype(np.int32)

    def state_dict(self) -> dict[str, Any]:
        return {
            "epoch": self._epoch,
            "position": self._position,
            "order": self._order.copy(),  # int32[problems an epoch]; depends on where earlier takes ended
            "fingerprint": self._fingerprint,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raises `UserError` when the problem set is not the one that the state was made with."""
        if state["fingerprint"] != self._fingerprint:
            raise UserError(
                f"{self._name}: found another problem set ({len(self)} problems) than the checkpoint was made with "
                f"({len(state['order'])} problems), or another tokenizer; accepted: the same, or run.resume=false"
            )
        self._epoch, self._position = int(state["epoch"]), int(state["position"])
        self._order = np.array(state["order"], dtype=np.int32)


def describe_problems(problems: Sequence[Problem]) -> str:
    """Number and hash of ids, questions, grading, and their order: of a data set whatever the tokenizer."""
    content = _hash([[p.problem_id, p.question, p.grading] for p in problems])[:16]
    return f"{len(problems)} problems, {content}"


def _fingerprint(problems: Sequence[Problem]) -> str:
    """Of ids, prompts as tokenised, grading, and their order."""
    return _hash([[p.problem_id, p.prompt_ids.tolist(), p.grading] for p in problems])
