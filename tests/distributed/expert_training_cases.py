"""One job: optimizers of experts that are shared out, against torch AdamW; checkpoints across layouts; replayed
routers.

usage: torchrun ... expert_training_cases.py EVERY_LAYER_DIR LAST_LAYER_DIR SCRATCH_DIR REPLAY_REFERENCE.pt
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_ac2.config_training import ParallelConfig
from tests.distributed.checkpoint_cases import (
    Trainee,
    assert_traces,
    assert_weights,
    master_weights_case,
    overlap_case,
    resume_case,
    two_adams_case,
)
from tests.distributed.groups import run_cases
from tests.distributed.replay_cases import replay_case

ALONE, PP2, EP2, EP4 = (ParallelConfig(pipeline=p, expert=e) for p, e in ((1, 1), (2, 1), (1, 2), (1, 4)))
TP2 = ParallelConfig(tensor=2, sequence=True)
TP2_EP2 = ParallelConfig(tensor=2, sequence=True, expert=2)
TP2_WHOLE = ParallelConfig(tensor=2, sequence=True, expert=2, expert_tensor=1)
PP2_EP2 = ParallelConfig(pipeline=2, expert=2)
VPP2_EP2 = ParallelConfig(pipeline=2, virtual_pipeline=2, expert=2)
CP2 = ParallelConfig(context=2)
CP2_EP2 = ParallelConfig(context=2, expert=2)
TP2_CP2 = ParallelConfig(tensor=2, sequence=True, context=2)


def both(*layouts: ParallelConfig) -> list[tuple[ParallelConfig, bool]]:
    """With the plain optimizer and the distributed one."""
    return [(layout, distributed) for layout in layouts for distributed in (False, True)]


def one_rank_differs_case(folder: Path) -> None:
    """A gradient of one rank's experts that is not finite stops the step on every rank, and changes nothing."""
    for distributed in (False, True):
        trainee = Trainee(folder, EP2, distributed)
        before = trainee.weights()
        trainee.backward(0)
        for name, parameter in trainee.model.named_parameters():
            if dist.get_rank() == 1 and "experts.local_experts.2.linear_fc1" in name:
                parameter.main_grad.view(-1)[-1] = float("inf")
        result = trainee.optimizer.step("actor")
        assert not result.ok and trainee.optimizer.for_role("actor").num_steps == 0
        assert_weights(trainee.weights(), before, 0, "after a refused step")
        assert_traces(trainee.train(0, 2), Trainee(folder, EP2, distributed).train(0, 2), 0, "go on")


def cases(every: Path, last: Path, scratch: Path, replay: Path) -> dict[int, dict[str, Callable[[], None]]]:
    bf16 = torch.bfloat16
    return {
        2: {
            "adams": lambda: two_adams_case(every, [*both(EP2, TP2_WHOLE), (TP2, True), (CP2_EP2, True)]),
            "adams, a stage without experts": lambda: two_adams_case(last, both(PP2)),
            "overlap": lambda: overlap_case(every, scratch, EP2),
            "not finite": lambda: one_rank_differs_case(every),
            "resume": lambda: resume_case(
                every, scratch / "a", (EP2, True), [(EP2, True), (TP2_WHOLE, False), (ALONE, True), (PP2, True)]
            ),
            "resume plain": lambda: resume_case(every, scratch / "b", (TP2_WHOLE, False), [(EP2, False), (TP2, True)]),
            "resume last": lambda: resume_case(last, scratch / "c", (PP2, True), [(EP2, False), (PP2, True)]),
            "master weights": lambda: master_weights_case(
                every, scratch / "d", (EP2, True), [(TP2, True), (PP2, False), (EP2, True)]
            ),
            "resume value": lambda: resume_case(every, scratch / "e", (EP2, True), [(TP2_WHOLE, True)], bf16, "value"),
            "replay": lambda: replay_case(
                every, replay, [(EP2, "none"), (TP2, "full"), (PP2, "full"), (CP2, "none")]
            ),
            "replay, a stage without experts": lambda: replay_case(last, replay, [(PP2, "selective")]),
        },
        4: {
            "adams": lambda: two_adams_case(
                every, [*both(EP2, TP2_EP2), (EP4, True), (TP2_WHOLE, False), (CP2_EP2, True)]
            ),
            "adams, a stage without experts": lambda: two_adams_case(last, [(PP2_EP2, True), (VPP2_EP2, True)]),
            "resume": lambda: resume_case(every, scratch / "f", (EP2, True), [(PP2_EP2, True), (TP2_EP2, False)]),
            "replay": lambda: replay_case(every, replay, [(TP2_CP2, "full"), (TP2_EP2, "none")]),
            "replay, interleaved": lambda: replay_case(last, replay, [(VPP2_EP2, "full")]),
        },
    }  # fmt: skip


def main() -> None:
    run_cases(cases(*map(Path, sys.argv[1:]))[int(os.environ["WORLD_SIZE"])])


if __name__ == "__main__":
    main()
