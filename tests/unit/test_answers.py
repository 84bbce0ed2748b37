"""Where a response's final answer is found, and that looking for it takes time in proportion to the response."""

from __future__ import annotations

import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ac2.grading.answers import answer_is_complete, extract_answer

NUM_TOKENS = 50_000
PATTERNS = (
    "\\boxed{", "<answer>", "</answer>", "<answer>1", "answer ", "answer\n", "So the answer is \\boxed{5\n", "Answer:",
    "Answer: 1\n", "\\boxed{1}", "<answer>1</answer>", "{", "}", "\\", "\\{", "#", "*answer*", "the ", "final answer",
    "the\n", "<think>", "</think>", "final  answer  is  ", ">_*",
)  # fmt: skip


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("4+7=11\nAnswer: 11", "11"),
        ("Answer: 3\nno, wait\nAnswer: 4\n", "4"),
        ("**Final Answer:** 7", "7"),
        ("**Answer**: `12`", "12"),
        ("The answer is: 5", "5"),
        ("so \\boxed{\\frac{1}{2}} it is", "\\frac{1}{2}"),
        ("\\boxed{1} or rather \\boxed{\\{2\\}}", "\\{2\\}"),
        ("\\boxed{3} then \\boxed{4", "3"),  # the last one was cut off
        ("\\boxed{1 \\boxed{2} 3}", "2"),  # of two complete ones, the one that begins last
        ("} \\boxed{1}", "1"),
        ("Answer: \\boxed{5}", "5"),
        ("<answer>\n1 2\n3 4\n</answer>", "1 2\n3 4"),
        ("<answer>1 <answer>2</answer> 3</answer>", "1 <answer>2"),
        ("\\boxed{1}\nAnswer: 2", "2"),
        ("Answer:\n\n42\n\nThat was easy.", "42"),
        ("<think>Answer: 1</think>\nAnswer: 2", "2"),
        ("Answer: 1</think>\nI do not know", None),
        ("<think>Answer: 1", None),
        ("it is 12", None),
        ("Answer:", None),
        ("\\boxed{ }", None),
        ("", None),
        ("boxed{1}", None),
    ],
)
def test_extract_answer(text, answer):
    assert extract_answer(text) == answer


def in_plain_words(text: str) -> str | None:
    """What `extract_answer` means, written without a thought of time."""
    _, closed, text = text.rpartition("</think>")
    if not closed and "<think>" in text:
        return None
    found = [(start, content) for start in range(len(text)) if (content := box_at(text, start)) is not None]
    found += [(match.start(), match[1]) for match in re.finditer(r"<answer>(.*?)</answer>", text, re.I | re.S)]
    line = r"^[ \t>*_#]*(?:the\s+)?(?:final\s+)?answer\s*(?:is)?[ \t*_]*[:=][ \t*_]*"
    if matches := list(re.finditer(line, text, re.I | re.M)):
        first, _, below = text[matches[-1].end() :].partition("\n")
        answer = first.strip() or below.strip().split("\n\n")[0]
        found.append((matches[-1].start(), answer.strip().strip("*_`")))
    return (max(found)[1].strip() or None) if found else None


def box_at(text: str, start: int) -> str | None:
    content = start + len("\\boxed{")
    depth = 1 if text.startswith("\\boxed{", start) else 0
    for end in range(content, len(text) if depth else 0):
        depth += {"{": 1, "}": -1}.get(text[end], 0) if text[end - 1] != "\\" else 0
        if depth == 0:
            return text[content:end]
    return None


PIECES = (
    *PATTERNS, "ANSWER", "is", ":", "=", " ", "\n", "\t", "\n\n", "x", "1", "The ", "Final ", "`", "\u017f",
)  # fmt: skip


@given(st.lists(st.sampled_from(PIECES), max_size=14).map("".join))
def test_it_finds_what_plain_words_say(text):
    assert extract_answer(text) == in_plain_words(text)


def test_an_answer_is_complete_when_the_next_character_cannot_change_it():
    assert (
        answer_is_complete("Answer: 1\n") and answer_is_complete("\\boxed{1}") and answer_is_complete("Answer: 1\nso")
    )
    assert not answer_is_complete("Answer: 1") and not answer_is_complete("1")


def seconds(text: str) -> float:
    """Of the processor, at best of three: other processes take part in the clock."""
    times = []
    for _ in range(3):
        begin = time.process_time()
        extract_answer(text)
        times.append(time.process_time() - begin)
    return min(times)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_long_loops_take_milliseconds(pattern):
    loop = pattern * min(NUM_TOKENS, NUM_TOKENS * 4 // len(pattern))  # about four characters a token
    assert seconds(loop) < 0.05
    assert seconds("answer" + loop) < 0.05


@given(st.lists(st.sampled_from((*PATTERNS, " ", "\n", "1")), min_size=1, max_size=4).map("".join))
def test_time_grows_as_the_text_does(pattern):
    """Four times the text may take ten times as long, on a busy machine; were it quadratic, sixteen times."""
    once = pattern * 3_000
    assert seconds(once * 4) < 10 * seconds(once) + 2e-3
