"""What may be evaluated of an answer, and what a process that has been guarded still compiles."""

from __future__ import annotations

import subprocess
import sys

import pytest

from megatron_ac2.grading.expressions import RefusedExpression, _is_formula, check_arithmetic, check_symbolic


@pytest.mark.parametrize("text", ["1", "-1.5e3", "[[0, 1], [1, 0]]", "('a', 'b')", "(0x1f << 2) | 3", " 2**3 "])
def test_arithmetic(text):
    check_arithmetic(text)


@pytest.mark.parametrize(
    "text", ["x", "f(1)", "[x for x in [1]]", "a.b", "a[0]", "{1: 2}", "lambda: 1", "f'{1}'", "1 if 1 else 2", "",
             "1;2", "(x := 1)", "1 " * 6000, "(" * 5000, "import os", "*[1]", "await x", "yield"]
)  # fmt: skip
def test_no_arithmetic(text):
    with pytest.raises(RefusedExpression):
        check_arithmetic(text)


@pytest.mark.parametrize(
    "code", ["Symbol('x')**Integer(2)", "Float('0.5')*exp(-Symbol('x'))", "factorial(Integer(3))", "x + C", "pi*E",
             "Function('f')(Symbol('x'))", "log(x, Integer(10))", "Integer(1) < x", "sqrt(x) == abs(x)", "Max(x, C)"]
)  # fmt: skip
def test_symbolic(code):
    check_symbolic(code, {"x", "C"})


@pytest.mark.parametrize(
    "code", ["y", "open('a')", "sin('x')", "expand(x)", "Integral(x, x)", "integrate(x)", "x.diff()", "x[0]",
             "S('1')", "sin(x, evaluate=False)", "Lambda(x, x)", "sympify('x')", "__import__('os')", "sin", "'a'",
             "(lambda: x)()", "sin.a", "sin(x)(x)", "print(x)", "eval(x)", "getattr(x, x)", "MellinTransform(x, x, x)"]
)  # fmt: skip
def test_not_symbolic(code):
    with pytest.raises(RefusedExpression):
        check_symbolic(code, {"x"})


@pytest.mark.parametrize(
    ("code", "is_formula"),
    [
        ("def _lambdifygenerated(x):\n    return x**2 + sin(x)\n", True),
        ("def f(x, y):\n    x0 = x + y\n    return (x0 if x > 0 else -x0)\n", True),
        ("import math; from math import *", True),
        ("import os; from os import *", False),
        ("def f(x):\n    return open(x)\n", False),
        ("def f(x):\n    return x.__class__\n", False),
        ("def f(x):\n    return (lambda: x)()\n", False),
        ("def f(x):\n    return __import__\n", False),
        ("f(", False),
    ],
)
def test_what_lambdify_writes_is_a_formula(code, is_formula):
    assert _is_formula(code) is is_formula


GUARDED = """
import os, sys
import sympy
from megatron_ac2.grading import confinement
from megatron_ac2.grading.verifiers import Verifiers

import pyseccomp
Verifiers([], maths=False)
assert "sympy.combinatorics.graycode" not in sys.modules
confinement.load_filter()
from sympy.combinatorics.graycode import GrayCode  # out of memory: no file can be opened

x, bad = sympy.Symbol("x"), sympy.Symbol("__import__('os').getpid()")
assert list(GrayCode(2).generate_gray()) and sympy.integrate(x, (x, 0, 1)) == sympy.Rational(1, 2)
assert sympy.lambdify(x, x**2 + sympy.sin(0), modules="math")(3) == 9
assert abs(sympy.CRootOf(x**5 - x - 1, 0).evalf() - 1.1673) < 1e-4
refused = 0
for attempt in (
    lambda: eval("1+1"), lambda: exec("1"), lambda: compile("1", "a", "eval"), lambda: sympy.lambdify(x, x + bad),
    lambda: sympy.sympify("open('/etc/passwd')"), lambda: sympy.sympify("x.diff()"), lambda: compile(b"1", "a", "exec"),
):
    try:
        attempt()
    except Exception as error:
        assert "not executed" in str(error) or "accepted: arithmetic" in str(error), repr(error)
        refused += 1
os.write(1, f"refused {refused}".encode())
os._exit(0)
"""


def test_a_guarded_process_computes_and_compiles_nothing_else():
    run = subprocess.run([sys.executable, "-W", "ignore", "-c", GUARDED], capture_output=True, text=True)
    assert run.stdout == "refused 7", run.stderr
