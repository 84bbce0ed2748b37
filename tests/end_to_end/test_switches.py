"""What the algorithm's switches do to a whole run on two ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_ac2.model.checkpoint_files import latest, read_state
from tests.end_to_end.runs import Launcher, reproducible, rows, steps


def test_ac2_behind_a_gate_that_never_opens_is_prefix_grpo_bit_for_bit(launcher: Launcher, tmp_path: Path) -> None:
    """The critic is trained beside it, and never asked for an endpoint. While nothing is replayed it is GRPO, too."""
    run_dirs = {"ac2": tmp_path / "ac2", "prefix_grpo": tmp_path / "prefix_grpo"}
    closed = ("readiness.global_threshold=0", launcher.critic, "run.num_steps=3", "run.checkpoint_every=0")
    for routing, run_dir in run_dirs.items():
        launcher.run(run_dir, f"sampling.routing={routing}", *closed).passed()
    gated, baseline = (steps(run_dir) for run_dir in run_dirs.values())
    assert len(gated) == 3 and gated[2]["critic/loss"] > 0 and gated[2]["actor/grad_norm"] > 0
    for one, other in zip(gated, baseline, strict=True):
        shared = [name for name in reproducible(other) if not name.startswith("perf/")]
        assert len(shared) > 25 and {name: one[name] for name in shared} == {name: other[name] for name in shared}
    launcher.run(tmp_path / "grpo", "sampling.routing=grpo", *closed, "run.num_steps=1").passed()
    (bare,) = steps(tmp_path / "grpo")  # the same problems, drawn with the same seeds
    shared = [name for name in bare if name.startswith(("actor/", "mismatch/", "share/", "train/endpoint"))]
    assert len(shared) > 20 and {name: bare[name] for name in shared} == {name: gated[0][name] for name in shared}


def test_late_reshards_leave_old_weights_in_the_engine_until_they_are_due(launcher: Launcher, tmp_path: Path) -> None:
    changes = ("engine.publish_every=3", "sampling.routing=grpo", "run.num_steps=6", "evaluation.every=3",
               "run.checkpoint_every=3", "actor.anchor=behavior", "actor.optimizer.lr=1e-3")  # fmt: skip
    launcher.run(tmp_path / "straight", *changes).passed()
    taken = steps(tmp_path / "straight")
    assert [row["train/version_lag"] for row in taken] == [0, 1, 2, 0, 1, 2]
    assert [row["mismatch/logprob_abs_max"] > 1e-3 for row in taken] == [False, True, True, False, True, True]
    assert ["reshard/seconds" in row for row in taken] == [False, False, True, False, False, True]
    assert ["evaluation/mean" in row for row in rows(tmp_path / "straight")] == [True, False, False] * 2 + [True]
    resumed = tmp_path / "resumed"
    launcher.run(resumed, *changes, "run.num_steps=3").passed()
    launcher.run(resumed, *changes).passed()
    assert [*map(reproducible, steps(resumed))] == [*map(reproducible, taken)]


def test_the_frozen_critic_survives_a_resume(launcher: Launcher, tmp_path: Path) -> None:
    """Its snapshot is renewed every third update: at a checkpoint it is neither the first critic nor the newest."""
    changes = ("critic.fit=nstep", launcher.critic, "critic.snapshot_every=3", "sampling.response_budget=18",
               "readiness.global_threshold=0", "run.checkpoint_every=3")  # fmt: skip
    launcher.run(tmp_path / "straight", *changes, "run.num_steps=5").passed()
    launcher.run(tmp_path / "resumed", *changes, "run.num_steps=3").passed()
    launcher.run(tmp_path / "resumed", *changes, "run.num_steps=5").passed()
    taken = steps(tmp_path / "straight")
    assert sum("critic/loss" in row for row in taken) == 4  # none at the first step, of bare problems
    assert [*map(reproducible, steps(tmp_path / "resumed"))] == [*map(reproducible, taken)]
    scalars = read_state(latest(tmp_path / "resumed" / "checkpoints") / "state.npz")["optimizers"]["critic"]["scalars"]
    assert next(iter(scalars.values()))["num_steps"] == 4


def test_the_fused_loss_trains_as_its_naive_twin(launcher: Launcher, tmp_path: Path) -> None:
    """Equal but for rounding; the engine draws from what the updates made of the weights, so draws stay equal too."""
    changes = ("sampling.routing=prefix_grpo", "run.num_steps=3", "run.checkpoint_every=0", "parallel.tensor=2")
    for name in ("torch", "naive"):
        launcher.run(tmp_path / name, *changes, f"actor.loss_op={name}").passed()
    fused, naive = (steps(tmp_path / name) for name in ("torch", "naive"))
    assert len(fused) == 3 and any(row["actor/grad_norm"] > 0 for row in fused)
    names = ("actor/loss", "actor/grad_norm", "actor/update_norm", "actor/entropy", "actor/ratio", "actor/kl_k3",
             "mismatch/logprob_abs_mean", "train/endpoint_value", "train/chunk_len")  # fmt: skip
    for one, other in zip(fused, naive, strict=True):
        assert {name: one[name] for name in names} == pytest.approx({name: other[name] for name in names}, abs=2e-6)


def test_emulated_fp8_shows_in_the_mismatch_and_nowhere_in_the_first_ratio(launcher: Launcher, tmp_path: Path) -> None:
    """The trainer rounds and its engine does not; scores and updates round alike, under a microbatch's own scales."""
    changes = ("sampling.routing=grpo", "run.num_steps=2", "run.checkpoint_every=0", "parallel.tensor=2",
               "fp8.recipe=tensorwise", "fp8.emulate=true")  # fmt: skip
    launcher.run(tmp_path / "run", *changes).passed()
    for row in steps(tmp_path / "run"):
        assert 1e-3 < row["mismatch/logprob_abs_mean"] < 0.3 and row["actor/ratio_error_first"] <= 1e-6
        assert row["actor/grad_norm"] > 0
