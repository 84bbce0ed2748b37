"""Ranges, choices and combinations: what is refused names its field, and the remedy is accepted."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import get_args, get_type_hints

import pytest

from megatron_ac2.algorithm.objective_parts import PolicyObjective, objective_problems
from megatron_ac2.config import Config
from megatron_ac2.config_checks import RULES, check_config, warnings_for
from megatron_ac2.config_training import CriticConfig, ParallelConfig
from megatron_ac2.config_values import CHOICES, RANGES, get, value_problems
from megatron_ac2.sft import SftConfig


def changed(changes: dict[str, object]) -> Config:
    """The defaults after `changes`."""
    config = Config()
    for key, value in changes.items():
        section, _, name = key.rpartition(".")
        setattr(get(config, section), name, value)
    return config


def problems_after(changes: dict[str, object]) -> list[str]:
    """What is wrong with the defaults after `changes`."""
    return check_config(changed(changes))


@pytest.mark.parametrize("key", CHOICES)
def test_every_choice_is_accepted_and_nothing_else(key):
    for value in CHOICES[key]:
        assert not [problem for problem in problems_after({key: value}) if problem.startswith(f"{key}: found ")
                    and "accepted:" in problem]  # fmt: skip
    assert any(problem.startswith(f"{key}: found 'nonsense', accepted: {CHOICES[key][0]}")
               for problem in problems_after({key: "nonsense"}))  # fmt: skip


TOKEN_LEVEL = {"critic.kind": "value_head", "sampling.routing": "grpo"}
PUBLISH = {"engine.publish_every": 3, "run.num_steps": 6, "run.checkpoint_every": 3, "evaluation.every": 3}
# the field that is named, a combination that is refused, the change that makes it right
COMBINATIONS = [
    ("run.num_steps", PUBLISH | {"run.num_steps": 7}, {"run.num_steps": 9}),
    ("run.checkpoint_every", PUBLISH | {"run.checkpoint_every": 4}, {"run.checkpoint_every": 0}),
    ("run.keep_every", {"run.keep_every": 25}, {"run.checkpoint_every": 5}),
    ("run.keep_every", {"run.keep_every": 20, "run.checkpoint_every": 0}, {"run.keep_every": 0}),
    ("evaluation.every", PUBLISH | {"evaluation.every": 1}, {"evaluation.every": 6}),
    ("data.reward_range", {"data.reward_range": (1.0, 1.0)}, {"data.reward_range": (-1.0, 1.0)}),
    ("sampling.group_size", {"sampling.group_size": 1, "replay.min_valid_for_target": 1}, {"sampling.group_size": 2}),
    ("sampling.top_p", {"sampling.top_p": 0.9}, {"sampling.top_k": 20}),
    ("sampling.dynamic", {"sampling.dynamic": True}, {"sampling.routing": "grpo"}),
    ("sampling.dynamic", TOKEN_LEVEL | {"sampling.dynamic": True, "estimator.kind": "gae"},
     {"estimator.kind": "group"}),
    ("sampling.overlong_cache", {"sampling.overlong_cache": 9, "sampling.routing": "prefix_grpo"},
     {"sampling.routing": "grpo"}),
    ("sampling.overlong_cache", {"sampling.overlong_cache": 50_000, "sampling.routing": "grpo"},
     {"sampling.overlong_cache": 49_999}),
    ("replay.capacity", {"replay.kind": "stale"}, {"replay.capacity": 1920}),
    ("replay.capacity", {"replay.kind": "stale"}, {"replay.stale_every": 1}),
    ("replay.min_valid_for_target", {"replay.min_valid_for_target": 17}, {"sampling.routing": "grpo"}),
    ("readiness.demote_threshold", {"readiness.demote_threshold": 0.3, "sampling.audit_fraction": 0.0},
     {"sampling.audit_fraction": 0.1}),
    ("readiness.demote_threshold", {"readiness.demote_threshold": 0.3, "readiness.kind": "global_only"},
     {"readiness.kind": "terminal_only"}),
    ("fp8.emulate", {"fp8.emulate": True}, {"fp8.recipe": "mxfp8"}),
    ("fp8.recipe", {"fp8.recipe": "mxfp8", "model.dtype": "float32"}, {"fp8.emulate": True}),
    ("fp8.recipe", {"fp8.recipe": "delayed", "actor.reference_kl.coefficient": 0.1}, {"fp8.recipe": "tensorwise"}),
    ("fp8.recipe", {"fp8.recipe": "delayed", "critic.fit": "nstep", "critic.kind": "value_head"},
     {"fp8.recipe": "tensorwise"}),
    ("fp8.keep_first_layers", {"fp8.recipe": "delayed", "fp8.keep_first_layers": 1}, {"fp8.recipe": "tensorwise"}),
    ("fp8.keep_last_layers", {"fp8.recipe": "delayed", "fp8.keep_last_layers": 1}, {"fp8.recipe": "blockwise"}),
    ("actor.clip_high", {"actor.clip_high": 0.05}, {"entropy.enabled": False}),
    ("actor.clip_high", {"actor.clip_high": 0.05, "actor.loss": "gspo"}, {"actor.loss": "policy_gradient"}),
    ("actor.dual_clip", {"actor.dual_clip": 1.3}, {"actor.dual_clip": None}),
    ("actor.dual_clip", {"actor.dual_clip": 1.3}, {"entropy.enabled": False}),
    ("actor.dual_clip", {"actor.dual_clip": 1.2}, {"actor.loss": "cispo"}),
    ("actor.aggregation", {"actor.loss": "asympo"}, {"actor.aggregation": "sequence_mean"}),
    ("actor.importance.kind",
     {"actor.loss": "asympo", "actor.aggregation": "sequence_mean", "actor.importance.kind": "token_tis"},
     {"actor.importance.kind": "none"}),
    ("actor.importance.kind", {"actor.anchor": "behavior", "actor.importance.kind": "token_tis"},
     {"actor.anchor": "proximal"}),
    ("actor.clip_low", {"actor.clip_low": 1.0}, {"actor.loss": "cispo"}),
    ("actor.anchor", {"actor.loss": "policy_gradient", "actor.anchor": "behavior"}, {"actor.loss": "cispo"}),
    ("actor.importance.low", {"actor.importance.low": 0.5}, {"actor.importance.kind": "token_mis"}),
    ("actor.importance.high", {"actor.importance.kind": "token_is", "actor.importance.high": 2.0},
     {"actor.importance.kind": "sequence_tis"}),
    ("actor.score_centering.enabled", {"actor.score_centering.enabled": True, "actor.anchor": "behavior"},
     {"actor.anchor": "proximal"}),
    ("actor.score_centering.enabled", {"actor.score_centering.enabled": True, "actor.loss": "gspo"},
     {"actor.loss": "ppo"}),
    ("actor.score_centering.enabled",
     {"actor.score_centering.enabled": True, "actor.importance.kind": "sequence_mis"},
     {"actor.importance.kind": "token_mis"}),
    ("actor.score_centering.top_k",
     {"actor.score_centering.enabled": True, "actor.score_centering.top_k": 19, "sampling.top_k": 20},
     {"actor.score_centering.top_k": 20}),
    ("parallel.virtual_pipeline", {"parallel.virtual_pipeline": 2}, {"parallel.pipeline": 2}),
    ("parallel.virtual_pipeline", {"parallel.virtual_pipeline": 1, "parallel.pipeline": 2},
     {"parallel.virtual_pipeline": 2}),
    ("critic.value", {"critic.value": "soft", "critic.kind": "value_head"}, {"critic.kind": "generative"}),
    ("critic.head", {"critic.head": "two_hot"}, {"critic.kind": "value_head"}),
    ("critic.fit", {"critic.fit": "nstep"}, {"critic.kind": "value_head"}),
    ("critic.fit", TOKEN_LEVEL | {"critic.fit": "nstep"}, {"sampling.routing": "ac2"}),
    ("critic.reference_prompts", {"critic.reference_prompts": "reference_only", "critic.use_references": False},
     {"critic.use_references": True}),
    ("critic.parallel", {"critic.parallel": ParallelConfig(tensor=2)}, {"critic.kind": "value_head"}),
    ("critic.kind", TOKEN_LEVEL | {"estimator.kind": "gae", "critic.kind": "generative"},
     {"critic.kind": "value_head"}),
    ("sampling.routing", TOKEN_LEVEL | {"estimator.kind": "brace", "sampling.routing": "ac2"},
     {"sampling.routing": "prefix_grpo"}),
    ("sampling.routing", {"estimator.kind": "singleton", "sampling.routing": "prefix_grpo"},
     {"sampling.routing": "ac2"}),
    ("estimator.baseline", TOKEN_LEVEL | {"estimator.kind": "rfpo", "estimator.baseline": "leave_one_out"},
     {"estimator.kind": "group"}),
    ("estimator.divide_by_std", {"estimator.kind": "singleton", "estimator.divide_by_std": True},
     {"estimator.kind": "group"}),
]  # fmt: skip


@pytest.mark.parametrize(("field", "changes", "remedy"), COMBINATIONS)
def test_a_combination_that_makes_no_sense_is_refused_and_its_remedy_accepted(field, changes, remedy):
    problems = problems_after(changes)
    assert len(problems) == 1, problems
    assert problems[0].startswith(f"{field}: found {changes.get(field, get(Config(), field))!r}, "), problems
    assert problems_after(changes | remedy) == []


def test_every_rule_about_new_switches_has_a_combination_above():
    tested_elsewhere = {"sampling.chunk_len", "sampling.num_prefixes", "parallel.sequence", "critic.lr_min",
                        "critic.path", "engine.block_size"}  # fmt: skip
    assert {rule.field for rule in RULES} - tested_elsewhere == {field for field, _, _ in COMBINATIONS}


@pytest.mark.parametrize(
    ("field", "refused", "accepted"),
    [
        ("actor.entropy_bonus", -0.1, 0.0),
        ("actor.entropy_bonus", float("inf"), 1.0),
        ("actor.clip_low", 1.1, 0.99),
        ("estimator.brace_product_max", 0.9, 1.0),
        ("critic.value_clip", 0.0, None),
        ("estimator.brace_horizon", -1, 0),
        ("estimator.gamma", 1.01, 1.0),
        ("estimator.rfpo_label_fraction", -0.1, 0.0),
        ("sampling.top_k", 0, 1),
        ("replay.max_target_age", -1, 0),
        ("readiness.demote_threshold", 1.5, 1.0),
        ("engine.max_model_len", 0, None),
    ],
)
def test_ranges_of_the_switches(field, refused, accepted):
    (problem,) = problems_after({field: refused})
    assert problem.startswith(f"{field}: found {refused!r}, ")
    assert problems_after({field: accepted}) == []


@pytest.mark.parametrize(
    ("field", "found", "said"),
    [
        ("engine.kv_cache_gib", math.nan, "found nan, must be finite and >= 0.001"),
        ("engine.kv_cache_gib", -1.0, "found -1.0, must be >= 0.001"),
        ("actor.optimizer.weight_decay", math.nan, "found nan, must be finite and >= 0"),
        ("actor.optimizer.lr", math.inf, "found inf, must be finite and > 0"),
        ("run.timeout_minutes", math.inf, "found inf, must be finite and >= 0.01"),
        ("run.timeout_minutes", 1e300, "found 1e+300, must be <= 525600"),
        ("sampling.temperature", math.inf, "found inf, must be finite and >= 0.01"),
        ("run.seed", -1, "found -1, must be >= 0"),
        ("run.seed", 10**22, "found 10000000000000000000000, must be <= 2147483647"),
        ("actor.optimizer.betas", (0.9, 1.0), "found (0.9, 1.0), accepted: 0 to below 1"),
        ("actor.optimizer.betas", (0.9,), "found (0.9,), accepted: 2 numbers"),
        ("data.reward_range", (0.0, math.inf), "found (0.0, inf), must be finite and >= -1e+12"),
        ("critic.lr_ratio_limit", math.inf, "found inf, must be finite and > 0"),
        ("run.name", "", "found '', must not be empty"),
        ("data.train", " ", "found ' ', must not be empty"),
        ("run.dir", "a\0b", "found 'a\\x00b', accepted: text without control characters"),
        ("model.path", "\ud800", "found '\\ud800', accepted: text without control characters and halves"),
        ("run.name", "x" * 300, f"found '{'x' * 199}..., accepted: at most 255 bytes a name and 3000 in all"),
        ("critic.path", "x/" * 2000, f"found '{'x/' * 99}x..., accepted: at most 255 bytes a name and 3000 in all"),
        ("engine.options", {"x": {"y": [math.nan]}}, "found nan, must be finite"),
        ("engine.options", {"x": 2**63}, "found 9223372036854775808, accepted: whole numbers of 64 bits"),
        ("engine.options", {"x": "a\0"}, "found 'a\\x00', accepted: text without control characters"),
        ("engine.options", {"x": {1: 2}}, "found the name 1, accepted: printable text"),
    ],
)
def test_a_value_that_would_break_later_is_named(field, found, said):
    (problem,) = [text for text in problems_after({field: found}) if "with critic.kind" not in text]
    assert problem.startswith(field) and said in problem


def number_fields(schema: type, prefix: str = "") -> Iterator[str]:
    """Every field that holds numbers, members of tuples and optional ones too, also of sections that may be null."""
    for name, hint in get_type_hints(schema).items():
        kinds = {hint, *get_args(hint)}
        yield from (key for kind in kinds if is_dataclass(kind) for key in number_fields(kind, f"{prefix}{name}."))
        if kinds & {int, float}:
            yield f"{prefix}{name}"


NUMBERS = sorted(number_fields(Config))
STAGE_NUMBERS = sorted(number_fields(SftConfig))


def test_every_number_has_a_range_and_every_range_a_number():
    assert {".".join(key.split(".")[-2:]) for key in (*NUMBERS, *STAGE_NUMBERS)} == RANGES.keys()
    assert len(NUMBERS) > 100 and {"critic.parallel.tensor", "actor.optimizer.betas"} <= set(NUMBERS)
    assert all(-math.inf < accepted.low < accepted.high for accepted in RANGES.values())


@pytest.mark.parametrize("field", NUMBERS)
def test_no_number_is_beyond_what_can_be_computed_with(field):
    config = Config(critic=CriticConfig(parallel=ParallelConfig()))
    section, _, name = field.rpartition(".")
    is_tuple = isinstance(getattr(get(config, section), name), tuple)
    for value in (math.nan, math.inf, -math.inf, -1e300, 10**400, -(10**400)):
        setattr(get(config, section), name, (value, value) if is_tuple else value)
        named = [problem for problem in value_problems(config) if problem.startswith(f"{field}: found ")]
        assert len(named) == 1, (value, named)


@pytest.mark.parametrize("field", ["actor.num_minibatches", "engine.publish_every", "engine.block_size"])
def test_a_zero_divisor_is_a_message_like_any_other(field):
    assert problems_after({field: 0}) == [f"{field}: found 0, must be > 0"]


@pytest.mark.parametrize(
    ("changes", "starts"),
    [
        ({}, []),
        ({"sampling.audit_fraction": 0.0, "run.checkpoint_every": 0},
         ["sampling.audit_fraction", "run.checkpoint_every"]),
        ({"sampling.audit_fraction": 0.0, "sampling.routing": "prefix_grpo"}, []),
        ({"sampling.cut_grid": 45_001}, ["sampling.cut_grid"]),
        ({"sampling.cut_grid": 45_001, "sampling.routing": "grpo"}, []),
        ({"actor.loss": "policy_gradient"}, ["entropy.enabled"]),
        ({"actor.score_centering.enabled": True, "actor.importance.kind": "token_is"}, ["actor.score_centering"]),
        ({"engine.rounding": "int8"}, ["engine.rounding"]),
        ({"engine.publish_every": 2}, ["engine.publish_every"]),
        ({"fp8.recipe": "delayed"}, ["fp8.recipe"]),
        ({"fp8.recipe": "blockwise", "fp8.emulate": True}, ["fp8.emulate"]),
    ],
)  # fmt: skip
def test_legal_but_doubtful_choices_get_a_word(changes, starts):
    config = changed(changes)
    assert [warning.split()[0] for warning in warnings_for(config)] == starts
    assert check_config(config) == []


def test_the_checked_names_exist():
    """A check of a renamed field would raise instead of reporting; this runs them all."""
    config = Config()
    config.model.path, config.data.train = "m", "t.jsonl"
    assert check_config(config) == []
    assert all(is_dataclass(getattr(config, field.name)) or field.name == "megatron" for field in fields(config))


ACTORS = [
    {"actor.loss": loss, "actor.anchor": anchor, "actor.importance.kind": kind, "actor.importance.low": low,
     "actor.importance.high": high, "actor.score_centering.enabled": centered}
    for loss in CHOICES["actor.loss"]
    for anchor in CHOICES["actor.anchor"]
    for kind in CHOICES["actor.importance.kind"]
    for low, high in [(None, None), (0.5, 2.0), (1.5, None), (None, 0.5)]
    for centered in (False, True)
]  # fmt: skip
BOUNDS = [
    {"actor.loss": loss, "actor.clip_low": low, "actor.clip_high": high, "actor.dual_clip": dual}
    for loss in CHOICES["actor.loss"]
    for low in (-0.1, 0.0, 0.2, 1.0, 1.1)
    for high in (-0.1, 0.0, 0.28)
    for dual in (None, 1.0, 1.28, 1.3)
]


@pytest.mark.parametrize("actors", [ACTORS, BOUNDS], ids=["parts", "bounds"])
def test_the_objective_refuses_what_the_configuration_refuses(actors):
    """Two statements of one rule, for the objective is used without a configuration too: they name the same fields."""
    for changes in actors:
        config = changed(changes | {"entropy.enabled": False, "actor.aggregation": "sequence_mean"})
        actor = config.actor
        objective = PolicyObjective(
            loss=actor.loss, anchor=actor.anchor, clip_low=actor.clip_low, clip_high=actor.clip_high,
            dual_clip=actor.dual_clip, importance_kind=actor.importance.kind, importance_low=actor.importance.low,
            importance_high=actor.importance.high, score_centering=actor.score_centering.enabled,
        )  # fmt: skip
        named = {problem.split(":")[0] for problem in check_config(config)}
        if actor.loss == "gspo" and actor.score_centering.enabled:  # the configuration alone refuses it
            named.discard("actor.score_centering.enabled")
        if actor.loss not in ("ppo", "cispo", "gspo"):  # a range is a range, also of bounds that are not used
            named -= {"actor.clip_low", "actor.clip_high"}
        expected = {problem.split(":")[0] for problem in objective_problems(objective)}
        if actor.loss == "gspo":
            expected.discard("actor.score_centering.enabled")
        assert named == expected, changes
