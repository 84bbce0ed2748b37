"""Device memory that is given up for a while: what the allocator says, and that pinned copies keep every bit."""

from __future__ import annotations

import pytest
import torch

from megatron_ac2.parallel import host_memory
from megatron_ac2.parallel.host_memory import HostSwap


@pytest.mark.gpu
def test_memory_is_free_while_it_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "_PIECE", 2**22)
    weights = [torch.randn(3 * 2**20 + 5, device="cuda"), torch.randn(2**20, device="cuda", dtype=torch.bfloat16)]
    gradients = torch.ones(2**20, device="cuda")
    before = [weight.clone().cpu() for weight in weights]
    swaps = (HostSwap(lambda: [weights[0][7:], *weights]), HostSwap(lambda: [gradients], keep=False))
    held = torch.cuda.memory_allocated()
    for _ in range(2):
        freed = sum(swap.to_host() for swap in swaps)
        assert freed == (3 * 2**20 + 5) * 4 + 2**21 + 2**22
        assert torch.cuda.memory_allocated() <= held - freed
        assert swaps[0]._pieces[0].is_pinned()
        for swap in swaps:
            swap.to_device()
        assert all(torch.equal(weight.cpu(), old) for weight, old in zip(weights, before))
        assert not gradients.any() and torch.cuda.memory_allocated() == held
