"""Rule graders: the final answer of a response, compared by math-verify or by reasoning-gym's own verifier.

`Problem.grading` says which: `{"answer": text}` or `{"reasoning_gym": {"dataset": name, "entry": {...}}}`. A wrong or
missing answer is a reward of 0; a verifier that raises or runs out of time is `Grade(0.0, valid=False)`.
"""

from __future__ import annotations

import logging
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from types import FrameType

from megatron_ac2.types import Grade, Problem, UserError

_ANSWER_LINE = re.compile(r"^[ \t>*_#]*(?:the\s+)?(?:final\s+)?answer\s*(?:is)?[ \t*_]*[:=][ \t*_]*", re.I | re.M)
_ANSWER_TAG = re.compile(r"<answer>(.*?)</answer>", re.I | re.S)
_BOXED = "\\boxed{"


class GradingTimeout(BaseException):
    """Not an `Exception`: the verifiers catch those themselves, and would go on."""


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


def _last_boxed(text: str) -> tuple[int, str] | None:
    """(where it begins, content) of the last complete box; braces may nest."""
    start = len(text)
    while (start := text.rfind(_BOXED, 0, start)) >= 0:
        depth = 1
        for end in range(start + len(_BOXED), len(text)):
            depth += {"{": 1, "}": -1}.get(text[end], 0) if text[end - 1] != "\\" else 0
            if depth == 0:
                return start, text[start + len(_BOXED) : end]
    return None


def _last_tag(text: str) -> tuple[int, str] | None:
    matches = list(_ANSWER_TAG.finditer(text))
    return (matches[-1].start(), matches[-1][1]) if matches else None


def _last_answer_line(text: str) -> tuple[int, str] | None:
    """The rest of the last "Answer:" line; if that is empty, the paragraph below it."""
    matches = list(_ANSWER_LINE.finditer(text))
    if not matches:
        return None
    rest = text[matches[-1].end() :]
    line, _, below = rest.partition("\n")
    answer = line.strip() or below.strip().split("\n\n")[0]
    return matches[-1].start(), answer.strip().strip("*_`")


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise `GradingTimeout` inside the block after `seconds`, and again every second should someone swallow it.

    No process per call. Uses SIGALRM, hence the main thread only; an outer alarm is put back with what it has left.
    """
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError("answers must be graded in the main thread: the time limit is an alarm signal")

    def on_alarm(signum: int, frame: FrameType | None) -> None:
        raise GradingTimeout

    begin = time.monotonic()
    old_handler = signal.signal(signal.SIGALRM, on_alarm)
    old_delay, old_interval = signal.setitimer(signal.ITIMER_REAL, seconds, 1.0)
    try:
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    finally:  # once more: the alarm may have struck on the way into the line above
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old_handler)
        if old_delay:
            signal.setitimer(signal.ITIMER_REAL, max(old_delay - (time.monotonic() - begin), 1e-3), old_interval)


class RuleGrader:
    """Grades by rule; `timeout` is in seconds an answer. Main thread only."""

    def __init__(self, timeout: float):
        self._timeout = timeout

    def grade(self, problem: Problem, response_text: str) -> Grade:
        """Reward 1 or 0. Raises `UserError` for a problem that no rule can grade (see `ungradable`)."""
        verifier = _verifier_of(problem)
        answer = extract_answer(response_text)
        if answer is None:
            return Grade(0.0)
        try:
            with time_limit(self._timeout):
                return Grade(float(verifier(answer)))
        except (Exception, GradingTimeout):  # any failure of a verifier is its own, never the run's
            return Grade(0.0, valid=False)


def ungradable(problems: Sequence[Problem]) -> list[str]:
    """One message for each problem that `RuleGrader` cannot grade, for the entry point to raise before the run."""
    return [_no_rule(problem) for problem in problems if not {"answer", "reasoning_gym"} & set(problem.grading)]


def _no_rule(problem: Problem) -> str:
    return f"problem {problem.problem_id}: has only a rubric, which needs a grader model; accepted by rule: {_RULES}"


_RULES = '"answer" or "reasoning_gym"'


def _verifier_of(problem: Problem) -> Callable[[str], bool]:
    grading = problem.grading
    if "answer" in grading:
        return lambda answer: is_equal_maths(str(grading["answer"]), answer)
    if "reasoning_gym" in grading:
        source = grading["reasoning_gym"]
        # Many of its verifiers give partial credit ("1 21" for 21 earns 0.5): only the full score counts.
        return lambda answer: float(_score_answer(source["dataset"])(answer, source["entry"])) >= 1.0
    raise UserError(_no_rule(problem))


@lru_cache(maxsize=None)
def _score_answer(dataset: str) -> Callable[[str, dict], float]:
    import reasoning_gym  # a second of import, for those who use it

    return reasoning_gym.get_score_answer_fn(dataset)


def is_equal_maths(expected: str, answer: str) -> bool:
    """math-verify's equality, or equal text (spaces aside). Its own time limit is off: it swallows other alarms."""
    from math_verify import verify

    if "".join(expected.split()) == "".join(answer.split()):
        return True
    return verify(_parse_maths(expected), _parse_maths(answer), timeout_seconds=None)


def _parse_maths(text: str) -> list:
    """Boxed, so that bare LaTeX ("2\\sqrt{3}") is read whole, and not only its first number."""
    from math_verify import parse

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its time limit is off, which is meant
    marked = text if _BOXED in text or "$" in text else f"{_BOXED}{text}}}"
    return parse(marked, parsing_timeout=None)


def answer_is_complete(response_text: str) -> bool:
    """Whether an unfinished response already holds its final answer: one that the next character could not change.

    "Answer: 1" may still become "Answer: 12"; a closed box, a closed tag or an ended line may not.
    """
    answer = extract_answer(response_text)
    return answer is not None and extract_answer(response_text + "0") == answer
