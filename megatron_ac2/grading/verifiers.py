"""One answer against its problem, by rule: math-verify, or reasoning-gym's own verifier.

Runs in the grading server's workers (server.py); what a verifier evaluates is held by expressions.py.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from megatron_ac2.grading.answers import extract_answer
from megatron_ac2.grading.expressions import guard
from megatron_ac2.grading.held_modules import hold

_BOXED = "\\boxed{"
_LAZY = ("sympy", "mpmath", "latex2sympy2_extended")  # they import parts of themselves when first needed


class Verifiers:
    """Loads what grading will need, the verifiers of these reasoning-gym `datasets`, and math-verify for `maths`, and
    guards it: afterwards this process compiles no text (expressions.py), and what is yet to be imported comes out of
    memory (held_modules.py)."""

    def __init__(self, datasets: Sequence[str], maths: bool = True):
        self._score_answer: dict[str, Callable[[str, Any], float]] = {}
        if datasets:
            import reasoning_gym  # a second of import, for those who use it

            self._score_answer = {name: reasoning_gym.get_score_answer_fn(name) for name in datasets}
        if maths:
            _load_maths()
        hold(_LAZY)
        guard()

    def is_right(self, grading: Mapping[str, Any], response_text: str) -> bool:
        """Whether the response's final answer earns the full score; one without an answer does not. Raises what the
        verifier raises."""
        answer = extract_answer(response_text)
        if answer is None:
            return False
        if "answer" in grading:
            return is_equal_maths(str(grading["answer"]), answer)
        source = grading["reasoning_gym"]
        # Many of its verifiers give partial credit ("1 21" for 21 earns 0.5): only the full score counts.
        return float(self._score_answer[source["dataset"]](answer, source["entry"])) >= 1.0


def is_equal_maths(expected: str, answer: str) -> bool:
    """math-verify's equality, or equal text (spaces aside). Its own time limit is off: the pool has one."""
    if "".join(expected.split()) == "".join(answer.split()):
        return True
    from math_verify import verify

    return verify(_parse_maths(expected), _parse_maths(answer), timeout_seconds=None)


def _parse_maths(text: str) -> list:
    """Boxed, so that bare LaTeX ("2\\sqrt{3}") is read whole, and not only its first number."""
    from math_verify import parse

    marked = text if _BOXED in text or "$" in text else f"{_BOXED}{text}}}"
    return parse(marked, parsing_timeout=None)


def _load_maths() -> None:
    """One comparison of each kind, so that each worker finds patterns and grammars made."""
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its time limit is off, which is meant
    is_equal_maths("\\frac{1}{2}", "0.25")
    is_equal_maths("(1,2]", "x+1=2")
