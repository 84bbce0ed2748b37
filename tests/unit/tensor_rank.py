"""A tensor-parallel group whose ranks are played one after the other in one process."""

from __future__ import annotations


class TensorRank:
    """What our code asks of a process group: which rank of how many this is."""

    def __init__(self, rank: int, size: int):
        self._rank, self._size = rank, size

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size
