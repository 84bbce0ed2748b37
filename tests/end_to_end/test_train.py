"""The whole loop on two ranks, from problem files to checkpoints; see train.yaml for how every path is made live."""

from __future__ import annotations

import math
import subprocess
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

from megatron_ac2.model.checkpoint_files import latest, read_state
from tests.distributed.launch import kill_tree
from tests.end_to_end.runs import Launcher, reproducible, rows, steps


@pytest.fixture(scope="module")
def straight(launcher: Launcher, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """AC2 with a value head on two data ranks: six steps in one go."""
    run_dir = tmp_path_factory.mktemp("straight") / "run"
    launcher.run(run_dir, launcher.critic).passed()
    return run_dir


def tensors(checkpoint: Path, out: Path) -> dict[str, Any]:
    dcp_to_torch_save(checkpoint / "tensors", out)
    return torch.load(out, weights_only=False)


def assert_same_state(one: Any, other: Any, place: str = "state") -> None:
    assert type(one) is type(other), place
    if isinstance(one, dict):
        assert one.keys() == other.keys(), place
        for key in one:
            assert_same_state(one[key], other[key], f"{place}.{key}")
    elif isinstance(one, list):
        assert len(one) == len(other), place
        for index, pair in enumerate(zip(one, other)):
            assert_same_state(*pair, f"{place}[{index}]")
    elif isinstance(one, np.ndarray):
        np.testing.assert_array_equal(one, other, place)
    elif isinstance(one, torch.Tensor):
        assert torch.equal(one, other), place
    elif not isinstance(one, float) or not (math.isnan(one) and math.isnan(other)):
        assert one == other, place


def test_every_path_of_ac2_is_taken(straight: Path) -> None:
    taken = steps(straight)
    assert len(taken) == 6 and len(rows(straight)) == 7
    bootstrapped = [row for row in taken if row["share/chunk_end"] > 0]
    assert bootstrapped and all(row["critic/endpoint_share"] > 0 for row in bootstrapped)
    assert any(row["share/eos"] > 0 for row in taken)
    assert sum(row["readiness/audits"] for row in taken) >= 2
    assert taken[0]["readiness/ready_fraction"] == 0 and taken[-1]["readiness/ready_fraction"] > 0
    assert taken[-1]["critic/references"] == 12  # any response may become one: every problem has its own by now
    assert [row["critic/num_targets"] for row in taken] == [0, 4, 8, 12, 16, 16]  # none from the first, bare prefixes
    assert "critic/loss" not in taken[0] and all(math.isfinite(row["critic/loss"]) for row in taken[1:])
    assert sum(row["actor/grad_norm"] > 0 for row in taken) >= 4
    assert "evaluation/mean" in rows(straight)[0] and "evaluation/mean" in rows(straight)[-1]


def test_engine_and_trainer_agree_at_every_step(straight: Path) -> None:
    for row in steps(straight):
        assert row["mismatch/logprob_abs_max"] < 1e-3
        assert row["actor/ratio_error_first"] < 1e-6


def test_every_token_carries_the_version_that_sampled_it(straight: Path) -> None:
    run_state = read_state(latest(straight / "checkpoints") / "state.npz")["run"]
    assert run_state["next_step"] == 6
    assert run_state["replay"]["versions"].tolist() == [3] * 4 + [4] * 4 + [5] * 4
    assert run_state["targets"]["versions"].tolist() == [2] * 4 + [3] * 4 + [4] * 4 + [5] * 4


def test_a_killed_run_goes_on_as_if_nothing_had_been(launcher: Launcher, straight: Path, tmp_path: Path) -> None:
    """Every rank is killed after the fourth step, past the checkpoint of the third, and the run is started again."""
    run_dir = tmp_path / "run"
    kill_after_row(launcher.torchrun(run_dir, launcher.critic, "run.num_steps=1000"), run_dir, 4, "step_000003")
    assert latest(run_dir / "checkpoints").name == "step_000003"
    launcher.run(run_dir, launcher.critic).passed()
    assert [*map(reproducible, rows(run_dir))] == [*map(reproducible, rows(straight))]
    ends = [latest(path / "checkpoints") for path in (run_dir, straight)]
    assert [end.name for end in ends] == ["step_000006"] * 2
    assert_same_state(*(read_state(end / "state.npz") for end in ends))
    assert_same_state(*(tensors(end, tmp_path / f"{index}.pt") for index, end in enumerate(ends)))


def kill_after_row(
    process: subprocess.Popen[str], run_dir: Path, num_rows: int, checkpoint: str, timeout: float = 240
) -> None:
    """And after the checkpoint, which is written behind the steps that follow it."""
    file, deadline = run_dir / "metrics.jsonl", time.monotonic() + timeout
    saved = run_dir / "checkpoints" / checkpoint
    try:
        while not saved.is_dir() or file.read_text().count("\n") < num_rows:
            assert process.poll() is None, process.communicate()[0][-4000:]
            assert time.monotonic() < deadline, f"{file}: fewer than {num_rows} rows after {timeout} s"
            time.sleep(0.01)
    finally:
        kill_tree(process)
        process.communicate()


def test_generative_critic_in_tensor_parallel(launcher: Launcher, reader: Path, tmp_path: Path) -> None:
    """The actor's own weights value prefixes and chunk ends through the engine, and learn from both losses."""
    layout = (f"model.path={reader}", "critic.kind=generative", "parallel.tensor=2")
    layout += ("run.checkpoint_every=0", "sampling.audit_fraction=0")  # few problems get ready: let them have chunks
    launcher.run(tmp_path, *layout, "run.num_steps=3").passed()
    launcher.run(tmp_path, *layout, "run.num_steps=5").passed()
    taken = steps(tmp_path)
    assert len(taken) == 5
    assert all(row["mismatch/logprob_abs_max"] < 1e-3 and row["actor/ratio_error_first"] < 1e-6 for row in taken)
    assert all(0 <= row["critic/invalid_probe"] <= 1 for row in taken) and taken[0]["critic/invalid_probe"] < 0.5
    assert sum(row["critic/endpoint_share"] > 0 for row in taken) >= 1
    learned = [row for row in taken if "critic/loss" in row]
    assert len(learned) == 4 and all(row["critic/stepped"] == 1 and row["critic/num_skipped"] == 0 for row in learned)
    scalars = read_state(latest(tmp_path / "checkpoints") / "state.npz")["optimizers"]["actor"]["scalars"]
    assert {role: state["num_steps"] for role, state in scalars.items()} == {"actor": 10, "critic": 4}


def test_unreadable_values_are_counted_and_learnt_from(launcher: Launcher, inputs: Path, tmp_path: Path) -> None:
    """An untrained model answers no value prompt: every probe is an error of 1, no problem is ready, the loss falls."""
    launcher.run(tmp_path, f"model.path={inputs / 'base'}", "critic.kind=generative", "run.num_steps=3").passed()
    first, second, third = steps(tmp_path)
    assert first["critic/invalid_probe"] == second["critic/invalid_probe"] == 1
    assert second["readiness/global_error"] == 1 and second["critic/num_targets"] == 4
    assert third["critic/loss"] < second["critic/loss"]
    assert all(row["readiness/ready_problems"] == 0 for row in (first, second))


@pytest.mark.parametrize(
    ("routing", "changes"),
    [("grpo", ["parallel.pipeline=2"]), ("prefix_grpo", []), ("prefix_grpo", ["parallel.tensor=2"])],
)
def test_baselines_go_through_the_same_loop(
    routing: str, changes: list[str], launcher: Launcher, straight: Path, tmp_path: Path
) -> None:
    launcher.run(tmp_path, f"sampling.routing={routing}", *changes, "run.num_steps=2").passed()
    taken = steps(tmp_path)
    assert len(taken) == 2
    for row in taken:
        assert not [name for name in row if name.startswith(("critic/", "readiness/"))]
        assert row["share/chunk_end"] == 0 and row["mismatch/logprob_abs_max"] < 1e-3
        assert (row["train/reward"] is None) == (routing == "grpo")  # which takes no fresh rollouts
    # The first step knows no replay yet: all routings train on the same bare problems, in whatever layout.
    first, same = taken[0], steps(straight)[0]
    for name in ("actor/entropy", "train/endpoint_value", "train/chunk_len", "actor/num_tokens", "actor/loss"):
        assert first[name] == pytest.approx(same[name], rel=1e-4, abs=1e-6), name


def test_checkpoint_of_another_model_data_set_and_tokenizer_is_refused(
    launcher: Launcher, straight: Path, inputs: Path, tmp_path: Path
) -> None:
    config = Qwen3Config.from_pretrained(inputs / "base")
    config.num_hidden_layers, config.layer_types = 2, config.layer_types[:2]
    Qwen3ForCausalLM(config).save_pretrained(tmp_path / "other")
    tokenizer = AutoTokenizer.from_pretrained(inputs / "base")
    tokenizer.chat_template += " "
    tokenizer.add_tokens(["<other>"])
    tokenizer.save_pretrained(tmp_path / "other")
    (tmp_path / "fewer.jsonl").write_text("".join((inputs / "train.jsonl").read_text().splitlines(True)[:-1]))
    before = (straight / "metrics.jsonl").read_text()
    changes = (f"model.path={tmp_path / 'other'}", f"data.train={tmp_path / 'fewer.jsonl'}", "parallel.pipeline=1")
    changes += ("actor.reference_kl.coefficient=0.1", f"actor.reference_kl.path={tmp_path / 'other'}")
    job = launcher.run(straight, "critic.path=null", *changes, num_ranks=1)
    assert job.statuses == [2]
    assert "num_hidden_layers=4" in job.logs[0] and "num_hidden_layers=2" in job.logs[0]
    reference = "actor.reference_kl.path: found 'none'"
    for named in ("12 problems", "11 problems", "tokenizer: found", "chat_template: found", reference):
        assert named in job.logs[0], named
    assert (straight / "metrics.jsonl").read_text() == before


def test_bad_input_ends_every_rank_at_once(launcher: Launcher, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    process = launcher.torchrun(run_dir, "parallel.tensor=3", "sampling.response_budget=5000", "megatron.no_such=1")
    output, _ = process.communicate(timeout=120)
    assert process.returncode != 0 and not run_dir.exists()
    assert output.count("Traceback") <= 1  # torchrun's own
    for field in ("parallel.tensor: found 3, model has 4", "sampling.response_budget: found", "megatron.no_such: "):
        assert output.count(f"error: {field}") <= 1 and output.count(f"error (rank 1): {field}") <= 1
        assert output.count(field) >= 1
