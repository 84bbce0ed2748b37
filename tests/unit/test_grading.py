from __future__ import annotations

import ast
import inspect
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pyseccomp  # noqa: F401  (before a worker is shut in, as the server does)
import pytest
import reasoning_gym
from reasoning_gym.factory import DATASETS

from megatron_ac2.grading import confinement, server
from megatron_ac2.grading.pool import GradingPool, GradingStopped
from megatron_ac2.grading.rules import RuleGrader, ungradable
from megatron_ac2.grading.verifiers import is_equal_maths
from megatron_ac2.types import Grade, Problem, UserError
from tests.unit.hostile import BOMBS, EVALUATING, entry_of, gym_problem, hostile_answers, maths_problem

TIMEOUT = 0.3
MATHS = maths_problem("\\frac{1}{2}")
BY_NAME = {name: gym_problem(name) for name in EVALUATING}
# 20 data sets and more, all kinds of answers: text, numbers, lists, grids, expressions.
HONEST = (
    "countdown", "simple_integration", "polynomial_multiplication", "n_queens", "string_insertion", "spiral_matrix",
    "binary_matrix", "number_sorting", "bitwise_arithmetic", "chain_sum", "basic_arithmetic", "gcd", "lcm",
    "prime_factorization", "simple_equations", "complex_arithmetic", "decimal_arithmetic", "fraction_simplification",
    "word_sorting", "letter_counting", "caesar_cipher", "base_conversion", "knights_knaves", "products", "leg_counting",
)  # fmt: skip


@pytest.fixture(scope="module")
def grader():
    loaded = [gym_problem(name, {}) for name in HONEST]
    grader = RuleGrader([MATHS, *BY_NAME.values(), *loaded], timeout=30.0, num_workers=2)
    yield grader
    grader.close()


@pytest.fixture
def hasty(grader, monkeypatch):
    monkeypatch.setattr(grader._pool, "_timeout", TIMEOUT)
    return grader


def grade(grader: RuleGrader, problem: Problem, text: str) -> Grade:
    return grader.grade([(problem, text)])[0]


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
def test_math_answers(grader, expected, given, reward):
    assert grade(grader, maths_problem(expected), f"thus \\boxed{{{given}}}") == Grade(reward)


def test_reasoning_gym_counts_the_full_score_only(grader):
    def problem(dataset: str, answer: str) -> Problem:
        return gym_problem(dataset, {"question": "q", "answer": answer, "metadata": {}})

    assert grade(grader, problem("chain_sum", "21"), "Answer: 21") == Grade(1.0)
    assert grade(grader, problem("chain_sum", "21"), "Answer: 22") == Grade(0.0)
    partial = problem("gcd", "21")
    entry = partial.grading["reasoning_gym"]["entry"]
    assert 0 < reasoning_gym.get_score_answer_fn("gcd")("1 21", entry) < 1  # the reason for the rule
    assert grade(grader, partial, "Answer: 1 21") == Grade(0.0)
    right = BY_NAME["number_sorting"]
    answer = right.grading["reasoning_gym"]["entry"]["answer"]
    assert grade(grader, right, f"<answer>{answer}</answer>") == Grade(1.0)


def test_without_an_answer_there_is_no_reward(grader):
    assert grade(grader, maths_problem("12"), "12 it is") == Grade(0.0, valid=True)


def test_grades_come_in_the_order_asked_whoever_is_slow(hasty):
    slow = "\\boxed{10^{10^{10}}}"
    texts = ["\\boxed{1/2}", slow, "\\boxed{0.5}", "\\boxed{2}", "\\boxed{\\frac12}"]
    late, right, wrong = Grade(0.0, valid=False), Grade(1.0), Grade(0.0)
    assert hasty.grade([(MATHS, text) for text in texts]) == [right, late, right, wrong, right]


def test_a_rubric_needs_another_grader(grader):
    only_rubric = Problem("p", MATHS.prompt_ids, "q", {"rubric": "a full proof"})
    assert len(ungradable([only_rubric, MATHS])) == 1
    with pytest.raises(UserError, match="rubric"):
        grade(grader, only_rubric, "")


