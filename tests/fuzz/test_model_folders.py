"""Model folders as nobody should make them: a run reads them or says in lines what is wrong, as the doctor does."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from megatron_ac2 import inputs
from megatron_ac2.config import Config
from megatron_ac2.config_file import load_config
from megatron_ac2.doctor import check_run, main
from megatron_ac2.inputs import Inputs, read_inputs
from megatron_ac2.types import UserError
from tools.prepare_quickstart import prepare

NUM_EXAMPLES = 300
KINDS = ("value_head", "generative")  # of critics
INDEX, WEIGHTS = "model.safetensors.index.json", "model.safetensors"
Change = tuple[str, str, Any]  # file, what is done to it, with what


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    prepare(folder, seed=0, num_terms=3, num_train=4, num_validation=1, num_worked=5, hidden_size=8, num_layers=1)
    model = {"path": str(folder / "model")}
    sampling = {"num_fresh": 4, "response_budget": 60, "chunk_len": 10, "cut_grid": 10}
    sections = {"run": {"dir": str(folder / "run")}, "model": model, "data": {"train": str(folder / "train.jsonl")}}
    critic = {"kind": "value_head"}
    (folder / "config.yaml").write_text(yaml.safe_dump(sections | {"sampling": sampling, "critic": critic}))
    return folder


@pytest.fixture(scope="module")
def configs(prepared: Path) -> dict[str, Config]:
    """By the kind of critic."""
    return {kind: load_config(prepared / "config.yaml", [f"critic.kind={kind}"]) for kind in KINDS}


BYTES = st.sampled_from([
    b"", b"{bad", b"[]", b"null", b"7", b'"text"', b"\xff\xfe\0", b"\x1f\x8b\x08", b"{}", b"[" * 5000, b"NaN",
    b"\0" * 64,
])  # fmt: skip
VALUES = st.sampled_from([
    None, True, False, 0, -1, 1, 2, 3, 7, 10**9, 10**30, 0.5, 1e9, -0.5, float("nan"), float("inf"), "2", "", "\ud800",
    "a\nb", [], [None], [0], ["x"], [[]], {}, {"a": 1}, {"type": "yarn"}, {"rope_type": "llama3"}, {"rope_theta": "x"},
    "x" * 100_000, [7] * 3, {"rope_type": [], "rope_theta": -1}, "<|im_end|>", "float16", ["full_attention"] * 9,
])  # fmt: skip
CONFIG_FIELDS = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "head_dim", "rms_norm_eps", "rope_theta", "rope_parameters", "rope_scaling", "max_position_embeddings",
    "tie_word_embeddings", "model_type", "architectures", "auto_map", "hidden_act", "dtype", "torch_dtype",
    "quantization_config", "layer_types", "use_sliding_window", "attention_bias", "eos_token_id", "pad_token_id",
    "initializer_range", "sliding_window", "transformers_version", "use_cache", "tokenizer_class",
    "id2label", "num_labels", "label2id", "max_window_layers", "max_length", "num_beams", "use_bfloat16",
)  # fmt: skip
TOKENIZER_FIELDS = (
    "eos_token", "pad_token", "bos_token", "unk_token", "chat_template", "tokenizer_class", "auto_map",
    "model_max_length", "added_tokens_decoder", "additional_special_tokens", "extra_special_tokens", "backend",
    "clean_up_tokenization_spaces", "add_prefix_space", "padding_side", "model_input_names", "is_local",
)  # fmt: skip
TEMPLATES = st.sampled_from([
    "", "{% if %}", "{{ raise_exception('no') }}", "{{ messages | frobnicate }}", "no question", "{{ messages.x.y.z }}",
    "{{ messages[0].content }}", "{% for m in messages %}{{ m.content | upper }}{% endfor %}", "{{ 1 // 0 }}",
    "{{ messages[9].content }}", "{% include 'config.json' %}", "{{ messages }}", "{{ range(10**9) | list }}", "\xff",
    "{% raw %}", "{% set x = cycler.__init__.__globals__ %}{{ x }}",
])  # fmt: skip
PLACES = st.lists(st.integers(0, 9), min_size=1, max_size=4)  # the way down into an object or a list


def json_change(file: str, fields: tuple[str, ...]) -> st.SearchStrategy[Change]:
    names = st.sampled_from(fields)
    return st.one_of(
        st.tuples(st.just(file), st.just("set"), st.tuples(names, VALUES)),
        st.tuples(st.just(file), st.just("set"), st.tuples(names, VALUES)),
        st.tuples(st.just(file), st.just("drop"), names),
        st.tuples(st.just(file), st.just("dig"), st.tuples(PLACES, VALUES)),
    )


FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", WEIGHTS, INDEX)
changes = st.one_of(
    json_change("config.json", CONFIG_FIELDS),
    json_change("config.json", CONFIG_FIELDS),
    json_change("generation_config.json", ("eos_token_id", "pad_token_id", "max_length")),
    json_change("tokenizer_config.json", TOKENIZER_FIELDS),
    json_change("tokenizer.json", ("model", "added_tokens", "pre_tokenizer", "decoder", "normalizer", "version")),
    st.tuples(st.just("chat_template.jinja"), st.just("text"), TEMPLATES),
    st.tuples(st.sampled_from(FILES), st.just("bytes"), BYTES),
    st.tuples(st.sampled_from(FILES), st.just("cut"), st.integers(1, 5000)),
    st.tuples(st.sampled_from(FILES), st.sampled_from(["remove", "folder"]), st.none()),
    st.tuples(st.just(WEIGHTS), st.just("header"), st.tuples(st.integers(0, 20), st.sampled_from(
        [{"dtype": "I8"}, {"dtype": "X"}, {"shape": [1]}, {"shape": []}, {"shape": [-1]}, {"shape": "8"},
         {"data_offsets": [0, 2**60]}, {"data_offsets": [5, 1]}, None, {"name": "a\nb"}, {"name": "x" * 9999}]
    ))),
    st.tuples(st.just(INDEX), st.just("new"), st.sampled_from(
        [WEIGHTS, "../x", "/etc/passwd", "none.safetensors", "", "a\0b", "\ud800", 7, None, [], "x" * 5000,
         "config.json", "a\nb", "."]
    )),
    st.tuples(st.just(WEIGHTS), st.just("length"), st.sampled_from([0, 1, 2**40, 2**64 - 1])),
)  # fmt: skip


def change(folder: Path, file: str, action: str, value: Any) -> None:
    """Carry one change out; of a file that is there no longer, nothing."""
    path = folder / file
    if action in ("text", "new"):
        text = value if action == "text" else json.dumps({"weight_map": {"model.norm.weight": value}})
        path.unlink(missing_ok=True)
        path.write_bytes(text.encode("utf-8" if action == "new" else "latin-1"))
    if not path.is_file() or action in ("text", "new"):
        return
    content = path.read_bytes()
    path.unlink()
    if action == "folder":
        path.mkdir()
    elif action != "remove":
        path.write_bytes(changed(content, action, value))


def changed(content: bytes, action: str, value: Any) -> bytes:
    if action in ("bytes", "cut"):
        return value if action == "bytes" else content[:-value]
    if action == "length":
        return value.to_bytes(8, "little") + content[8:]
    size = int.from_bytes(content[:8], "little") + 8 if action == "header" else len(content)
    try:
        tree = json.loads(content[8:size] if action == "header" else content)
    except (ValueError, RecursionError):  # changed before
        return content
    if isinstance(tree, dict):
        {"set": set_field, "drop": drop_field, "dig": dig, "header": set_tensor}[action](tree, value)
    written = json.dumps(tree).encode()
    return len(written).to_bytes(8, "little") + written + content[size:] if action == "header" else written


def set_field(tree: dict, value: tuple[str, Any]) -> None:
    tree[value[0]] = value[1]


def drop_field(tree: dict, name: str) -> None:
    tree.pop(name, None)


def set_tensor(header: dict, value: tuple[int, dict | None]) -> None:
    """Of tensor number `value[0]`: fields, its name, or that it is there at all."""
    name = sorted(header)[value[0] % len(header)]
    entry = header.pop(name)
    if value[1] is not None:
        header[value[1].get("name", name)] = entry | {key: v for key, v in value[1].items() if key != "name"}


def dig(tree: Any, value: tuple[list[int], Any]) -> None:
    for number in value[0][:-1]:
        below = list(tree.values()) if isinstance(tree, dict) else tree
        inner = [item for item in below if isinstance(item, (dict, list)) and item]
        if not inner:
            break
        tree = inner[number % len(inner)]
    keys = list(tree) if isinstance(tree, dict) else range(len(tree))
    if keys:
        tree[keys[value[0][-1] % len(keys)]] = value[1]


@settings(
    max_examples=NUM_EXAMPLES, derandomize=True, deadline=None, database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)  # fmt: skip
@given(
    made=st.lists(changes, min_size=1, max_size=2),
    kind=st.sampled_from(KINDS),
    asked=st.sampled_from([False, False, True]),
)
@example(made=[("generation_config.json", "bytes", b"{bad")], kind="value_head", asked=True)
@example(made=[("generation_config.json", "bytes", b"[]")], kind="value_head", asked=True)
@example(made=[("generation_config.json", "set", ("eos_token_id", [None]))], kind="value_head", asked=True)
@example(made=[], kind="generative", asked=True)
def test_a_folder_is_read_or_refused_in_lines(
    made: list[Change], kind: str, asked: bool, prepared: Path, configs: dict[str, Config], monkeypatch
) -> None:
    """`asked`: whether the doctor is, too, which takes longer."""
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    folder = prepared / "model"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for file in (prepared / "base").iterdir():
        os.symlink(file, folder / file.name)
    for one in made:
        change(folder, *one)
    try:
        found, problems = read_inputs(configs[kind], 0), []
        assert isinstance(found, Inputs) and found.train and (made or not problems)
    except UserError as error:
        problems = error.problems
        assert problems and made
        for problem in problems:
            assert problem.strip() and len(problem.splitlines()) == 1, repr(problem)[:500]
            assert len(problem.encode()) < 1500, problem[:500]
    if asked:
        said = check_run([prepared / "config.yaml"], [f"critic.kind={kind}"], on_gpu=False)
        assert [f"{finding.subject}: {finding.text}" for finding in said if finding.level == "error"] == problems


def test_what_no_check_knows_is_a_finding_too(prepared: Path, monkeypatch) -> None:
    def fail(*_):
        raise ZeroDivisionError("by\nzero")

    monkeypatch.setattr(inputs, "read_inputs", fail)
    *_, found = check_run([prepared / "config.yaml"], [], on_gpu=False)
    assert (found.level, found.subject) == ("error", "configuration")
    assert found.text.startswith("ZeroDivisionError: by zero (") and "no check knows this" in found.text


def test_a_path_is_printed_as_it_is(prepared: Path, capsys: pytest.CaptureFixture) -> None:
    """Square brackets mean styles to the console."""
    folder = prepared / "[bold]" / "[" / "x]"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{")
    assert main([str(prepared / "config.yaml"), f"model.path='{folder}'"]) == 1
    assert f"  error  {folder / 'config.json'}: cannot be read as JSON: " in capsys.readouterr().out
