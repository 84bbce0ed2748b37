"""What an answer costs in the processes that grade, beside the same verifiers called in this one.

    python tools/bench_grading.py [--answers 500] [--datasets chain_sum countdown ...]

For each reasoning-gym data set, and for math-verify: milliseconds an answer through one confined worker and in this
process, with extraction in both, best of three rounds in turns; a response of 200,000 characters with the answer at its
end; and how long the next answer takes after one that ran into the limit. Only answers that the data sets make
themselves are graded here: this process is not confined.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import numpy as np
import reasoning_gym

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_ac2.grading.answers import extract_answer  # noqa: E402
from megatron_ac2.grading.rules import RuleGrader  # noqa: E402
from megatron_ac2.grading.verifiers import is_equal_maths  # noqa: E402
from megatron_ac2.types import Problem  # noqa: E402

MATHS = ("12", "\\frac{1}{2}", "2\\sqrt{3}", "(1,2]", "x^2+1")
DATASETS = ("chain_sum", "countdown", "word_sorting", "spiral_matrix", "simple_integration")
ROUNDS = 3
LONG = "so we have x = 12, and then " * 7_150
BOMB = "\\boxed{10^{10^{10}}}"

Item = tuple[Problem, str]


def problem(**grading: object) -> Problem:
    return Problem("benchmark", np.zeros(1, dtype=np.int32), "question", grading)


def items_of(dataset: str, count: int) -> list[Item]:
    """Right answers and wrong ones, the data set's own."""
    entries = list(reasoning_gym.create_dataset(dataset, size=20, seed=1))
    pairs = [(entries[n % 20], entries[(n + n % 2) % 20]["answer"]) for n in range(count)]
    return [
        (problem(reasoning_gym={"dataset": dataset, "entry": entry}), f"<answer>{answer}</answer>")
        for entry, answer in pairs
    ]


def maths_items(count: int) -> list[Item]:
    return [(problem(answer=MATHS[n % 5]), f"\\boxed{{{MATHS[(n + n % 2) % 5]}}}") for n in range(count)]


@cache
def _verifier(dataset: str) -> Callable[[str, dict], float]:
    return reasoning_gym.get_score_answer_fn(dataset)


def grade_here(items: Sequence[Item]) -> list[float]:
    rewards = []
    for asked, text in items:
        answer = extract_answer(text) or ""
        if "answer" in asked.grading:
            rewards.append(float(is_equal_maths(str(asked.grading["answer"]), answer)))
        else:
            source = asked.grading["reasoning_gym"]
            rewards.append(float(_verifier(source["dataset"])(answer, source["entry"]) >= 1.0))
    return rewards


def milliseconds(work: Callable[[], object], count: int) -> float:
    begin = time.perf_counter()
    work()
    return (time.perf_counter() - begin) / count * 1e3


def compare(name: str, items: Sequence[Item], grader: RuleGrader) -> str:
    """A row of the table. Raises RuntimeError if the two ways disagree."""
    if [grade.reward for grade in grader.grade(items)] != grade_here(items):
        raise RuntimeError(f"{name}: the worker's rewards are not those of this process")
    turns = [
        (milliseconds(lambda: grader.grade(items), len(items)), milliseconds(lambda: grade_here(items), len(items)))
        for _ in range(ROUNDS)
    ]
    apart, here = (min(times) for times in zip(*turns, strict=True))
    return f"{name:26} {apart:10.3f} {here:10.3f} {apart - here:+10.3f}"


def recovery(grader: RuleGrader) -> float:
    """Milliseconds of the answer after one that outlasted its limit: a worker is forked for it."""
    grader.grade([maths_items(1)[0], (problem(answer="1"), BOMB)])
    return milliseconds(lambda: grader.grade(maths_items(1)), 1)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--answers", type=int, default=500)
    parser.add_argument("--datasets", nargs="*", default=DATASETS)
    options = parser.parse_args(arguments)
    cases = {"math-verify": maths_items(options.answers)}
    cases |= {dataset: items_of(dataset, options.answers) for dataset in options.datasets}
    cases["math-verify, 200k letters"] = [(asked, LONG + text) for asked, text in maths_items(50)]
    grader = RuleGrader([asked for items in cases.values() for asked, _ in items], timeout=1.0, num_workers=1)
    print(f"start: {milliseconds(lambda: grader.grade(maths_items(1)), 1) / 1e3:.2f} s")
    print(f"{'milliseconds an answer':26} {'apart':>10} {'here':>10} {'more':>10}")
    for name, items in cases.items():
        print(compare(name, items, grader), flush=True)
    print(f"after one that ran into the limit: {recovery(grader):.1f} ms")
    grader.close()


if __name__ == "__main__":
    main()