def test_only_what_was_loaded_is_graded(grader):
    with pytest.raises(UserError, match="course_schedule, which was not loaded"):
        grade(grader, gym_problem("course_schedule", {}), "Answer: 1")


def test_graders_work_in_any_thread_and_touch_no_signal(grader):
    found = []
    handler = signal.getsignal(signal.SIGALRM)
    thread = threading.Thread(target=lambda: found.append(grade(grader, MATHS, "Answer: 0.5")))
    thread.start()
    thread.join()
    assert found == [Grade(1.0)] and signal.getsignal(signal.SIGALRM) is handler


def test_honest_rewards_are_the_verifiers_own(grader):
    """1,000 answers: right, nearly right, another problem's, in another spelling; to the bit what the verifier says."""
    items, expected = [], []
    for name in HONEST:
        entries = list(reasoning_gym.create_dataset(name, size=8, seed=3))
        score = reasoning_gym.get_score_answer_fn(name)
        for index, entry in enumerate(entries):
            right = str(entry["answer"])
            others = (entries[index - 1]["answer"], f"{right}1", right[:-1] or "0", right.replace(" ", "  "))
            for answer in (right, *map(str, others)):
                items.append((gym_problem(name, entry), f"<answer>{answer}</answer>"))
                expected.append(float(score(answer.strip(), entry) >= 1.0))
    assert len(items) == 1_000
    assert grader.grade(items) == [Grade(reward) for reward in expected]
    assert 300 < sum(expected) < 700


def test_honest_maths_are_as_math_verify_says(grader):
    """Each kind of answer against each: numbers, roots, intervals, sets, matrices, integrals, equations."""
    texts = ("12", "0.5", "\\frac12", "2\\sqrt{3}", "\\sqrt{12}", "x^2+1", "1+x^2", "(1,2]", "\\{1,2,3\\}", "{3,2,1}",
             "50\\%", "\\begin{pmatrix}1&2\\\\3&4\\end{pmatrix}", "\\int_0^1 x dx", "x=5", "5", "x>3", "(3,\\infty)",
             "\\binom{5}{2}", "10", "\\log_2 8", "\\cos^2 x+\\sin^2 x", "\\prod_{i=1}^4 i", "24", "3 4/5")  # fmt: skip
    pairs = [(expected, given) for expected in texts for given in texts]
    grades = grader.grade([(maths_problem(expected), f"\\boxed{{{given}}}") for expected, given in pairs])
    assert grades == [Grade(float(is_equal_maths(*pair))) for pair in pairs]
    assert 40 < sum(grade.reward for grade in grades) < 80


@pytest.fixture
def listener():
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        yield server


def was_called(listener: socket.socket) -> bool:
    try:
        listener.accept()[0].close()
    except BlockingIOError:
        return False
    return True


@pytest.mark.parametrize("dataset", [*EVALUATING, "math-verify"])
def test_hostile_answers_do_nothing(hasty, dataset, tmp_path, listener):
    problem = BY_NAME.get(dataset, MATHS)
    answers = hostile_answers(tmp_path, listener.getsockname()[1])
    assert len(answers) >= 30
    grades = [
        grade(hasty, problem, text)
        for answer in answers
        for text in (f"<answer>{answer}</answer>", f"Answer: {answer}\n")
    ]
    assert {grade.reward for grade in grades} == {0.0}
    assert not list(tmp_path.iterdir()) and not was_called(listener)


@pytest.mark.parametrize("dataset", ["countdown", "simple_integration", "string_insertion", "math-verify"])
def test_bombs_end_within_the_limit(hasty, dataset):
    problem, longest = BY_NAME.get(dataset, MATHS), 0.0
    for bomb in BOMBS:
        begin = time.monotonic()
        assert grade(hasty, problem, f"<answer>{bomb}</answer>").reward == 0.0
        longest = max(longest, time.monotonic() - begin)
    assert longest < TIMEOUT + 1.0


