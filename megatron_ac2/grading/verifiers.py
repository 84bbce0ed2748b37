"""One answer against its problem, by rule: math-verify, or reasoning-gym's own verifier.

Runs in the grading server's workers (server.py); what a verifier evaluates is held by expressions.py.
"""

from __future__ import annotations

import importlib
import logging
import pkgutil
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from megatron_ac2.grading.answers import extract_answer
from megatron_ac2.grading.expressions import guard

_BOXED = "\\boxed{"
# What of sympy an expression may lead to; most of it is imported only when a calculation comes there.
_SYMPY = (
    "assumptions", "calculus", "combinatorics", "concrete", "core", "discrete", "external", "functions", "geometry",
    "integrals", "logic", "matrices", "ntheory", "polys", "series", "sets", "simplify", "solvers",
    "strategies", "tensor", "utilities",
)  # fmt: skip
_NOT_NEEDED = ("test", "bench", "mathml", "autowrap", "pytest", "runtests", "randtest", "tmpfiles")  # by beginning


class Verifiers:
    """Loads what grading will need, the verifiers of these reasoning-gym `datasets`, and math-verify for `maths`, and
    guards it: afterwards this process compiles no text (expressions.py), and need not import anything either."""

    def __init__(self, datasets: Sequence[str], maths: bool = True):
        self._score_answer: dict[str, Callable[[str, Any], float]] = {}
        if datasets:
            import reasoning_gym  # a second of import, for those who use it

            self._score_answer = {name: reasoning_gym.get_score_answer_fn(name) for name in datasets}
        if maths:
            _load_maths()
        if maths or any(map(_computes_symbolically, self._score_answer.values())):
            _load_sympy()
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


def _computes_symbolically(score_answer: Callable) -> bool:
    """Whether a verifier's module uses sympy."""
    values = score_answer.__globals__.values()
    return any(
        (getattr(value, "__module__", None) or getattr(value, "__name__", "")).startswith("sympy") for value in values
    )


def _load_sympy() -> None:
    import sympy

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of modules that are old names of others
        for name in _SYMPY:
            _load_package(f"{sympy.__name__}.{name}")


def _load_package(name: str) -> None:
    try:
        package = importlib.import_module(name)
    except Exception:  # made for a package that is not here, or is newer: no verifier can use it either
        return
    for module in pkgutil.iter_modules(getattr(package, "__path__", ()), f"{name}."):
        if not module.name.rpartition(".")[2].startswith(_NOT_NEEDED):
            _load_package(module.name)
