"""The configuration says everything that is wrong with it, at once and by name."""

from __future__ import annotations

import math
from dataclasses import fields, is_dataclass
from pathlib import Path

import pytest
import yaml

from megatron_ac2.config import Config
from megatron_ac2.config_file import check_config, get, load_config, to_dict, to_yaml, warnings_for
from megatron_ac2.types import UserError

MINIMAL = {"model": {"path": "m"}, "data": {"train": "t.jsonl"}}


def write(tmp_path: Path, **sections) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump({**MINIMAL, **sections}))
    return path


def problems_of(path: Path, overrides: list[str] | None = None) -> list[str]:
    with pytest.raises(UserError) as caught:
        load_config(path, overrides)
    return caught.value.problems


def only(problems: list[str], *parts: str) -> None:
    assert len(problems) == 1, problems
    assert all(part in problems[0] for part in parts), problems[0]


def test_the_defaults_are_the_paper_s(tmp_path):
    config = load_config(write(tmp_path))
    sampling = config.sampling
    assert (sampling.num_fresh, sampling.num_prefixes, sampling.group_size) == (192, 192, 16)
    assert (sampling.response_budget, sampling.chunk_len, sampling.cut_grid) == (50_000, 10_000, 10_000)
    assert config.critic.optimizer.lr == pytest.approx(2 * math.sqrt(2) * 1e-6)
    assert config.critic.lr_min == pytest.approx(5 * math.sqrt(2) * 1e-7)


def test_overrides_win_and_keep_the_rest_of_their_section(tmp_path):
    path = write(tmp_path, actor={"optimizer": {"lr": 1e-3, "grad_clip": 7.0}})
    overrides = ["actor.optimizer.lr=2e-5", "critic.optimizer.betas=[0.8,0.9]", "data.validation=v.jsonl"]
    config = load_config(path, overrides)
    assert (config.actor.optimizer.lr, config.actor.optimizer.grad_clip) == (2e-5, 7.0)
    assert config.actor.optimizer.weight_decay == 0.01  # the section's own default, not OptimizerConfig's
    assert tuple(config.critic.optimizer.betas) == (0.8, 0.9)
    assert config.data.validation == "v.jsonl"
    assert get(config, "actor.optimizer.lr") == 2e-5


def test_a_reference_to_another_field_is_resolved(tmp_path):
    assert load_config(write(tmp_path), ["run.name=blue"]).run.dir == "runs/blue"


@pytest.mark.parametrize("key", ["samplng.chunk_len", "sampling.chunklen", "actor.optimizer.learning_rate"])
def test_an_unknown_key_is_named(tmp_path, key):
    only(problems_of(write(tmp_path), [f"{key}=1"]), key)


@pytest.mark.parametrize(
    ("override", "found"),
    [("sampling.group_size=many", "many"), ("run.resume=perhaps", "perhaps"), ("actor.optimizer.lr=fast", "fast")],
)
def test_a_wrong_type_is_named_with_what_was_found(tmp_path, override, found):
    only(problems_of(write(tmp_path), [override]), override.split("=")[0], found)


def test_every_mistake_of_file_and_command_line_comes_at_once(tmp_path):
    path = write(tmp_path, sampling={"group_size": "many", "chunklen": 3}, nonsense={"a": 1})
    problems = problems_of(path, ["actor.clip_lo=1", "run.seed=x"])
    for key in ("sampling.group_size", "sampling.chunklen", "nonsense", "actor.clip_lo", "run.seed"):
        assert any(problem.startswith(key) for problem in problems), (key, problems)
    assert len(problems) == 5


def test_every_impossible_combination_comes_at_once(tmp_path):
    problems = problems_of(
        write(tmp_path),
        ["sampling.chunk_len=60000", "sampling.num_prefixes=3", "replay.min_valid_for_target=17",
         "parallel.sequence=true", "critic.lr_min=1.0", "critic.path=somewhere", "engine.block_size=48"],
    )  # fmt: skip
    keys = ["sampling.chunk_len", "sampling.num_prefixes", "replay.min_valid_for_target", "parallel.sequence",
            "critic.lr_min", "critic.path", "engine.block_size"]  # fmt: skip
    assert [problem.split(":")[0] for problem in problems] == keys


def test_a_chunk_longer_than_the_budget_names_both(tmp_path):
    problems = problems_of(write(tmp_path), ["sampling.chunk_len=201", "sampling.response_budget=200"])
    only(problems, "sampling.chunk_len", "201", "sampling.response_budget", "200")
    load_config(write(tmp_path), ["sampling.chunk_len=200", "sampling.response_budget=200"])


@pytest.mark.parametrize("value", ["0", "-1"])
def test_counts_must_be_positive(tmp_path, value):
    only(problems_of(write(tmp_path), [f"sampling.cut_grid={value}"]), "sampling.cut_grid", value, "> 0")


@pytest.mark.parametrize("value", ["-0.1", "1.1"])
def test_fractions_stay_between_0_and_1(tmp_path, value):
    only(problems_of(write(tmp_path), [f"sampling.audit_fraction={value}"]), "sampling.audit_fraction", value)


def test_a_wrong_choice_lists_the_right_ones(tmp_path):
    problems = problems_of(write(tmp_path), ["sampling.routing=ppo"])
    only(problems, "sampling.routing", "ppo", "ac2", "prefix_grpo", "grpo")


def test_required_fields_are_named(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text("run: {seed: 1}\n")
    assert [problem.split(":")[0] for problem in problems_of(path)] == ["data.train", "model.path"]


def test_files_that_are_no_configuration(tmp_path):
    only(problems_of(tmp_path / "absent.yaml"), "absent.yaml", "not found")
    path = tmp_path / "config.yaml"
    path.write_text("a: [1\n")
    only(problems_of(path), "config.yaml", "YAML")
    path.write_text("- 1\n- 2\n")
    only(problems_of(path), "mapping")


def test_open_sections_take_anything(tmp_path):
    path = write(tmp_path, megatron={"recompute_granularity": "full"}, engine={"options": {"swap_space": 4}})
    config = load_config(path, ["megatron.recompute_num_layers=2"])
    assert config.megatron == {"recompute_granularity": "full", "recompute_num_layers": 2}
    assert config.engine.options == {"swap_space": 4}


def test_what_is_saved_loads_to_the_same(tmp_path):
    config = load_config(write(tmp_path), ["run.name=blue", "actor.optimizer.lr=3e-6"])
    path = tmp_path / "saved.yaml"
    path.write_text(to_yaml(config))
    assert to_dict(load_config(path)) == to_dict(config)


def test_legal_but_doubtful_choices_get_a_word():
    config = Config()
    assert warnings_for(config) == []
    config.sampling.audit_fraction = 0.0
    config.run.checkpoint_every = 0
    named = [warning.split()[0] for warning in warnings_for(config)]
    assert named == ["sampling.audit_fraction", "run.checkpoint_every"]


def test_the_checked_names_exist():
    """A check of a renamed field would raise instead of reporting; this runs them all."""
    config = Config()
    config.model.path, config.data.train = "m", "t.jsonl"
    assert check_config(config) == []
    assert all(is_dataclass(getattr(config, field.name)) or field.name == "megatron" for field in fields(config))
