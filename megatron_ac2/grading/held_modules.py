"""Modules that a calculation may come to need, held in memory: a worker that is shut in can open no file.

sympy imports much of itself when it first needs it. To execute all of that beforehand takes a second, to read it a
tenth of one.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import BuiltinImporter, FrozenImporter, ModuleSpec
from importlib.util import spec_from_loader
from types import CodeType, ModuleType

from megatron_ac2.grading.expressions import own_code

_LEFT_OUT = ("test", "bench")  # by the beginning of their names


class HeldModules(MetaPathFinder, Loader):
    """Answers imports of what these packages hold and have not imported yet, without looking at a disk again."""

    def __init__(self, packages: Sequence[str]):
        self._held = {name: held for package in packages for name, *held in _unimported(package)}

    def find_spec(self, name: str, path: object, target: ModuleType | None = None) -> ModuleSpec | None:
        if name not in self._held:
            return None
        code, is_package = self._held[name]
        spec = spec_from_loader(name, self, origin=code.co_filename, is_package=is_package)
        spec.has_location = True  # so that the module knows its file's name
        return spec

    def exec_module(self, module: ModuleType) -> None:
        with own_code():  # dataclasses and named tuples compile their methods from text
            exec(self._held[module.__name__][0], module.__dict__)


def hold(packages: Sequence[str]) -> None:
    """From now on this process imports what these packages hold, and what is in Python itself, and never from disk."""
    sys.meta_path[:] = [HeldModules(packages), BuiltinImporter, FrozenImporter]


def _unimported(package: str) -> Iterator[tuple[str, CodeType, bool]]:
    """Name, code, and whether it is a package, of all in `package` that is in Python and not imported."""
    pending = [(importlib.import_module(package).__path__, f"{package}.")]
    while pending:
        for finder, name, is_package in pkgutil.iter_modules(*pending.pop()):
            if name.rpartition(".")[2].startswith(_LEFT_OUT):
                continue
            spec = finder.find_spec(name)
            if spec.submodule_search_locations:
                pending.append((spec.submodule_search_locations, f"{name}."))
            with suppress(ImportError, SyntaxError):  # what cannot be compiled can be imported by nobody
                code = None if name in sys.modules else spec.loader.get_code(name)
                if code is not None:
                    yield name, code, is_package
