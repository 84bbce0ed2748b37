"""Two ranks that share every sequence do what two do that each have their own."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.fork_server import ForkServer, Job
from tests.end_to_end.conftest import losses, sft
from tests.end_to_end.runs import Launcher, reproducible, steps


def test_two_steps_of_ac2_have_the_same_metrics(launcher: Launcher, tmp_path: Path) -> None:
    """The engine, the graders and what is drawn know nothing of it; actor and value head train on shared sequences."""
    changes = (launcher.critic, "run.num_steps=2", "run.checkpoint_every=0")
    for name, context in (("own", 1), ("shared", 2)):
        launcher.run(tmp_path / name, *changes, f"parallel.context={context}").passed()
    own, shared = ([numbers(row) for row in steps(tmp_path / name)] for name in ("own", "shared"))
    assert len(own) == 2 and own[1]["critic/loss"] > 0 and own[1]["actor/grad_norm"] > 0
    for one, other in zip(shared, own, strict=True):
        assert len(one) > 50 and one == pytest.approx(other, rel=1e-5, abs=2e-6, nan_ok=True)


def numbers(row: dict[str, Any]) -> dict[str, float]:
    return {name: math.nan if value is None else value for name, value in reproducible(row).items()}


@pytest.mark.parametrize("head", ["lm", "value"])
def test_the_supervised_stage_takes_the_same_steps(
    head: str, server: ForkServer, inputs: Path, start: tuple[Path, Job], critic: tuple[Path, Job], tmp_path: Path
) -> None:
    model, expected = (inputs / "base", start[1]) if head == "lm" else (start[0], critic[1])
    changes = ("parallel.context=2", f"sft.head={head}", "sft.num_steps=3")
    found = losses(sft(server, inputs / "worked.jsonl", model, tmp_path / "out", *changes))
    assert len(found) == 3 and found[:2] == pytest.approx(losses(expected)[:2], abs=2e-4)
