"""One job of two ranks: a trainer that leaves the device between its steps trains as one that stays.

usage: torchrun ... offload_cases.py UNTIED_DIR TIED_DIR SCRATCH_DIR
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

import torch

from megatron_ac2.config_training import ParallelConfig
from megatron_ac2.model.build import build_model
from megatron_ac2.model.checkpoint import load_checkpoint, save_checkpoint
from megatron_ac2.model.chunks import chunks_of, gpt_models
from megatron_ac2.training.offload import Offload
from tests.distributed.checkpoint_cases import DP2, IDENTITY, TP2, TP2_SP, Trainee, assert_refused
from tests.distributed.groups import run_cases

F32, BF16 = torch.float32, torch.bfloat16
STEPS = 4
ORDER = ("actor", "critic", "actor", "critic")


class Guest:
    """A trainee, a frozen model beside it, and their offload."""

    def __init__(self, folder: Path, layout: tuple, distributed: bool, dtype: torch.dtype, head: str, kind: str):
        self.trainee = trainee(folder, layout, distributed, dtype, head)
        parts = (self.trainee.hf_config, self.trainee.topology, self.trainee.parallel, dtype)
        self.frozen = build_model(*parts, head, seed=5).requires_grad_(False)
        self.models = {"actor": self.trainee.model, "reference": self.frozen}
        self.offload = Offload(kind, self.models, {"actor": self.trainee.optimizer})
        self.kind = kind
        self.bare = gpt_models(self.trainee.model)  # several chunks, with an interleaved pipeline
        self.parameters = [parameter for model in self.bare for parameter in model.parameters()]
        self.buffers = [buffer for chunk in chunks_of(self.trainee.model) for buffer in chunk.buffers]

    def expected_bytes(self) -> int:
        """Counted by elements: two moments a role, masters that are no weights, gradients, weights, frozen weights."""
        optimizer = self.trainee.optimizer
        masters = list(next(iter(optimizer.states.values())).moments)
        weights = {p.untyped_storage().data_ptr() for p in self.parameters}
        own = [master for master in masters if master.untyped_storage().data_ptr() not in weights]
        count = sum(2 * len(optimizer.states) * master.numel() for master in masters)
        count += sum(master.numel() for master in own) + sum(buffer.grad_data.numel() for buffer in self.buffers)
        if self.kind == "optimizer":
            return 4 * count
        # The distributed optimizer lays all weights into buffers, with gaps.
        held = [buffer.param_data for buffer in self.buffers if buffer.param_data is not None] or [*self.parameters]
        held += [tensor for model in (*self.bare, self.frozen) for tensor in model.buffers()]
        held += self.frozen.parameters()
        return 4 * count + sum({t.data_ptr(): t.numel() * t.element_size() for t in held}.values())

    def places(self) -> list[int | None]:
        """How far behind the start of its buffer each weight and gradient lies: the aliases that Megatron set up."""
        found: list[int | None] = []
        for parameter in self.parameters:
            for tensor in (parameter, parameter.main_grad):
                found += [tensor.storage_offset(), tensor.data_ptr() - tensor.untyped_storage().data_ptr()]
        for buffer in self.buffers:
            gradients = buffer.grad_data.untyped_storage().data_ptr()
            inside = [p for p in buffer.params if p.main_grad.untyped_storage().data_ptr() == gradients]
            assert len(inside) == len(buffer.params)
            if buffer.param_data is not None:
                weights = buffer.param_data.untyped_storage().data_ptr()
                assert all(p.untyped_storage().data_ptr() == weights for p in buffer.params)
        return found

    def assert_away(self) -> None:
        tensors = [buffer.grad_data for buffer in self.buffers]
        tensors += [m for state in self.trainee.optimizer.states.values() for m in first_moments(state)]
        if self.kind == "all":
            tensors += [*self.parameters, *self.frozen.parameters()]
        assert tensors and all(tensor.untyped_storage().nbytes() == 0 for tensor in tensors)


def trainee(folder: Path, layout: tuple | ParallelConfig, distributed: bool, dtype: torch.dtype, head: str) -> Trainee:
    return Trainee(folder, layout, distributed, dtype, head, overlap=getattr(layout, "overlap", False))


def first_moments(state) -> list[torch.Tensor]:
    return [moments["exp_avg"] for moments in state.moments.values()]


def offload_case(folder: Path, layout: tuple, distributed: bool, dtype: torch.dtype, head: str, kind: str) -> None:
    stays = trainee(folder, layout, distributed, dtype, head)
    trace = stays.train(0, STEPS, ORDER)
    expected = stays.weights()
    guest = Guest(folder, layout, distributed, dtype, head, kind)
    frozen = [p.clone() for p in guest.frozen.parameters()]
    wanted, places = guest.expected_bytes(), guest.places()
    found = []
    for step in range(STEPS):
        freed = guest.offload.leave()
        assert freed == wanted, f"freed {freed} bytes, expected {wanted}"
        guest.assert_away()
        guest.offload.leave(but=("actor",))  # as on the way to the engine
        guest.trainee.weights()
        if kind == "all":
            assert all(p.untyped_storage().nbytes() == 0 for p in guest.frozen.parameters())
        guest.offload.come_back()
        assert guest.places() == places
        assert all((buffer.grad_data == 0).all() for buffer in guest.buffers)
        found += guest.trainee.train(step, step + 1, ORDER)
    assert found == trace
    assert all(torch.equal(tensor, expected[name]) for name, tensor in guest.trainee.weights().items())
    assert all(torch.equal(p, old) for p, old in zip(guest.frozen.parameters(), frozen, strict=True))


def misuse_case(folder: Path, root: Path) -> None:
    """Whoever uses what is away hears of it; what was loaded after it came back counts."""
    guest = Guest(folder, DP2, True, BF16, "lm", "all")
    trained = guest.trainee
    trained.train(0, 1)
    parts = {"m": trained.model}, {"m": trained.optimizer}
    save_checkpoint(root, 1, *parts, {}, 1, IDENTITY)
    expected = trained.weights()
    trained.train(1, 2)
    needs_states = (
        lambda: trained.backward(0),
        lambda: trained.optimizer.step("actor"),
        lambda: save_checkpoint(root, 2, *parts, {}, 1, IDENTITY),
    )
    needs_weights = (trained.weights, lambda: save_checkpoint(root, 2, parts[0], {}, {}, 1, IDENTITY))
    guest.offload.leave(but=("actor",))
    for action in needs_states:
        assert_refused(action, RuntimeError, "in host memory", "run.offload")
    guest.offload.leave()
    for action in needs_weights:
        assert_refused(action, RuntimeError, "in host memory", "run.offload")
    guest.offload.come_back()
    load_checkpoint(root, *parts, IDENTITY)
    guest.offload.leave()
    guest.offload.come_back()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in trained.weights().items())
    assert_refused(lambda: Offload("weights", {}, {}), ValueError, "accepted: none, optimizer, all")


def main() -> None:
    untied, tied, scratch = map(Path, sys.argv[1:])
    layouts = [
        (untied, DP2, True, BF16, "value", "all"),
        (tied, ParallelConfig(overlap=True), True, BF16, "lm", "all"),
        (untied, TP2, False, BF16, "lm", "all"),
        (tied, ParallelConfig(pipeline=2, virtual_pipeline=2), True, F32, "lm", "all"),
        (untied, TP2_SP, True, F32, "value", "optimizer"),
    ]
    cases = {f"{case[0].name} {case[1:]}": partial(offload_case, *case) for case in layouts}
    run_cases(cases | {"misuse": partial(misuse_case, untied, scratch / "misuse")})


if __name__ == "__main__":
    main()
