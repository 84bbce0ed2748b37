from __future__ import annotations

import signal
import threading
import time

import numpy as np
import pytest
import reasoning_gym

from megatron_ac2.data import graders
from megatron_ac2.data.graders import RuleGrader, extract_answer, time_limit, ungradable
from megatron_ac2.types import Grade, Problem, UserError


def problem(**grading) -> Problem:
    return Problem("p", np.zeros(1, dtype=np.int32), "q", grading)


def chain_sum(answer: str) -> Problem:
    entry = {"question": "2 + 2 =", "answer": answer, "metadata": {}}
    return problem(reasoning_gym={"dataset": "chain_sum", "entry": entry})


GRADER = RuleGrader(timeout=5.0)


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
        ("Answer: \\boxed{5}", "5"),
        ("<answer>\n1 2\n3 4\n</answer>", "1 2\n3 4"),
        ("\\boxed{1}\nAnswer: 2", "2"),
        ("Answer:\n\n42\n\nThat was easy.", "42"),
        ("<think>Answer: 1</think>\nAnswer: 2", "2"),
        ("Answer: 1</think>\nI do not know", None),
        ("<think>Answer: 1", None),
        ("it is 12", None),
        ("Answer:", None),
        ("\\boxed{ }", None),
        ("", None),
    ],
)
def test_extract_answer(text, answer):
    assert extract_answer(text) == answer


@pytest.mark.parametrize(
    ("expected", "given", "reward"),
    [
        ("12", "12.0", 1.0),
        ("12", "13", 0.0),
        ("\\frac{1}{2}", "0.5", 1.0),
        ("2\\sqrt{3}", "\\sqrt{12}", 1.0),
        ("2\\sqrt{3}", "2", 0.0),  # only the whole expression counts
        ("x^2+1", "1 + x^2", 1.0),
        ("(1,2]", "(1,2)", 0.0),
        ("$\\pi/2$", "\\frac{\\pi}{2}", 1.0),
        ("\\text{even}", "\\text{odd}", 0.0),
        ("blue", "blue", 1.0),
        ("1,000", "1000", 1.0),
    ],
)
def test_math_answers(expected, given, reward):
    assert GRADER.grade(problem(answer=expected), f"thus \\boxed{{{given}}}") == Grade(reward)


def test_reasoning_gym_counts_the_full_score_only():
    assert GRADER.grade(chain_sum("21"), "Answer: 21") == Grade(1.0)
    assert GRADER.grade(chain_sum("21"), "Answer: 22") == Grade(0.0)
    dataset = reasoning_gym.create_dataset("number_sorting", size=1, seed=1)
    entry = {"question": "q", "answer": "21", "metadata": {}}
    partial = problem(reasoning_gym={"dataset": "gcd", "entry": entry})
    assert 0 < reasoning_gym.get_score_answer_fn("gcd")("1 21", entry) < 1  # the reason for the rule
    assert GRADER.grade(partial, "Answer: 1 21") == Grade(0.0)
    right = problem(reasoning_gym={"dataset": "number_sorting", "entry": dataset[0]})
    assert GRADER.grade(right, f"<answer>{dataset[0]['answer']}</answer>") == Grade(1.0)


def test_without_an_answer_the_verifier_is_not_called(monkeypatch):
    monkeypatch.setattr(graders, "is_equal_maths", lambda *_: pytest.fail("called"))
    assert GRADER.grade(problem(answer="12"), "12 it is") == Grade(0.0, valid=True)


@pytest.mark.parametrize("error", [ValueError("bad"), RecursionError(), AssertionError(), MemoryError()])
def test_a_failing_verifier_is_an_invalid_grade(monkeypatch, error):
    def fail(*_):
        raise error

    monkeypatch.setattr(graders, "is_equal_maths", fail)
    assert GRADER.grade(problem(answer="12"), "Answer: 12") == Grade(0.0, valid=False)


@pytest.mark.parametrize("bomb", ["10^{10^{10}}", "\\sum_{k=1}^{10^{9}} k^{1/3}", "100000000!"])
def test_the_time_limit_stops_math_verify(bomb):
    begin = time.process_time()  # not of the clock, which other processes take part in
    assert RuleGrader(timeout=0.5).grade(problem(answer="12"), f"\\boxed{{{bomb}}}") == Grade(0.0, valid=False)
    assert time.process_time() - begin < 3.0


def test_the_time_limit_survives_code_that_swallows_exceptions():
    num_sleeps = 0
    with pytest.raises(graders.GradingTimeout), time_limit(0.1):
        while True:
            num_sleeps += 1
            try:
                time.sleep(0.01)
            except Exception:
                pass
    assert num_sleeps < 100


def test_the_time_limit_puts_back_an_outer_alarm():
    def handler(*_):
        raise AssertionError("too early")

    saved_handler, saved = signal.signal(signal.SIGALRM, handler), signal.setitimer(signal.ITIMER_REAL, 50.0)
    try:
        assert GRADER.grade(problem(answer="12"), "Answer: 12.0") == Grade(1.0)
        assert signal.getsignal(signal.SIGALRM) is handler
        assert 40.0 < signal.getitimer(signal.ITIMER_REAL)[0] <= 50.0
    finally:
        signal.setitimer(signal.ITIMER_REAL, *saved)
        signal.signal(signal.SIGALRM, saved_handler)


def test_another_thread_gets_a_clear_error():
    errors = []

    def run():
        try:
            with time_limit(1.0):
                pass
        except RuntimeError as error:
            errors.append(str(error))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert "main thread" in errors[0]


def test_a_rubric_needs_another_grader():
    only_rubric = problem(rubric="a full proof")
    assert len(ungradable([only_rubric, chain_sum("1")])) == 1
    with pytest.raises(UserError, match="rubric"):
        GRADER.grade(only_rubric, "")
