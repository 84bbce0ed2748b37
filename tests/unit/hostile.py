"""Answers that a policy might find out: each would leave a mark in a folder, were it executed, or run for ever."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import reasoning_gym

from megatron_ac2.types import Problem

# The verifiers that evaluate text: the answer, or (number_sorting, bitwise_arithmetic) what the entry holds.
EVALUATING = (
    "countdown", "puzzle24", "simple_integration", "intermediate_integration", "polynomial_multiplication",
    "n_queens", "string_insertion", "spiral_matrix", "binary_matrix", "number_sorting", "bitwise_arithmetic",
)  # fmt: skip


def entry_of(dataset: str, index: int = 0) -> dict:
    return reasoning_gym.create_dataset(dataset, size=index + 1, seed=1)[index]


def gym_problem(dataset: str, entry: dict | None = None) -> Problem:
    grading = {"reasoning_gym": {"dataset": dataset, "entry": entry_of(dataset) if entry is None else entry}}
    return Problem(f"{dataset} problem", np.zeros(1, dtype=np.int32), "q", grading)


def maths_problem(answer: str) -> Problem:
    return Problem(f"= {answer}", np.zeros(1, dtype=np.int32), "q", {"answer": answer})


def hostile_answers(folder: Path, port: int) -> list[str]:
    """At least thirty. Whatever of them is executed makes a file in `folder`, or connects to `port`."""
    import_os = "__import__('os')"
    touch = f"{import_os}.system('touch {folder}/{{}}')"
    leak = f"open('{folder}/{{}}','w').write({{}})"
    socket = f"__import__('socket').create_connection(('127.0.0.1',{port}))"
    run = touch.format
    return [
        # programs and files
        run("system"), f"[{run('list')}]", f"[{run('comprehension')} for _ in [1]]", f"({run('tuple')},)",
        f"{{{run('set')}: 1}}", f"1 if {run('condition')} else 2", f"(lambda: {run('lambda')})()",
        f"{import_os}.popen('touch {folder}/popen').read()", f"__import__('subprocess').run(['touch','{folder}/run'])",
        f"open('{folder}/open','w')", f"__import__('pathlib').Path('{folder}/path').touch()",
        f"eval(\"{run('eval')}\")".replace("'", "\\'"), f"exec('open(\"{folder}/exec\",\"w\")')",
        f"compile('open(\"{folder}/compile\",\"w\")','','eval')", f"sympify('open(\"{folder}/sympify\",\"w\")')",
        f"S('open(\"{folder}/S\",\"w\")')", f"parse_expr('open(\"{folder}/parse\",\"w\")')",
        f"lambdify([], 'open(\"{folder}/lambdify\",\"w\")')()", f"Symbol('open(\"{folder}/symbol\",\"w\")')",
        f"f\"{{{run('format')}}}\"", f"(a := {run('walrus')})", f"x={run('equals')}", f"1;{run('statement')}",
        f"__builtins__['open']('{folder}/builtins','w')", f"getattr(__builtins__,'open')('{folder}/getattr','w')",
        f"().__class__.__base__.__subclasses__()[-1]({run('subclasses')})",
        f"print.__self__.open('{folder}/self','w')", f"sin.__class__.__init__.__globals__['open']('{folder}/sin','w')",
        f"max([1],key=lambda _: open('{folder}/key','w'))", f"1+{run('sum')}", f"sin({run('argument')})",
        # what is to be seen from there
        socket, f"[{socket}]", leak.format("environment", f"str({import_os}.environ)"),
        leak.format("frames", "str(__import__('sys')._getframe(1).f_locals)"),
        leak.format("objects", "str(__import__('gc').get_objects())"),
        leak.format("parent", "open('/proc/1/environ').read()"),
        # its own reward
        "__import__('sys')._getframe(1).f_locals['entry']['answer']",
        "[__import__('sys')._getframe(1).f_locals['entry']['answer']]",
        "__import__('builtins').__dict__.__setitem__('float', lambda *_: 1.0)",
        "setattr(__import__('numpy'),'isclose',lambda *a,**k: True)",
        "__import__('reasoning_gym').__dict__.clear()", "exit()", "quit(0)", "__import__('os')._exit(0)",
        "__import__('os').kill(__import__('os').getppid(),9)",
        # LaTeX
        f"\\input{{{folder}/input}}", f"\\immediate\\write18{{touch {folder}/write18}}",
        f"\\text{{{run('text')}}}", f"\\operatorname{{{run('operator')}}}(1)", f"\\mathrm{{{run('mathrm')}}}",
    ]  # fmt: skip


# They end a worker, or keep it for longer than the limit, if nothing stops them.
BOMBS = (
    "9**9**9**9", "[0]*10**11", "factorial(10**8)", "'a'*10**12", "(" * 4_000 + "1" + ")" * 4_000, "-" * 9_000 + "1",
    "1+" * 4_500 + "1", "10^{10^{10}}", "100000000!", "{" * 20_000, "\\frac{1}{" * 2_000 + "}" * 2_000,
    "\\sqrt" * 5_000,
)  # fmt: skip
