"""Memory that is given up and comes back: bytes, views and sizes, with the copies for real."""

from __future__ import annotations

import pytest
import torch

from megatron_ac2.parallel import host_memory
from megatron_ac2.parallel.host_memory import HostSwap, check_here


def sizes(*tensors: torch.Tensor) -> list[int]:
    return [tensor.untyped_storage().nbytes() for tensor in tensors]


def test_views_share_one_storage_that_leaves_once_and_comes_back_with_them() -> None:
    base = torch.arange(10, dtype=torch.float32)
    front, back = base[:4], base[4:].view(2, 3)
    swap = HostSwap(lambda: [front, back, base])
    assert swap.to_host() == 40 and swap.is_away
    assert sizes(base, front, back) == [0, 0, 0]
    for tensor in (base, front, back):
        with pytest.raises(RuntimeError, match="the weights: in host memory"):
            check_here(tensor, "the weights")
    assert swap.to_host() == 0  # away already
    swap.to_device()
    swap.to_device()
    check_here(base, "the weights")
    assert sizes(front) == [40] and not swap.is_away
    back[0, 0] = -1.0
    assert base.tolist() == [0, 1, 2, 3, -1, 5, 6, 7, 8, 9]


def test_bytes_survive_the_cuts_between_pieces_of_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "_PIECE", 16)
    tensors = [torch.randn(n).to(dtype) for n, dtype in ((3, torch.bfloat16), (9, torch.float32), (5, torch.float64))]
    tensors[1].view(torch.int32)[2] = 0x7FC00123  # a NaN with a payload
    before = [tensor.view(torch.uint8).clone() for tensor in tensors]
    swap = HostSwap(lambda: tensors)
    for _ in range(2):
        assert swap.to_host() == 6 + 36 + 40 and sizes(*tensors) == [0, 0, 0]
        pieces = list(swap._pieces)
        swap.to_device()
        assert all(torch.equal(tensor.view(torch.uint8), old) for tensor, old in zip(tensors, before))
        assert all(one is other for one, other in zip(pieces, swap._pieces, strict=True))  # kept for the next time
    assert [len(piece) for piece in pieces] == [16] * 5 + [2]


def test_what_is_not_kept_comes_back_as_zeros() -> None:
    gradients = torch.ones(6)
    swap = HostSwap(lambda: [gradients], keep=False)
    assert swap.to_host() == 24 and not swap._pieces
    swap.to_device()
    assert gradients.tolist() == [0.0] * 6


def test_storages_of_others_stay() -> None:
    weight, moment = torch.ones(4), torch.ones(4)
    swap = HostSwap(lambda: [weight[1:], moment], but=lambda: [weight])
    assert swap.to_host() == 16 and sizes(weight, moment) == [16, 0]
    swap.to_device()
    assert moment.tolist() == [1.0] * 4


def test_tensors_are_asked_for_when_they_leave() -> None:
    """An optimizer may make new ones."""
    held = [torch.ones(2)]
    swap = HostSwap(lambda: held)
    swap.to_host()
    swap.to_device()
    held[:] = [torch.full((5,), 7.0), torch.empty(0)]
    assert swap.to_host() == 20
    swap.to_device()
    assert held[0].tolist() == [7.0] * 5
