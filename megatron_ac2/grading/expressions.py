"""Which answers may be computed with. The verifiers that we use evaluate text as Python: reasoning-gym calls `eval`,
and so does sympy's `parse_expr`, for it and for math-verify. An answer may hold arithmetic and functions of numbers;
other syntax (attributes, subscripts, comprehensions, calls of anything else) is refused before it is compiled.

`guard()` puts this into the libraries and then lets Python compile, in this process and for good, no other text: what
a later version of a verifier evaluates somewhere else is refused rather than run.
"""

from __future__ import annotations

import ast
import builtins
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, NoReturn

# `from sympy import *`: parse_expr executes it at every call.
_SYMPY_NAMES = "from sympy import *"
_ARITHMETIC = (
    ast.Expression, ast.Constant, ast.BinOp, ast.UnaryOp, ast.Tuple, ast.List, ast.Load, ast.Add, ast.Sub, ast.Mult,
    ast.Div, ast.FloorDiv, ast.Mod, ast.Pow, ast.BitXor, ast.BitAnd, ast.BitOr, ast.LShift, ast.RShift, ast.UAdd,
    ast.USub, ast.Invert,
)  # fmt: skip
_COMPARISONS = (
    ast.Compare, ast.BoolOp, ast.And, ast.Or, ast.Not, ast.Eq, ast.NotEq, ast.Lt, ast.LtE, ast.Gt, ast.GtE,
)  # fmt: skip
_CONSTANTS = frozenset({"E", "I", "pi", "oo", "zoo", "nan", "GoldenRatio", "EulerGamma", "Catalan", "true", "false"})
_OF_TEXT = frozenset({"Symbol", "Integer", "Float", "Rational", "Function"})  # what parse_expr makes of a token
_PLAIN_CALLS = frozenset({"sqrt", "cbrt", "root", "abs", "pow", "round", "max", "min", "Max", "Min", "Mod"})
# Who else writes code and compiles it: from numbers and from names of its own.
_WRITERS = frozenset({"sympy.polys.monomials", "collections", "dataclasses"})
_LAMBDIFY = "sympy.utilities.lambdify"
_FORMULAS = (
    ast.Module, ast.FunctionDef, ast.arguments, ast.arg, ast.Return, ast.Assign, ast.Name, ast.Store, ast.Call,
    ast.keyword, ast.IfExp, ast.Import, ast.ImportFrom, ast.alias, ast.Expr,
)  # fmt: skip
_BUILTINS = frozenset(dir(builtins)) - {"abs", "max", "min", "pow", "round", "sum", "len", "complex", "float", "int"}
_MAX_CHARS = 10_000  # longer than any expression that is an answer; a parser's stack is not unlimited

_compilable = _SYMPY_NAMES
_is_own_code = False


class RefusedExpression(ValueError):
    """Text that no answer needs, and that is not evaluated."""


def check_arithmetic(source: str) -> ast.Expression:
    """The tree of numbers, text and lists of them, and operators between them. Raises `RefusedExpression`."""
    tree = _parse(source)
    for node in ast.walk(tree):
        if not isinstance(node, _ARITHMETIC):
            raise RefusedExpression(f"found {type(node).__name__}, accepted: literals and arithmetic")
    return tree


