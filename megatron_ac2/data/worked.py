"""Worked solutions for supervised learning: text rows -> token ids, and the tokens at which a step's label applies."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from megatron_ac2.data.json_text import nested_error, read_lines, shown
from megatron_ac2.data.problems import MAX_REPORTED, placed_prompts
from megatron_ac2.types import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True)
class WorkedSolution:
    """`step_positions[i]` is the index in `token_ids` of the token that completes step i: a value read there sees it"""

    token_ids: np.ndarray  # int32[P + N], ends with the end-of-sequence token
    prompt_len: int
    step_positions: np.ndarray  # int64[K]; also counts P
    step_correct: np.ndarray  # float32[K]: everything up to here is right
    reference_ids: np.ndarray | None  # int32[R], a right solution, ends with the end-of-sequence token

    def behind_reference(self, separator_id: int) -> WorkedSolution:
        """The critic's view: [reference, separator,] prompt, response (as training/value_head_critic.py does)."""
        if self.reference_ids is None:
            return self
        before = np.concatenate([self.reference_ids, [separator_id]]).astype(np.int32)
        return WorkedSolution(
            np.concatenate([before, self.token_ids]),
            self.prompt_len + len(before),
            self.step_positions + len(before),
            self.step_correct,
            None,
        )


def load_worked(path: str | Path, tokenizer: PreTrainedTokenizerBase, eos_id: int) -> list[WorkedSolution]:
    """Rows {"prompt", "response"[, "step_ends" (character offsets), "step_correct", "reference"]} of a JSONL file.

    Raises `UserError` naming the file and line of every broken row (the first 20).
    """
    placed = _read(Path(path))
    rows = list(placed.values())
    prompts = placed_prompts(list(placed), [row["prompt"] for row in rows], tokenizer)
    encoded = tokenizer([row["response"] for row in rows], add_special_tokens=False, return_offsets_mapping=True)
    references = iter(tokenizer([row["reference"] for row in rows if "reference" in row] or [""],
                                add_special_tokens=False)["input_ids"])  # fmt: skip
    return [
        _solution(row, prompt, ids, offsets, next(references) if "reference" in row else None, eos_id)
        for row, prompt, ids, offsets in zip(
            rows, prompts, encoded["input_ids"], encoded["offset_mapping"], strict=True
        )
    ]


def _read(path: Path) -> dict[str, dict[str, Any]]:
    """Rows by their place for messages."""
    if not os.path.isfile(path):
        raise UserError(f"sft.data: file not found: {path}")
    rows, problems = {}, []
    for number, row in read_lines(path):
        place = f"{path}: line {number}"
        found = [f"not JSON: {row}"] if isinstance(row, ValueError) else _row_errors(row)
        problems += [f"{place}: {error}" for error in found]
        rows[place] = row
    if problems:
        raise UserError(problems[:MAX_REPORTED])
    if not rows:
        raise UserError(f"{path}: found no rows")
    return rows


def _row_errors(row: Any) -> list[str]:
    if not isinstance(row, dict) or not all(isinstance(row.get(key), str) for key in ("prompt", "response")):
        return ['accepted: an object with the texts "prompt" and "response"']
    texts = {key: row[key] for key in ("prompt", "response", "reference") if key in row}
    errors = [f'"{key}": {error}' for key, value in texts.items() if (error := nested_error(value))]
    if not isinstance(row.get("reference", ""), str):
        errors.append(f'"reference": found {shown(row["reference"])}, accepted: text, or none')
    ends, correct = row.get("step_ends", []), row.get("step_correct", [])
    if not isinstance(ends, list) or any(type(end) is not int for end in ends):
        return [*errors, f'"step_ends": found {shown(ends)}, accepted: a list of character offsets']
    if not isinstance(correct, list) or any(value not in (0, 1) for value in correct):
        return [*errors, f'"step_correct": found {shown(correct)}, accepted: a list of 0 and 1']
    if len(ends) != len(correct):
        errors.append('"step_ends" and "step_correct" differ in length')
    if any(end <= start for start, end in zip([0, *ends], ends)) or ends[-1:] > [len(row["response"])]:
        errors.append(f'"step_ends": found {shown(ends)}, accepted: rising offsets from 1 to {len(row["response"])}')
    return errors


def _solution(
    row: dict[str, Any],
    prompt: Sequence[int],
    ids: Sequence[int],
    offsets: Sequence[tuple[int, int]],
    reference: Sequence[int] | None,
    eos_id: int,
) -> WorkedSolution:
    ends = np.array([end for _, end in offsets])
    steps = np.array(row.get("step_ends", []), dtype=np.int64)
    return WorkedSolution(
        token_ids=np.array([*prompt, *ids, eos_id], dtype=np.int32),
        prompt_len=len(prompt),
        step_positions=len(prompt) + np.searchsorted(ends, steps).astype(np.int64),
        step_correct=np.array(row.get("step_correct", []), dtype=np.float32),
        reference_ids=None if reference is None else np.array([*reference, eos_id], dtype=np.int32),
    )


def step_values(rows: Sequence[WorkedSolution]) -> list[np.ndarray]:
    """Value labels float32[K] a row: 0 once a step was wrong, else the chance that such a solution ends right.

    That chance is counted in the rows themselves, by the number of steps to go: of those that were right so far, the
    share whose last step is right too. It is the value of the demonstrator's policy, as far as the data tell.
    """
    longest = max(len(row.step_correct) for row in rows)
    so_far, to_the_end = np.zeros(longest), np.zeros(longest)  # [steps to go]
    for row in rows:
        to_go = np.arange(len(row.step_correct))[::-1]
        so_far[to_go] += row.step_correct
        to_the_end[to_go] += row.step_correct * row.step_correct[-1]
    chance = to_the_end / np.maximum(so_far, 1)
    return [(row.step_correct * chance[: len(row.step_correct)][::-1]).astype(np.float32) for row in rows]
