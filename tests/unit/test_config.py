"""The configuration says everything that is wrong with it, at once and by name."""

from __future__ import annotations

import errno
import math
import os
from pathlib import Path

import pytest
import yaml

from megatron_ac2.config_file import load_config, split_arguments, to_dict, to_yaml
from megatron_ac2.config_values import get
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


def test_files_are_laid_over_each_other_in_order(tmp_path):
    base = write(tmp_path, sampling={"group_size": 8, "num_fresh": 5}, megatron={"one": 1})
    first, second = tmp_path / "first.yaml", tmp_path / "second.yml"
    first.write_text("sampling: {group_size: 4, top_k: 7}\nmegatron: {two: 2}\n")
    second.write_text("sampling: {group_size: 2}\nreplay: {min_valid_for_target: 1}\n")
    sampling = load_config([base, first, second], ["replay.min_valid_for_target=2"]).sampling
    assert (sampling.group_size, sampling.num_fresh, sampling.top_k) == (2, 5, 7)
    config = load_config([base, second, first], ["replay.min_valid_for_target=2"])
    assert (config.sampling.group_size, config.replay.min_valid_for_target) == (4, 2)
    assert config.megatron == {"one": 1, "two": 2}
    first.write_text("# nothing but a comment\n")
    assert load_config([base, first]).sampling.group_size == 8


def test_every_mistake_of_every_file_comes_at_once_with_its_file(tmp_path):
    base = write(tmp_path, sampling={"group_size": "many"}, nonsense=1)
    overlay, broken = tmp_path / "overlay.yaml", tmp_path / "broken.yaml"
    overlay.write_text("sampling: {chunklen: 3}\nrun: {seed: x}\n")
    broken.write_text("a: [1\n")
    problems = problems_of([base, overlay, broken, tmp_path / "absent.yaml"], ["actor.clip_lo=1"])
    expected = [("nonsense", str(base)), ("sampling.group_size", str(base)), ("sampling.chunklen", str(overlay)),
                ("run.seed", str(overlay)), (str(broken), "YAML"), ("config file not found", "absent.yaml"),
                ("actor.clip_lo", "command line")]  # fmt: skip
    assert len(problems) == len(expected)
    for (start, part), problem in zip(expected, problems, strict=True):
        assert problem.startswith(start) and part in problem, (start, part, problem)


def test_an_override_that_is_no_yaml_is_not_blamed_on_the_file(tmp_path):
    only(problems_of(write(tmp_path), ["run.name=[a"]), "command line")


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (["run.name=${nope}"], {"run.name": "Interpolation key 'nope' not found (found '${nope}', in command line)",
                                "run.dir": "(found 'runs/${run.name}', in the defaults)"}),
        (["run.dir=${oc.env:NO_SUCH_VARIABLE}"], {"run.dir": "Environment variable 'NO_SUCH_VARIABLE' not found"}),
        (["run.name=${run.dir}"], {"run.name": "Recursive interpolation", "run.dir": "Recursive interpolation"}),
        (["run.dir=${foo:1}"], {"run.dir": "Unsupported interpolation type foo"}),
        (["run.name=${"], {"run.name": "no reference that can be read, accepted: ${section.field}"}),
        (["run.num_steps=${run.name}"], {"run.num_steps": "'run' of type 'str' could not be converted to Integer"}),
        (["run.num_steps=${.nope}"], {"run.num_steps": "'.nope' not found"}),
        (["run.dir=${.....x}"], {"run.dir": "'.....x'"}),
        (["megatron.a.b=${nope}"], {"megatron.a.b": "'nope' not found"}),
        (["engine.options.x=[1, {y: '${nope}'}]"], {"engine.options.x": "'nope' not found"}),
        (["critic.parallel=${run}"], {"critic.parallel": "accepted: a mapping of the fields of this section"}),
        (["run.dir=\\${x}"], {"run.dir": "found '${x}', which would be taken for a reference"}),
        (["megatron.x=\"${oc.decode:'{1: ???}'}\""], {"megatron.x.1": "found '???', which would be taken for a ref"}),
        (["run.num_steps=${run.seed}"], {"run.num_steps": "found 0, must be > 0"}),
    ],
)  # fmt: skip
def test_a_reference_that_fails_is_named_with_its_place(tmp_path, overrides, named):
    problems = dict(problem.split(": ", 1) for problem in problems_of(write(tmp_path), overrides))
    assert problems.keys() == named.keys()
    assert all(part in problems[key] for key, part in named.items()), problems


def test_failing_references_and_missing_values_come_at_once_with_the_file_that_won(tmp_path):
    path, overlay = tmp_path / "config.yaml", tmp_path / "overlay.yaml"
    path.write_text("run: {name: '${first}', dir: d}\nmodel: {path: m}\n")
    overlay.write_text("run: {name: '${second}'}\n")
    missing, failing = problems_of([path, overlay])
    assert missing.startswith("data.train: required")
    assert failing.startswith("run.name: ") and failing.endswith(f"(found '${{second}}', in {overlay})")


def test_a_layout_can_refer_to_another(tmp_path):
    layouts = ["parallel.context=2", "critic.kind=value_head", "critic.parallel=${parallel}"]
    config = load_config(write(tmp_path), [*layouts, "run.seed=${.num_steps}"])
    assert config.critic.parallel == config.parallel and config.parallel.context == 2
    assert config.run.seed == 200


