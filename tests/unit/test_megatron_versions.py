"""Both ways in which Megatron writes down how a module and its parts are built."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from importlib import metadata

import pytest
from megatron.core.transformer.spec_utils import ModuleSpec

from megatron_ac2.parallel.megatron_versions import TESTED, built_class, parts_of, with_parts


@dataclass
class Parts:
    linear: type = int


class Built:
    def __init__(self, size: int, submodules: Parts):
        self.size = size
        self.linear = submodules.linear


BUILDERS = [
    ModuleSpec(module=Built, params={"size": 3}, submodules=Parts()),
    functools.partial(Built, 3, submodules=Parts()),
]


@pytest.mark.parametrize("builder", BUILDERS, ids=["spec", "partial"])
def test_other_parts_in_a_builder(builder):
    assert built_class(builder) is Built and parts_of(builder) == Parts(int)
    other = with_parts(builder, Parts(float))
    assert built_class(other) is Built and parts_of(other) == Parts(float)
    assert parts_of(builder) == Parts(int)
    if isinstance(other, functools.partial):
        assert (other().size, other().linear) == (3, float)
    else:
        assert other.params == {"size": 3}


def test_a_builder_without_parts():
    assert parts_of(Built) is None
    assert parts_of(functools.partial(Built, 3)) is None
    assert parts_of(ModuleSpec(module=Built)) is None


def test_the_megatron_of_these_tests_counts_as_tested():
    assert metadata.version("megatron-core") in TESTED
