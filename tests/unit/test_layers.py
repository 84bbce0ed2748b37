"""Imports only point down (README, map of the code), and what must stay light stays light."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "megatron_ac2"
CONFIGURATION = frozenset({"config", "config_training", "config_values", "config_checks", "config_file", "config_yaml"})
LAYERS: tuple[frozenset[str], ...] = (
    CONFIGURATION | {"types", "architecture", "random_streams"},
    frozenset({"algorithm", "data", "grading"}),
    frozenset({"parallel"}),
    frozenset({"model", "kernels", "metrics", "console", "perf", "plots"}),
    frozenset({"training", "engine", "memory"}),
)
TOP = len(LAYERS)  # every other module at the top level is a part of an entry point
LIGHT = ("algorithm", "data", "grading")
MAX_FUNCTION_LINES = 40  # of the algorithm, docstring included


def part_of(module: str) -> str:
    """ "megatron_ac2.algorithm.losses" -> "algorithm": a module at the top level, or a package below it."""
    return module.split(".")[1]


def layer_of(part: str) -> int:
    return next((number for number, parts in enumerate(LAYERS) if part in parts), TOP)


def modules() -> dict[str, Path]:
    """Dotted name -> file, of every module; a package's own name for its __init__."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        names = [PACKAGE.name, *path.relative_to(PACKAGE).with_suffix("").parts]
        found[".".join(names[:-1] if names[-1] == "__init__" else names)] = path
    return found


def imports(tree: ast.AST, module: str) -> Iterator[str]:
    """Every module that the code names in an import, wherever it stands, relative ones resolved."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = module.split(".")[: -node.level] if node.level else []
            source = ".".join([*base, *([node.module] if node.module else [])])
            yield source
            yield from (f"{source}.{alias.name}" for alias in node.names)


def forbidden(importer: str, imported: str) -> str | None:
    """Why the part `importer` may not import the part `imported`; None if it may."""
    above, below = layer_of(importer), layer_of(imported)
    if importer == imported or below < above:
        return None
    if below > above:
        return f"{importer} (layer {above}) imports {imported} (layer {below}): imports point down"
    if all((PACKAGE / f"{part}.py").is_file() for part in (importer, imported)):
        return None  # two modules at the top level; no cycles, below
    return f"{importer} imports {imported}: both are in layer {above}, and packages of a layer do not know each other"


def internal(module: str, path: Path) -> set[str]:
    known = modules()
    return {name for name in imports(ast.parse(path.read_text()), module) if name in known and name != PACKAGE.name}


@pytest.mark.parametrize("module", [name for name in modules() if name != PACKAGE.name])
def test_imports_point_down(module):
    found = {forbidden(part_of(module), part_of(name)) for name in internal(module, modules()[module])} - {None}
    assert not found, f"{modules()[module]}: {sorted(found)}"


def test_no_import_cycles():
    graph = {name: internal(name, path) for name, path in modules().items()}
    TopologicalSorter(graph).prepare()  # raises CycleError, which names the cycle


@pytest.mark.parametrize("module", [name for name in modules() if name != PACKAGE.name and part_of(name) in LIGHT])
def test_the_light_parts_name_neither_megatron_nor_vllm(module):
    roots = {name.split(".")[0] for name in imports(ast.parse(modules()[module].read_text()), module)}
    assert not roots & {"megatron", "vllm"}


def test_the_light_parts_load_neither_megatron_nor_vllm():
    names = [name for name in modules() if name != PACKAGE.name and part_of(name) in LIGHT]
    code = (
        f"import importlib, sys; [importlib.import_module(name) for name in {names}]; "
        "print(sorted({name.split('.')[0] for name in sys.modules} & {'megatron', 'vllm'}))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=PACKAGE.parent, check=False)
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip() == "[]"


ALGORITHM = [name for name in modules() if name != PACKAGE.name and part_of(name) == "algorithm"]


def function_lengths(tree: ast.AST) -> dict[str, int]:
    """Lines of every function, from its `def` to its end, wherever it stands."""
    return {
        f"{node.name}, line {node.lineno}": node.end_lineno - node.lineno + 1
        for node in ast.walk(tree)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    }


@pytest.mark.parametrize("module", ALGORITHM)
def test_every_function_of_the_algorithm_is_short(module):
    lengths = function_lengths(ast.parse(modules()[module].read_text()))
    too_long = {name: lines for name, lines in lengths.items() if lines > MAX_FUNCTION_LINES}
    assert not too_long, f"{modules()[module]}: {too_long}"


@pytest.mark.parametrize("module", ALGORITHM)
def test_the_algorithm_reads_no_configuration(module):
    """It takes tensors and plain values: layer 0 would let it import the configuration, this does not."""
    named = {name.split(".")[1] for name in internal(module, modules()[module])}
    assert not named & CONFIGURATION


def test_lengths_are_measured():
    code = "def long():\n    'words'\n    def inner():\n        pass\n    return 1\n"
    assert function_lengths(ast.parse(code)) == {"long, line 1": 5, "inner, line 3": 2}
    assert len(ALGORITHM) > 10


def test_the_rules_refuse_what_they_should():
    assert forbidden("training", "engine") and forbidden("engine", "training")
    assert forbidden("algorithm", "data") and forbidden("model", "kernels")
    assert forbidden("types", "train") and forbidden("model", "training")
    assert forbidden("training", "model") is None and forbidden("training", "training") is None
    assert forbidden("train", "engine") is None and forbidden("metrics", "console") is None


def test_imports_are_found_wherever_they_stand():
    code = "import a.b\nfrom c import d\ndef f():\n    from . import sibling\n    from ..model import build\n"
    found = set(imports(ast.parse(code), "megatron_ac2.engine.engine"))
    assert {"a.b", "c", "c.d", "megatron_ac2.engine.sibling", "megatron_ac2.model.build"} <= found