def test_every_verifier_that_evaluates_is_known():
    """A version of reasoning-gym with another one ends here."""
    harmless = {"basic_arithmetic", "codeio", "propositional_logic"}  # when they generate; a parser of its own
    found = set()
    for name, (dataset, _) in DATASETS.items():
        tree = ast.parse(inspect.getsource(sys.modules[dataset.__module__]))
        calls = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)]
        names = {call.id if isinstance(call, ast.Name) else getattr(call, "attr", "") for call in calls}
        found |= {name} if names & {"eval", "exec", "parse_expr", "sympify", "lambdify", "literal_eval"} else set()
    assert found == {*EVALUATING} | harmless


def test_hostile_entries_do_nothing(hasty, tmp_path, listener):
    """Problem files are not trusted either: two verifiers evaluate what the entry holds."""
    entry = entry_of("number_sorting")
    answers = hostile_answers(tmp_path, listener.getsockname()[1])
    problems = [gym_problem("number_sorting", {**entry, "answer": answer}) for answer in answers]
    problems += [gym_problem("bitwise_arithmetic", {"question": "q", "answer": "0x1", "metadata": {"problem": answer}})
                 for answer in answers]  # fmt: skip
    grades = hasty.grade([(problem, "Answer: 0x1\n") for problem in problems])
    assert {grade.reward for grade in grades} == {0.0}
    assert not list(tmp_path.iterdir()) and not was_called(listener)


def test_without_the_guard_those_answers_are_executed(tmp_path, listener):
    """The tests above can fail: the same verifiers, as they come, make files."""
    code = (
        "import json, sys, reasoning_gym\n"
        "for name, entry, answers in json.load(sys.stdin):\n"
        "    for answer in answers:\n"
        "        reasoning_gym.get_score_answer_fn(name)(answer, entry)\n"
    )
    marks = {name: tmp_path / name for name in ("countdown", "simple_integration", "string_insertion", "n_queens")}
    questions = []
    for name, folder in marks.items():
        folder.mkdir()
        answers = [answer for answer in hostile_answers(folder, 0) if "system" in answer and "exit" not in answer][:3]
        questions.append((name, entry_of(name), answers))
    subprocess.run([sys.executable, "-c", code], input=json.dumps(questions), text=True, check=True)
    assert all(any(folder.iterdir()) for folder in marks.values())


class Executes:
    """In the verifiers' place: does what the response says, and finds it right if that worked."""

    def is_right(self, grading, response_text: str) -> bool:
        exec(response_text, {})
        return True


@pytest.fixture(scope="module")
def executing():
    """A confined worker that executes what it is given: what is held when all else fails."""
    ours, theirs = socket.socketpair()
    process = os.fork()
    if not process:
        try:
            ours.close()
            server._work(theirs, Executes(), confined=True)
        finally:
            os._exit(0)
    theirs.close()
    ours.settimeout(30.0)
    assert server.receive(ours, 1) == server.READY
    yield ours
    ours.close()
    os.waitpid(process, 0)