DEEP = "[" * 5000
NINE = "{1}: &{1} [*{0}, *{0}, *{0}, *{0}, *{0}, *{0}, *{0}, *{0}, *{0}]\n"
BOMB = "a: &a [1, 1]\n" + "".join(map(NINE.format, "abcdef", "bcdefg"))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"\x93NUMPY\x01\x00v\x00", "found byte 0x93 at 0, accepted: UTF-8"),
        ("run: {seed: 1}".encode("utf-16"), "accepted: UTF-8"),
        (b"run: {name: a\x00b}", "control characters are not allowed"),
        (b"run: {seed: 1, seed: 2}", "line 1, column 16: the key 'seed' stands twice"),
        (DEEP.encode(), "nest"),
        (b"run: " + DEEP[:60].encode(), "line 1, column 55: nested more than 50 deep"),
        (BOMB.encode(), "more than 10000 values, aliases written out"),
        (b"run: &a [*a]", "line 1, column 10: *a stands for nothing, or for what it is part of"),
        (b"run: !!python/object:os.system {}", "could not determine a constructor for the tag"),
        (b"run: {name: !!binary aGk=}", "could not determine a constructor for the tag"),
        (b"run: {seed: !!int x}", "invalid literal for int()"),
        (b"1: 2", "line 1, column 1: found the key '1', accepted: names, of printable text"),
        (b"megatron: {x: [{~: 2}]}", "line 1, column 17: found the key '~', accepted: names, of printable text"),
        (b"run: {? [1] : 2}", "accepted: names, of printable text"),
        (b"run: {seed: 0x" + b"f" * 5000 + b"}", "line 1, column 13: a whole number of more than 1000 bits"),
        (b"3", "expected a mapping of sections at the top, found int"),
        (b"#" * 2**20 + b"\n", "found 1048577 bytes, accepted: at most 1048576"),
    ],
)
def test_a_file_that_is_no_plain_yaml_says_what_and_where(tmp_path, content, said):
    path = tmp_path / "strange.yaml"
    path.write_bytes(content)
    only(problems_of([write(tmp_path), path]), f"{path}: ", said)


def test_files_that_cannot_be_opened(tmp_path, monkeypatch):
    base, folder = write(tmp_path), tmp_path / "folder.yaml"
    folder.mkdir()
    only(problems_of([base, folder]), f"{folder}: cannot be read as YAML: not a regular file")
    os.mkfifo(tmp_path / "pipe.yaml")
    only(problems_of([base, tmp_path / "pipe.yaml"]), "pipe.yaml: cannot be read as YAML: not a regular file")
    only(problems_of([base, tmp_path / f"{'x' * 300}.yaml"]), "config file not found")
    only(problems_of([base, base / "below.yaml"]), "config file not found")

    def refuse(path: Path) -> bytes:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(Path, "read_bytes", refuse)  # the tests may run as root, whom nothing is denied
    only(problems_of(base), f"{base}: cannot be read: Permission denied")


def test_a_file_may_be_empty_have_a_byte_order_mark_and_merge_keys(tmp_path):
    path = tmp_path / "more.yaml"
    path.write_bytes(b"")
    assert load_config([write(tmp_path), path]).run.seed == 0
    actor, critic = b"actor: {optimizer: &o {lr: 1e-3, eps: 1e-6}}\n", b"critic: {optimizer: {<<: *o, eps: 1e-7}}\n"
    path.write_bytes(b"\xef\xbb\xbf" + actor + critic)
    optimizer = load_config([write(tmp_path), path]).critic.optimizer
    assert (optimizer.lr, optimizer.eps) == (1e-3, 1e-7)


@pytest.mark.parametrize("override", ["run=[1]", "run=null", "critic.parallel=3", "megatron=3", "engine.options=[1]"])
def test_a_section_is_a_mapping(tmp_path, override):
    key = override.partition("=")[0]
    only(problems_of(write(tmp_path), [override]), f"{key}: accepted: a mapping of the fields of this section (found ")


@pytest.mark.parametrize("text", ["run.=1", ".run=1", "run..seed=1", "run[0]=1", "=", "", "run.seed", "run.seed\\=1=2"])
def test_an_override_names_a_field(tmp_path, text):
    only(problems_of(write(tmp_path), [text]), f"command line: found {text!r}, accepted: section.field=value")


def test_a_value_left_open_is_required_and_a_default_needs_none(tmp_path):
    only(problems_of(write(tmp_path, megatron={"x": "???"})), "megatron.x: required")
    assert load_config(write(tmp_path, run={"seed": "???"})).run.seed == 0


def test_arguments_are_files_or_overrides_in_any_order(tmp_path):
    (tmp_path / "plain").write_text("run: {seed: 1}\n")
    arguments = ["base.yaml", "a.b=c.yaml", "x=1=2", "runs/lr=1e-3/config.yml", str(tmp_path / "plain"),
                 "engine.options.some-key=1"]  # fmt: skip
    paths, overrides = split_arguments(arguments)
    assert paths == ["base.yaml", "runs/lr=1e-3/config.yml", str(tmp_path / "plain")]
    assert overrides == ["a.b=c.yaml", "x=1=2", "engine.options.some-key=1"]


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        ([], ["no configuration"]),
        (["run.seed=1"], ["no configuration"]),
        (["base.yaml", "--fast", "run.seed"], ["'--fast'", "'run.seed'"]),
        (["grpo"], ["'grpo'", "no configuration"]),
        (["=3", "base.yaml"], ["'=3'"]),
        (["base.yaml", "x" * 5000, "a\0b", ""], ["'xxx", r"'a\x00b'", "''"]),
    ],
)
def test_arguments_that_are_neither_are_all_named(arguments, found):
    with pytest.raises(UserError) as caught:
        split_arguments(arguments)
    assert len(caught.value.problems) == len(found)
    for part, problem in zip(found, caught.value.problems, strict=True):
        assert problem.startswith("command line: ") and part in problem
