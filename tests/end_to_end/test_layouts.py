"""A run goes on in another layout, its critic in one of its own, its trainer off the device meanwhile: the same run."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

from megatron_ac2.model.checkpoint_files import latest, read_state
from tests.end_to_end.runs import Launcher, reproducible, steps
from tests.end_to_end.test_train import assert_same_state, tensors

# Adam turns rounding of a gradient near zero into a whole step, unless eps is as large as that: a weight would differ
# by its learning rate, and a sampled token now and then.
SMOOTH = ("actor.optimizer.eps=1e-3", "actor.optimizer.lr=2e-3", "critic.optimizer.eps=1e-3")


@pytest.fixture(scope="module")
def straight(launcher: Launcher, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six steps in one go, everything on two data ranks."""
    run_dir = tmp_path_factory.mktemp("straight") / "run"
    launcher.run(run_dir, launcher.critic, *SMOOTH).passed()
    return run_dir


def assert_same_run(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    """Counts are equal, so every token that was sampled is; what is computed is equal up to rounding in fp32."""
    assert len(found) == len(expected)
    for row, wanted in zip(map(reproducible, found), map(reproducible, expected)):
        assert row.keys() == wanted.keys()
        for name, value in wanted.items():
            where = f"step {wanted['step']}: {name}"
            if value is None or float(value).is_integer():
                assert row[name] == value, where
            else:
                assert row[name] == pytest.approx(value, rel=2e-4, abs=2e-5), where


def test_a_run_goes_on_in_other_layouts(launcher: Launcher, straight: Path, tmp_path: Path) -> None:
    for layout, last in (("parallel.tensor=2", 2), ("parallel.pipeline=2", 4), ("parallel.tensor=1", 6)):
        launcher.run(tmp_path, launcher.critic, *SMOOTH, layout, f"run.num_steps={last}").passed()
        assert_same_run(steps(tmp_path), steps(straight)[:last])
    assert sum(row["actor/grad_norm"] > 0 for row in steps(straight)) >= 4
    ends = [read_state(latest(path / "checkpoints") / "state.npz")["run"] for path in (tmp_path, straight)]
    for part in ("stream", "replay", "references"):
        assert_same_state(*(end[part] for end in ends), part)


def test_a_critic_in_a_layout_of_its_own(launcher: Launcher, straight: Path, tmp_path: Path) -> None:
    for layouts, last in ((["critic.parallel.tensor=2"], 2), (["critic.parallel.pipeline=2", "parallel.tensor=2"], 4)):
        launcher.run(tmp_path, launcher.critic, *SMOOTH, *layouts, f"run.num_steps={last}").passed()
        assert_same_run(steps(tmp_path), steps(straight)[:last])


def test_a_critic_of_another_size_and_family(launcher: Launcher, inputs: Path, tmp_path: Path) -> None:
    config = Qwen2Config(  # as many rows as the actor's model has, which are more than tokens
        vocab_size=384, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=256, rope_parameters={"rope_type": "default", "rope_theta": 1e4},
        tie_word_embeddings=True,
    )  # fmt: skip
    Qwen2ForCausalLM(config).save_pretrained(tmp_path / "small")
    AutoTokenizer.from_pretrained(inputs / "base").save_pretrained(tmp_path / "small")
    changes = (f"critic.path={tmp_path / 'small'}", "critic.parallel.pipeline=2", "critic.fit=nstep", "run.offload=all")
    launcher.run(tmp_path / "run", *changes, "parallel.tensor=2", "run.num_steps=3").passed()
    taken = steps(tmp_path / "run")
    assert len(taken) == 3 and all(row["mismatch/logprob_abs_max"] < 1e-3 for row in taken)
    assert all(math.isfinite(row["critic/loss"]) and row["critic/stepped"] == 1 for row in taken[1:])


def test_a_trainer_that_leaves_the_device_changes_nothing(launcher: Launcher, straight: Path, tmp_path: Path) -> None:
    """Bit for bit: weights, moments, every metric; evaluations and a checkpoint fall into the engine's turn."""
    run_dir = tmp_path / "run"
    launcher.run(run_dir, launcher.critic, *SMOOTH, "run.offload=all", "run.num_steps=3").passed()
    found = [*map(reproducible, steps(run_dir))]
    assert found == [*map(reproducible, steps(straight))][:3]
    assert all(row["time/offload"] > 0 for row in steps(run_dir))
    ends = [path / "checkpoints" / "step_000003" for path in (run_dir, straight)]
    assert_same_state(*(tensors(end, tmp_path / f"{index}.pt") for index, end in enumerate(ends)))


def test_the_generative_critic_answers_while_the_trainer_is_away(
    launcher: Launcher, inputs: Path, tmp_path: Path
) -> None:
    """And new weights come only every other step: in between the engine wakes with those that it had."""
    changes = (f"model.path={inputs / 'base'}", "critic.kind=generative", "run.checkpoint_every=2")
    offload = ("run.offload=optimizer", "engine.publish_every=2", "run.num_steps=4")
    launcher.run(tmp_path, *changes, *offload).passed()
    taken = steps(tmp_path)
    assert len(taken) == 4 and taken[-1]["critic/stepped"] == 1