@pytest.mark.parametrize(
    ("attempt", "verdict"),
    [
        ("1 + 1", server.RIGHT),
        ("import math; bytearray(10**8)", server.RIGHT),
        ("open('/etc/passwd')", server.FAILED),
        ("open('/tmp/mark', 'w')", server.FAILED),
        ("open('/proc/self/environ')", server.FAILED),
        ("import os; os.listdir('.')", server.FAILED),
        ("import os; os.stat('/')", server.FAILED),
        ("import os; os.mkdir('/tmp/mark')", server.FAILED),
        ("import os; os.unlink('/tmp/mark')", server.FAILED),
        ("import os; os.fork()", server.FAILED),
        ("import os; os.execv('/bin/true', ['true'])", server.FAILED),
        ("import os; os.posix_spawn('/bin/true', ['true'], {})", server.FAILED),
        ("import os; os.kill(os.getppid(), 9)", server.FAILED),
        ("import os; os.memfd_create('x')", server.FAILED),
        ("import os; os.pipe()", server.FAILED),
        ("import os; os.setuid(0)", server.FAILED),
        ("import socket; socket.socket()", server.FAILED),
        ("import socket; socket.socket(socket.AF_UNIX)", server.FAILED),
        ("import threading; threading.Thread(target=print).start()", server.FAILED),
        ("import mmap; mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)", server.FAILED),
        ("import resource; resource.setrlimit(resource.RLIMIT_AS, (-1, -1))", server.FAILED),
        ("bytearray(10**10)", server.FAILED),
        ("raise SystemExit", server.FAILED),
        ("raise KeyboardInterrupt", server.FAILED),
        ("import ctypes; assert ctypes.CDLL(None).ptrace(16, 1, 0, 0) == 0", server.FAILED),
    ],
)  # fmt: skip
def test_what_a_confined_worker_can_do(executing, attempt, verdict):
    request = pickle.dumps(({}, attempt))
    executing.sendall(server.LENGTH.pack(len(request)) + request)
    assert server.receive(executing, 1) == verdict
    assert not Path("/tmp/mark").exists()


def test_this_machine_confines():
    assert confinement.why_unconfined() is None


def test_why_a_machine_cannot_confine(monkeypatch):
    monkeypatch.setattr(confinement, "_FORBIDDEN", {"computing": lambda: 1 + 1})
    monkeypatch.setattr(confinement, "limit_resources", lambda: None)
    monkeypatch.setattr(confinement, "load_filter", lambda: None)
    assert confinement._trial() == "seccomp: computing is not refused"
    monkeypatch.setattr(confinement, "load_filter", lambda: (_ for _ in ()).throw(ImportError("no pyseccomp")))
    assert confinement._trial() == "seccomp: no pyseccomp"


def test_graders_see_no_environment_of_ours(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "secret")
    pool = GradingPool([], maths=False, timeout=5.0)
    assert pool.verdicts([({"answer": "1"}, "Answer: 1")]) == [True]
    processes = psutil.Process(pool._server._process.pid)
    for process in (processes, *processes.children()):
        assert "HF_TOKEN" not in process.environ()
    assert "torch" not in {Path(file.path).name.split(".")[0] for file in processes.memory_maps()}
    pool.close()


def test_workers_that_die_are_replaced_and_the_server_too():
    pool = GradingPool([], maths=False, timeout=5.0)
    request = ({"answer": "1"}, "Answer: 1")
    assert pool.verdicts([request] * 2) == [True, True]
    for process in (pool._idle[0].process, pool._server._process.pid):
        os.kill(process, signal.SIGKILL)
        assert pool.verdicts([request] * 2) == [True, True]
    first = pool._server._process.pid
    pool.close()
    assert not psutil.pid_exists(first)


def test_a_grader_ends_with_its_process():
    code = (
        "import os\nfrom megatron_ac2.grading.pool import GradingPool\n"
        "pool = GradingPool([], False, 60.0)\nassert pool.verdicts([({'answer': '1'}, 'Answer: 1')]) == [True]\n"
        "print(pool._server._process.pid, pool._idle[0].process, flush=True)\nos.kill(os.getpid(), 9)\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode == -signal.SIGKILL, run.stderr
    processes = [int(text) for text in run.stdout.split()]
    deadline = time.monotonic() + 10.0
    while any(map(psutil.pid_exists, processes)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert len(processes) == 2 and not any(map(psutil.pid_exists, processes))


def test_a_worker_that_cannot_be_shut_in_stops_the_run(monkeypatch):
    pool = GradingPool([], maths=False, timeout=5.0)
    monkeypatch.setattr(pool._server, "fork", lambda channel: channel.sendall(b"!no seccomp here") or 1)
    monkeypatch.setattr(pool, "_start_again", lambda: None)
    with pytest.raises(GradingStopped, match="no seccomp here"):
        pool.verdicts([({"answer": "1"}, "Answer: 1")])
    pool.close()
