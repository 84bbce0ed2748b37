"""Problem sets: rows of JSONL or Parquet -> `Problem`, and a resumable stream of them without replacement.

A row holds "prompt" and says how it is graded, by one of
  "answer": text                                                      compared by math-verify
  "reasoning_gym": {"dataset": name, "entry": {"question", "answer", "metadata"}}    its own verifier
  "rubric": text                                                      for a grader model; may stand beside either
and may hold "id" (one line of at most 256 characters; default: a hash of the row). Other columns are ignored. In
Parquet, where columns have one type, "reasoning_gym" may also be JSON text.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from megatron_ac2.data.json_text import reason, shown
from megatron_ac2.data.problem_rows import grading_of, read_rows, row_errors
from megatron_ac2.random_streams import stream
from megatron_ac2.types import Problem, UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MAX_REPORTED = 20


def load_problems(path: str | Path, tokenizer: PreTrainedTokenizerBase | None) -> list[Problem]:
    """All problems of a file, in its order, prompts chat-templated with the generation prompt.

    Raises `UserError` that lists every broken row (the first 20 of them) with file and line. Without a tokenizer, which
    then is the mistake of another file, the rows are looked at and none comes out.
    """
    path = Path(path)
    rows: dict[str, dict[str, Any]] = {}
    lines: dict[str, str] = {}
    errors: list[str] = []
    for place, row in read_rows(path):
        found, problem_id = row_errors(row), ""
        if not found:
            problem_id = row.get("id") or _hash(row["prompt"], grading_of(row))[:16]
        if problem_id in lines:
            found = [f'id: found {shown(problem_id)} again, first at {lines[problem_id]}; accepted: one row an "id"']
        errors += [f"{place}: {error}" for error in found]
        if not found:
            rows[problem_id], lines[problem_id] = row, place
    if errors:
        hidden = len(errors) - MAX_REPORTED
        raise UserError(errors[:MAX_REPORTED] + ([f"{path}: and {hidden} more errors"] if hidden > 0 else []))
    if not rows:
        raise UserError(f"{path}: found no rows; accepted: at least one problem")
    if tokenizer is None:
        return []
    prompts = placed_prompts(list(lines.values()), [row["prompt"] for row in rows.values()], tokenizer)
    return [
        Problem(problem_id, np.asarray(ids, dtype=np.int32), row["prompt"], grading_of(row))
        for (problem_id, row), ids in zip(rows.items(), prompts, strict=True)
    ]


def placed_prompts(
    places: Sequence[str], questions: Sequence[str], tokenizer: PreTrainedTokenizerBase
) -> list[list[int]]:
    """`template_prompts`; its `UserError` names the places of the questions that cannot be, 20 at most."""
    try:
        prompts = template_prompts(questions, tokenizer)
        errors = [
            f"{place}: prompt: found {shown(question)}, of which the tokenizer makes no token; accepted: text"
            for place, question, ids in zip(places, questions, prompts, strict=True)
            if not len(ids)
        ]
    except UserError:
        errors = list(islice(_template_errors(places, questions, tokenizer), MAX_REPORTED))
        if not errors:  # of all together, and of none alone
            raise
    if errors:
        raise UserError(errors[:MAX_REPORTED])
    return prompts


def _template_errors(
    places: Sequence[str], questions: Sequence[str], tokenizer: PreTrainedTokenizerBase
) -> Iterator[str]:
    for place, question in zip(places, questions, strict=True):
        try:
            template_prompts([question], tokenizer)
        except UserError as error:
            yield from (f"{place}: prompt: {problem}" for problem in error.problems)


def template_prompts(questions: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """Each question as the one user turn of a chat, generation prompt included."""
    if not tokenizer.chat_template:
        raise UserError("tokenizer: found no chat template; accepted: a tokenizer of a chat model")
    chats = [[{"role": "user", "content": question}] for question in questions]
    options = {"add_generation_prompt": True, "tokenize": True, "return_dict": True}
    try:
        return tokenizer.apply_chat_template(chats, **options)["input_ids"]
    except Exception as error:  # a template is a program, and may raise what it likes
        raise UserError(f"tokenizer: its chat template fails: {type(error).__name__}: {reason(error)}") from error


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
