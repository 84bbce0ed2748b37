"""Shares of work."""

from __future__ import annotations

import pytest

from megatron_ac2.parallel.collectives import split_evenly


@pytest.mark.parametrize(("n", "parts"), [(0, 3), (1, 3), (7, 3), (9, 3), (5, 1), (2, 8)])
def test_shares_cover_everything_once_and_evenly(n: int, parts: int):
    shares = [split_evenly(n, parts, index) for index in range(parts)]
    assert [item for share in shares for item in share] == list(range(n))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_seven_over_three():
    assert [list(split_evenly(7, 3, index)) for index in range(3)] == [[0, 1, 2], [3, 4], [5, 6]]