def check_symbolic(source: str, symbols: frozenset[str] | set[str] = frozenset()) -> None:
    """For what sympy's `stringify_expr` made of an answer: besides arithmetic, comparisons, `symbols`, constants, and
    calls of elementary and special functions. Raises `RefusedExpression`.

    Not what works on expressions (`expand`, `integrate`, `Integral`): an answer is to hold the result.
    """
    tree = _parse(source)
    called = {id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    texts = {id(argument) for node in ast.walk(tree) if _takes_text(node) for argument in node.args}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            known = _functions() if id(node) in called else _CONSTANTS | symbols
            is_accepted = node.id in known
        elif isinstance(node, ast.Call):
            is_accepted = not node.keywords and (isinstance(node.func, ast.Name) or _is_new_function(node.func))
        elif isinstance(node, ast.Constant):
            is_accepted = isinstance(node.value, (int, float, complex)) or id(node) in texts
        else:
            is_accepted = isinstance(node, _ARITHMETIC + _COMPARISONS)
        if not is_accepted:
            raise RefusedExpression(f"found {ast.unparse(node)[:60]!r}, accepted: arithmetic and elementary functions")


def _takes_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _OF_TEXT


def _is_new_function(node: ast.AST) -> bool:
    """f of f(x), which parse_expr turns into Function('f')(Symbol('x'))."""
    return _takes_text(node) and node.func.id == "Function"


def _parse(source: str) -> ast.Expression:
    global _compilable
    if not isinstance(source, str) or len(source) > _MAX_CHARS:
        raise RefusedExpression(f"found more than {_MAX_CHARS} characters, or no text")
    _compilable = source  # parsing counts as compiling; the caller refuses it in the next line, or never
    try:
        return ast.parse(source.strip(), mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise RefusedExpression(f"not an expression: {error}") from None
    finally:
        _compilable = _SYMPY_NAMES


@lru_cache(maxsize=1)
def _functions() -> frozenset[str]:
    """sympy's functions of numbers by name. Its transforms (LaplaceTransform, ...) compute, and are none."""
    import sympy

    functions = {
        name
        for name in dir(sympy)
        if isinstance(value := getattr(sympy, name), type)
        and issubclass(value, sympy.Function)
        and not name.endswith("Transform")
    }
    return frozenset(functions - {"WildFunction", "Function"}) | _PLAIN_CALLS | _OF_TEXT


def _evaluate(source: str, *_: Any) -> Any:
    """Instead of `eval` in reasoning-gym's modules."""
    return eval(compile(check_arithmetic(source), "<answer>", "eval"), {"__builtins__": {}})


def _refuse(*_: Any) -> NoReturn:
    raise RefusedExpression("answers are not executed")


def guard() -> None:
    """From now on this process evaluates answers by the rules above, and compiles no other text. Cannot be undone.

    To be called when all modules are loaded: what is imported later is not guarded, and can only fail.
    """
    from sympy.parsing import sympy_parser

    stringify = sympy_parser.stringify_expr

    def checked(source: str, local_dict: dict, *rest: Any) -> str:
        global _compilable
        if len(source) > _MAX_CHARS:
            raise RefusedExpression(f"found an expression of {len(source)} characters, accepted: {_MAX_CHARS}")
        code = stringify(source, local_dict, *rest)
        check_symbolic(code, {name for name in local_dict if isinstance(name, str)})
        _compilable = code  # which parse_expr evaluates next, or parses if it is not to simplify
        return code

    sympy_parser.stringify_expr = checked
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] == "reasoning_gym":
            module.eval, module.exec, module.compile = _evaluate, _refuse, _refuse
    sys.addaudithook(_audit)


@contextmanager
def own_code() -> Iterator[None]:
    """Around the import of a module, which may compile text of its own."""
    global _is_own_code
    before, _is_own_code = _is_own_code, True
    try:
        yield
    finally:
        _is_own_code = before


def _audit(event: str, arguments: tuple) -> None:
    if event != "compile" or _is_own_code or not isinstance(source := arguments[0], (str, bytes)):
        return
    text = (source.decode(errors="replace") if isinstance(source, bytes) else source).strip()
    if text in (_compilable.strip(), _SYMPY_NAMES) or text.isidentifier():
        return
    writer = sys._getframe(1).f_globals.get("__name__")
    if writer not in _WRITERS and not (writer == _LAMBDIFY and _is_formula(text)):
        raise RefusedExpression("answers are not executed")


def _is_formula(source: str) -> bool:
    """Whether what sympy's lambdify has made of an expression computes and does nothing else: it prints the names of
    symbols as they are. Its own imports of numeric functions are, too."""
    global _compilable
    before, _compilable = _compilable, source
    try:
        nodes = list(ast.walk(ast.parse(source)))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    finally:
        _compilable = before
    calls = {id(node.func) for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
    return all(
        isinstance(node, _ARITHMETIC + _COMPARISONS + _FORMULAS)
        and not (isinstance(node, ast.Call) and id(node.func) not in calls)
        and not (isinstance(node, ast.Name) and (node.id.startswith("_") or node.id in _BUILTINS))
        and not (isinstance(node, (ast.Import, ast.ImportFrom)) and not _imports_numbers(node))
        for node in nodes
    )


def _imports_numbers(node: ast.Import | ast.ImportFrom) -> bool:
    names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
    return all(name.split(".")[0] in ("math", "cmath", "mpmath", "numpy", "scipy", "sympy") for name in names)
