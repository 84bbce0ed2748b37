"""Tests marked `gpu` are skipped where there is no CUDA device. Every run draws the same numbers, in any order."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from hypothesis import settings

settings.register_profile("repeatable", deadline=None, derandomize=True)  # no deadline: machines may be busy
settings.load_profile("repeatable")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


@pytest.fixture(autouse=True)
def same_random_states() -> None:
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
