"""The grader that follows rules: a response's final answer, compared by math-verify or by reasoning-gym's verifier.

`Problem.grading` says which: `{"answer": text}` or `{"reasoning_gym": {"dataset": name, "entry": {...}}}`. A wrong or
missing answer is a reward of 0; a verifier that raises, dies or runs out of time is `Grade(0.0, valid=False)`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from megatron_ac2.grading.pool import GradingPool, cores_a_process
from megatron_ac2.types import Grade, Problem, UserError

_MATHS = "math-verify"
_RULES = '"answer" or "reasoning_gym"'


class RuleGrader:
    """Grades `problems`, and only those, in processes of their own that are shut in (confinement.py).

    `timeout` is in seconds an answer, its extraction included; `num_workers`: None, as many as cores fall to this rank.
    """

    def __init__(
        self, problems: Iterable[Problem], timeout: float, num_workers: int | None = None, confined: bool = True
    ):
        rules = frozenset(_rule(problem) for problem in problems)
        self._rules = rules
        self._pool = GradingPool(
            sorted(rules - {None, _MATHS}), _MATHS in rules, timeout, num_workers or cores_a_process(), confined
        )

    def grade(self, items: Sequence[tuple[Problem, str]]) -> list[Grade]:
        """A reward of 1 or 0 for each (problem, response text). Raises `UserError` for a problem that no rule can grade
        (see `ungradable`), or that this grader was not made for."""
        if problems := ungradable([problem for problem, _ in items]):
            raise UserError(problems)
        for problem, _ in items:
            if (rule := _rule(problem)) not in self._rules:
                raise UserError(f"problem {problem.problem_id}: graded by {rule}, which was not loaded for this grader")
        verdicts = self._pool.verdicts([(dict(problem.grading), text) for problem, text in items])
        return [Grade(0.0, valid=False) if verdict is None else Grade(float(verdict)) for verdict in verdicts]

    def close(self) -> None:
        """End its processes; they end with this one anyway."""
        self._pool.close()


def ungradable(problems: Sequence[Problem]) -> list[str]:
    """One message for each problem that `RuleGrader` cannot grade, for the entry point to raise before the run."""
    return [
        f"problem {problem.problem_id}: has only a rubric, which needs a grader model; accepted by rule: {_RULES}"
        for problem in problems
        if not {"answer", "reasoning_gym"} & set(problem.grading)
    ]


def _rule(problem: Problem) -> str | None:
    """What grades it: math-verify, or a reasoning-gym data set's verifier by name; None: no rule."""
    if "answer" in problem.grading:
        return _MATHS
    return problem.grading["reasoning_gym"]["dataset"] if "reasoning_gym" in problem.grading else None
