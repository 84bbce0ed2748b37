"""The generative critic's prompt, and its answer on the grid (docs/ALGORITHM.md §4; the wording is ours).

problem turn | partial response, thinking closed | "how much credit?" turn | empty thinking + answer stem | value

The response and the reference are spliced in as the ids that were sampled, never decoded and tokenised again. The
wording is a trained format: `PROMPT_HASH` belongs into every checkpoint of a critic.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from decimal import Decimal
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

GRID = tuple(round(0.1 * i, 1) for i in range(11))

_QUESTION = (
    "Stop here. The attempt above may be unfinished: it would now be continued from exactly where it stops, with at "
    "most {remaining_tokens} more tokens, and its final answer would then be graded from 0 (no credit) to 1 (full "
    "credit).{reference}\n\nJudge the attempt as it stands: is every step so far right, is the approach going to work, "
    "and is there room to finish? How much credit do you expect it to earn on average? Reply with one number out of "
    "0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0 and nothing else."
)
_REFERENCE = (
    " For comparison, here is a solution that is known to be right; the attempt may well go another way.\n\n"
    "<reference>\n{solution}\n</reference>"
)
_STEM = "Expected credit: "
_CLOSE_THINKING = "\n</think>\n\n"
_EMPTY_THINKING = "<think>\n\n</think>\n\n"
_VALUE_FORMAT = "{:.1f}"

PROMPT_HASH = hashlib.sha256(
    "\0".join([_QUESTION, _REFERENCE, _STEM, _CLOSE_THINKING, _EMPTY_THINKING, _VALUE_FORMAT]).encode()
).hexdigest()

# Where ids are spliced in: no template touches a private-use character, and no wording of ours holds one.
_RESPONSE_HERE, _SOLUTION_HERE = "\ue000", "\ue001"

# A number that ends there: "0.5", "1", ".5", "0.50"; not "1/2", "50%", "0.5e1", and not "0." (cut off, perhaps).
_LEADING_NUMBER = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?|\.[0-9]+)(?=$|\s|<|[.,;:!](?:\s|<)|[,;:!]$)")


def build_value_prompt(
    tokenizer: PreTrainedTokenizerBase,
    question: str,
    response_ids: Sequence[int] | np.ndarray,
    remaining_tokens: int,
    reference_ids: Sequence[int] | np.ndarray | None = None,
) -> np.ndarray:
    """What the critic is asked about the state (question, response so far): int32[N], ready for the value tokens.

    `response_ids` int[S] and `reference_ids` int[R] are as sampled; an end-of-turn token at their end is left out, and
    of a reference only what follows its thinking is shown. `remaining_tokens` is what the response budget leaves.
    """
    head = _encode(tokenizer, _render(tokenizer, [{"role": "user", "content": question}]))
    between, after = _tail(tokenizer, remaining_tokens, reference_ids is not None)
    attempt = head + _without_end(tokenizer, response_ids)
    parts = [attempt, _encode(tokenizer, _CLOSE_THINKING) if _is_thinking(tokenizer, attempt) else []]
    parts.append(_encode(tokenizer, between))
    if reference_ids is not None:
        parts.append(_without_thinking(tokenizer, _without_end(tokenizer, reference_ids)))
        parts.append(_encode(tokenizer, after))
    return np.array([token for part in parts for token in part], dtype=np.int32)


def value_ids(tokenizer: PreTrainedTokenizerBase, value: float) -> np.ndarray:
    """The right reply for a `value` on the grid, end of turn included: int32[N], N = 4 where digits are single tokens.

    Raises `ValueError` off the grid.
    """
    if value not in GRID:
        raise ValueError(f"a critic's target must be on the grid {GRID}, found {value}")
    ids = _encode(tokenizer, _VALUE_FORMAT.format(value))
    return np.array([*ids, tokenizer.eos_token_id], dtype=np.int32)


def grid_replies(tokenizer: PreTrainedTokenizerBase) -> dict[float, np.ndarray]:
    """Value on the grid -> its reply's ids without the end of turn: int32[N]."""
    return {value: value_ids(tokenizer, value)[:-1] for value in GRID}


def parse_value(text: str) -> tuple[float, bool]:
    """(value, valid) of a reply that begins with a number on the grid {0, .1, ..., 1}, however written.

    Off the grid, or no number that plainly ends ("0.55", "-1", "1/2", "50%", "0."): (0.0, False). Never coerced.
    """
    match = _LEADING_NUMBER.match(text)
    if match is None:
        return 0.0, False
    tenths = Decimal(match[1]) * 10
    if tenths != tenths.to_integral_value() or tenths > 10:
        return 0.0, False
    return GRID[int(tenths)], True


def _render(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, str]]) -> str:
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)


def _encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


def _tail(tokenizer: PreTrainedTokenizerBase, remaining_tokens: int, has_reference: bool) -> tuple[str, str]:
    """All text after the response, cut in two where the reference goes (the second part empty without one)."""
    reference = _REFERENCE.format(solution=_SOLUTION_HERE) if has_reference else ""
    messages = [
        {"role": "user", "content": "-"},
        {"role": "assistant", "content": _RESPONSE_HERE},
        {"role": "user", "content": _QUESTION.format(remaining_tokens=remaining_tokens, reference=reference)},
    ]
    tail = _render(tokenizer, messages).rpartition(_RESPONSE_HERE)[2]
    between, _, after = (tail + _prefill(tokenizer, tail)).partition(_SOLUTION_HERE)
    return between, after


def _prefill(tokenizer: PreTrainedTokenizerBase, tail: str) -> str:
    """An empty thinking section, or what is missing of it in the template's own generation prompt, and the stem."""
    if _think_ids(tokenizer) is None or tail.rstrip().endswith("</think>"):
        return _STEM
    if tail.rstrip().endswith("<think>"):
        return _CLOSE_THINKING + _STEM
    return _EMPTY_THINKING + _STEM


def _think_ids(tokenizer: PreTrainedTokenizerBase) -> tuple[int, int] | None:
    """Ids of <think> and </think>, or None where they are no tokens of their own: a model that does not think."""
    ids = tokenizer.convert_tokens_to_ids(["<think>", "</think>"])
    return None if None in ids or tokenizer.unk_token_id in ids else (ids[0], ids[1])


def _is_thinking(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> bool:
    think = _think_ids(tokenizer)
    last_mark = next((token for token in reversed(ids) if think and token in think), None)
    return last_mark is not None and last_mark == think[0]


def _without_end(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int] | np.ndarray) -> list[int]:
    ids = [int(token) for token in ids]
    return ids[:-1] if ids and ids[-1] == tokenizer.eos_token_id else ids


def _without_thinking(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> list[int]:
    """What follows the last </think>, or all where that is nothing."""
    think = _think_ids(tokenizer)
    if think is None or think[1] not in ids:
        return ids
    start = len(ids) - ids[::-1].index(think[1])
    return ids[start:] or ids
