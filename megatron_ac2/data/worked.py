"""Worked solutions for supervised learning: text rows -> token ids, and the tokens at which a step's label applies."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from megatron_ac2.data.problems import template_prompts
from megatron_ac2.types import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True)
class WorkedSolution:
    """`step_positions[i]` is the index in `token_ids` of the token that completes step i; a value read there sees it."""

    token_ids: np.ndarray  # int32[P + N], ends with the end-of-sequence token
    prompt_len: int
    step_positions: np.ndarray  # int64[K]
    step_correct: np.ndarray  # float32[K]: everything up to here is right


def load_worked(path: str | Path, tokenizer: PreTrainedTokenizerBase, eos_id: int) -> list[WorkedSolution]:
    """Rows {"prompt", "response"[, "step_ends" (character offsets), "step_correct"]} of a JSONL file.

    Raises `UserError` naming the file and line of every broken row (the first 20).
    """
    rows = _read(Path(path))
    prompts = template_prompts([row["prompt"] for row in rows], tokenizer)
    encoded = tokenizer([row["response"] for row in rows], add_special_tokens=False, return_offsets_mapping=True)
    return [
        _solution(row, prompt, ids, offsets, eos_id)
        for row, prompt, ids, offsets in zip(
            rows, prompts, encoded["input_ids"], encoded["offset_mapping"], strict=True
        )
    ]


def _read(path: Path) -> list[dict[str, Any]]:
    if not path.is_file():
        raise UserError(f"sft.data: file not found: {path}")
    rows, problems = [], []
    with path.open() as file:
        for number, line in enumerate(file, start=1):
            try:
                row = json.loads(line)
            except ValueError as error:
                problems.append(f"{path}: line {number}: not JSON: {error}")
                continue
            if not isinstance(row, dict) or not all(isinstance(row.get(k), str) for k in ("prompt", "response")):
                problems.append(f'{path}: line {number}: accepted: an object with the texts "prompt" and "response"')
            elif len(row.get("step_ends", ())) != len(row.get("step_correct", ())):
                problems.append(f'{path}: line {number}: "step_ends" and "step_correct" differ in length')
            else:
                rows.append(row)
    if problems:
        raise UserError(problems[:20])
    if not rows:
        raise UserError(f"{path}: found no rows")
    return rows


def _solution(
    row: dict[str, Any], prompt: Sequence[int], ids: Sequence[int], offsets: Sequence[tuple[int, int]], eos_id: int
) -> WorkedSolution:
    ends = np.array([end for _, end in offsets])
    steps = np.array(row.get("step_ends", []), dtype=np.int64)
    return WorkedSolution(
        token_ids=np.array([*prompt, *ids, eos_id], dtype=np.int32),
        prompt_len=len(prompt),
        step_positions=len(prompt) + np.searchsorted(ends, steps).astype(np.int64),
        step_correct=np.array(row.get("step_correct", []), dtype=np.float32),
    )
