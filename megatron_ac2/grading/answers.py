"""The final answer of a response: text in, text out, in time that grows as the text does.

Policies write loops of 50,000 tokens, so nothing here may look at a piece of text more than a fixed number of times:
one walk for boxes and one for tags, and in the answer line's pattern no two repeats that could share out the same
characters between them (`*+` never gives back what it took).
"""

from __future__ import annotations

import re

_ANSWER_LINE = re.compile(
    r"^[ \t>*_#]*+(?:the\s++)?+(?:final\s++)?+answer\s*+(?:is)?+[ \t*_]*+[:=][ \t*_]*+", re.I | re.M
)
_TAG = re.compile(r"<(/?)answer>", re.I)
_BOX = "\\boxed{"
_BRACE = re.compile("[{}]")


def extract_answer(response_text: str) -> str | None:
    """The final answer of a response, or None if it gives none.

    Of the last `\\boxed{...}`, `<answer>...</answer>` and "Answer:" line, the one that begins last counts, so
    that "Answer: \\boxed{5}" is 5. Thinking is not an answer: only what follows the last `</think>` is read, and a
    response that is still thinking has none.
    """
    _, closed, text = response_text.rpartition("</think>")
    if not closed and "<think>" in text:
        return None
    candidates = [_last_boxed(text), _last_tag(text), _last_answer_line(text)]
    found = [candidate for candidate in candidates if candidate is not None]
    return (max(found)[1].strip() or None) if found else None


def answer_is_complete(response_text: str) -> bool:
    """Whether an unfinished response already holds its final answer: one that the next character could not change.

    "Answer: 1" may still become "Answer: 12"; a closed box, a closed tag or an ended line may not.
    """
    answer = extract_answer(response_text)
    return answer is not None and extract_answer(response_text + "0") == answer


def _last_boxed(text: str) -> tuple[int, str] | None:
    """(where it begins, content) of the complete box that begins last; braces may nest, and "\\{" is none."""
    if _BOX not in text:  # of most responses; looking for it costs nothing
        return None
    closing: list[int] = []  # braces to the right that wait for their opening one
    for position in reversed([brace.start() for brace in _BRACE.finditer(text)]):
        if text[position - 1 : position] == "\\":
            continue
        if text[position] == "}":
            closing.append(position)
        elif closing:
            end, start = closing.pop(), position + 1 - len(_BOX)
            if start >= 0 and text.startswith(_BOX, start):
                return start, text[position + 1 : end]
    return None


def _last_tag(text: str) -> tuple[int, str] | None:
    """(where it begins, content) of the last pair: from an opening tag, past any others, to the next closing one."""
    opening: re.Match[str] | None = None
    last: tuple[re.Match[str], int] | None = None
    for tag in _TAG.finditer(text):
        if not tag[1]:
            opening = opening or tag
        elif opening is not None:
            last, opening = (opening, tag.start()), None
    return (last[0].start(), text[last[0].end() : last[1]]) if last else None


def _last_answer_line(text: str) -> tuple[int, str] | None:
    """The rest of the last "Answer:" line; if that is empty, the paragraph below it."""
    last = None
    for last in _ANSWER_LINE.finditer(text):  # noqa: B007  (the last one is meant)
        pass
    if last is None:
        return None
    line, _, below = text[last.end() :].partition("\n")
    answer = line.strip() or below.strip().split("\n\n", 1)[0]
    return last.start(), answer.strip().strip("*_`")
