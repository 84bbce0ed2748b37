"""Tensors that give up their device memory for a while: their bytes move to the host, or are dropped, and come back.

It is the storage that shrinks to nothing. Views of it (a gradient inside a buffer, a weight inside another) stay what
they are, and see the same bytes once it has grown again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch

_PIECE = 2**28  # bytes; torch rounds pinned memory up to a power of two


class HostSwap:
    """The storages behind the tensors that `tensors()` names whenever they are to leave; each one once.

    `keep`: their bytes wait in host memory, pinned where they come from a GPU, which is kept for the next time; else
    they are dropped, and are zeros when they return. `but`: tensors whose storages are another's to move.
    """

    def __init__(
        self,
        tensors: Callable[[], Iterable[torch.Tensor]],
        keep: bool = True,
        but: Callable[[], Iterable[torch.Tensor]] = tuple,
    ):
        self._tensors, self._but, self._keep = tensors, but, keep
        self._away: list[tuple[torch.UntypedStorage, int]] | None = None
        self._pieces: list[torch.Tensor] = []

    @property
    def is_away(self) -> bool:
        return self._away is not None

    @torch.no_grad()
    def to_host(self) -> int:
        """Free the device memory; how many bytes that was. Does nothing if they have left already."""
        if self._away is not None:
            return 0
        others = _storages(self._but())
        mine = [storage for place, storage in _storages(self._tensors()).items() if place not in others]
        away = [(storage, storage.nbytes()) for storage in mine]
        if self._keep:
            for on_host, on_device in self._pairs(away):
                on_host.copy_(on_device, non_blocking=True)
        _wait(mine)
        for storage in mine:
            storage.resize_(0)
        self._away = away
        return sum(size for _, size in away)

    @torch.no_grad()
    def to_device(self) -> None:
        """Take the memory back. Does nothing if they are there."""
        if self._away is None:
            return
        away, self._away = self._away, None
        for storage, size in away:
            storage.resize_(size)
        if self._keep:
            for on_host, on_device in self._pairs(away):
                on_device.copy_(on_host, non_blocking=True)
        else:
            for storage, _ in away:
                _bytes_of(storage).zero_()
        _wait([storage for storage, _ in away])

    def _pairs(self, away: list[tuple[torch.UntypedStorage, int]]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """(host bytes, device bytes), of the storages one after another, cut where a piece of host memory ends."""
        total = sum(size for _, size in away)
        on_cuda = any(storage.device.type == "cuda" for storage, _ in away)
        while (room := sum(map(len, self._pieces))) < total:
            self._pieces.append(torch.empty(min(_PIECE, total - room), dtype=torch.uint8, pin_memory=on_cuda))
        free = list(self._pieces)
        for storage, _ in away:
            on_device = _bytes_of(storage)
            while len(on_device):
                count = min(len(on_device), len(free[0]))
                yield free[0][:count], on_device[:count]
                on_device, free[0] = on_device[count:], free[0][count:]
                if not len(free[0]):
                    free.pop(0)


def check_here(tensor: torch.Tensor, what: str) -> None:
    """Raise RuntimeError if the tensor's memory has been given up: to touch it would be to read what is not there."""
    if tensor.numel() > 0 and tensor.untyped_storage().nbytes() == 0:
        raise RuntimeError(f"{what}: in host memory while the engine runs (run.offload); it must come back first")


def _storages(tensors: Iterable[torch.Tensor]) -> dict[int, torch.UntypedStorage]:
    """By address. On the meta device, and where nothing is left, there are none."""
    found = (tensor.untyped_storage() for tensor in tensors)
    return {storage.data_ptr(): storage for storage in found if storage.nbytes()}


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _wait(storages: list[torch.UntypedStorage]) -> None:
    """For the copies, which run behind."""
    if any(storage.device.type == "cuda" for storage in storages):
        torch.cuda.synchronize()
