"""What a run reads before any rank starts: every mistake that files and model can show, in one message."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3ForCausalLM

from megatron_ac2.algorithm.value_prompt import build_value_prompt
from megatron_ac2.config import Config
from megatron_ac2.config_training import ParallelConfig
from megatron_ac2.inputs import read_inputs, stop_token_ids
from megatron_ac2.model.build import load_hf_config
from megatron_ac2.model.hf_headers import weight_problems
from megatron_ac2.types import UserError
from tests.distributed.tiny_families import write
from tools.prepare_quickstart import prepare
from tools.quickstart_model import base_config

MISSING = object()


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    prepare(folder, seed=0, num_terms=3, num_train=6, num_validation=2, num_worked=20)
    return folder


@pytest.fixture
def config(inputs: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    config = Config()
    config.model.path, config.critic.kind = str(inputs / "base"), "value_head"
    config.data.train, config.data.validation = str(inputs / "train.jsonl"), str(inputs / "validation.jsonl")
    config.sampling.num_fresh, config.sampling.response_budget, config.sampling.chunk_len = 4, 60, 10
    return config


def errors(config: Config) -> list[str]:
    with pytest.raises(UserError) as caught:
        read_inputs(config)
    return caught.value.problems


def test_good_input_is_read_whole(config: Config) -> None:
    found = read_inputs(config)
    assert (len(found.train), len(found.validation)) == (6, 2)
    longest = max(len(problem.prompt_ids) for problem in found.train + found.validation)
    assert found.max_model_len == longest + 60
    assert found.critic_hf_config is found.hf_config
    config.sampling.routing = "prefix_grpo"
    assert read_inputs(config).critic_hf_config is None


def test_all_mistakes_are_reported_at_once(config: Config, inputs: Path, tmp_path: Path) -> None:
    broken = tmp_path / "validation.jsonl"
    broken.write_text((inputs / "validation.jsonl").read_text() + '{"prompt": "1 + 1 = ?"}\n{"prompt": 7\n')
    longest = 5000 + max(len(problem.prompt_ids) for problem in read_inputs(config).train)
    config.data.validation, config.critic.path = str(broken), str(tmp_path / "nowhere")
    config.parallel.tensor, config.megatron = 3, {"no_such_field": 1}
    config.sampling.num_fresh, config.sampling.response_budget = 7, 5000
    found = errors(config)
    for start in (
        f"critic.path: found '{tmp_path / 'nowhere'}', which is not a folder",
        f"{broken}: line 3: found no way to grade it",
        f"{broken}: line 4: not valid JSON",
        "parallel.tensor: found 3, model has 4 attention heads; accepted: divisors of 4",
        "parallel.tensor: found 3, model has 2 key-value heads",
        "parallel.tensor x parallel.pipeline x parallel.context: found 3 x 1 x 1 = 3 with 1 process(es)",
        "megatron.no_such_field: found 1; TransformerConfig has no such field",
        f"sampling.num_fresh: found 7, but {config.data.train} holds 6 problems",
        f"sampling.response_budget: found 5000; with the longest prompt that is {longest} tokens, the model reads 1024",
    ):
        assert sum(problem.startswith(start) for problem in found) == 1, (start, found)
    assert len(found) == len(set(found)) == 10  # the above, and the feed-forward channels


def test_a_missing_model_does_not_hide_a_missing_critic(config: Config, tmp_path: Path) -> None:
    config.model.path, config.critic.path = str(tmp_path / "model"), str(tmp_path / "critic")
    assert [problem.split(",")[0] for problem in errors(config)] == [
        f"model.path: found '{tmp_path / 'model'}'", f"critic.path: found '{tmp_path / 'critic'}'"
    ]  # fmt: skip


def test_a_dense_model_has_no_routers_to_replay(config: Config) -> None:
    config.actor.router_replay = True
    assert errors(config) == ["actor.router_replay: found true, but the model has no experts; accepted: false"]


def test_a_missing_model_beside_a_good_critic_is_a_users_mistake(config: Config, inputs: Path, tmp_path: Path) -> None:
    config.model.path, config.critic.path = str(tmp_path / "model"), str(inputs / "base")
    (problem,) = errors(config)
    assert problem.startswith("model.path: ")


def test_a_critic_of_another_vocabulary_or_layout_is_refused(config: Config, inputs: Path, tmp_path: Path) -> None:
    hf_config = base_config(read_inputs(config).tokenizer)
    hf_config.vocab_size, hf_config.num_attention_heads, hf_config.num_key_value_heads = 50, 3, 1
    Qwen3ForCausalLM(hf_config).save_pretrained(tmp_path / "critic")
    config.critic.path, config.parallel.tensor = str(tmp_path / "critic"), 2
    found = errors(config)
    assert any(problem.startswith("critic.path: vocabulary of 50, the actor's is") for problem in found)
    assert any(problem.startswith("critic.path: parallel.tensor: found 2, model has 3 att") for problem in found)


def test_a_critic_of_another_size_reads_the_actors_tokens(config: Config, inputs: Path, tmp_path: Path) -> None:
    """More rows than tokens are fine, as models padded differently have them; other tokens are not."""
    tokenizer = read_inputs(config).tokenizer
    hf_config = base_config(tokenizer)
    hf_config.vocab_size, hf_config.hidden_size = hf_config.vocab_size + 64, 64
    Qwen3ForCausalLM(hf_config).save_pretrained(tmp_path / "critic")
    config.critic.path = str(tmp_path / "critic")
    assert read_inputs(config).critic_hf_config.hidden_size == 64  # no tokenizer of its own: nothing to compare
    tokenizer.save_pretrained(tmp_path / "critic")
    read_inputs(config)
    tokenizer.add_tokens(["<surplus>"])
    tokenizer.save_pretrained(tmp_path / "critic")
    read_inputs(config)
    text = (tmp_path / "critic" / "tokenizer.json").read_text()
    (tmp_path / "critic" / "tokenizer.json").write_text(text.replace('"7":', '"no seven":'))
    assert [p.partition("7': ")[0] for p in errors(config)] == [
        "critic.path: its tokenizer is not the actor's: 1 tokens differ: '"
    ]


def test_a_critics_own_layout_must_fit_its_model_and_the_processes(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    config.critic.parallel = ParallelConfig(tensor=2)
    read_inputs(config)
    config.critic.parallel = ParallelConfig(tensor=8, sequence=True)
    world, heads, *_ = errors(config)
    assert world.startswith("critic.parallel.tensor x critic.parallel.pipeline x critic.parallel.context: found 8 x ")
    assert "= 8 with 2 process(es)" in world
    assert heads == "critic.parallel.tensor: found 8, model has 4 attention heads; accepted: divisors of 4"
    config.critic.parallel, config.parallel.pipeline = ParallelConfig(pipeline=0), 3
    found = errors(config)
    assert "critic.parallel.pipeline: found 0, must be >= 1" in found
    assert any(problem.startswith("parallel.pipeline: found 3, model has 4 layers") for problem in found)


def test_grpo_needs_a_problem_a_prefix(config: Config) -> None:
    config.sampling.routing, config.sampling.num_prefixes = "grpo", 8
    assert errors(config) == [f"sampling.num_prefixes: found 8, but {config.data.train} holds 6 problems"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_triton_needs_a_gpu(config: Config) -> None:
    config.actor.loss_op = "triton"
    assert errors(config) == ["actor.loss_op: found triton, but there is no GPU; accepted here: auto, torch, naive"]


def test_a_value_heads_context_must_fit_its_model(config: Config) -> None:
    config.critic.max_context_len = 5000
    assert errors(config) == ["critic.max_context_len: found 5000, accepted: 1 to 1024, what its model reads, or null"]


def test_a_problem_that_no_rule_grades_is_named(config: Config, tmp_path: Path) -> None:
    config.data.train = str(tmp_path / "train.jsonl")
    rows = [{"prompt": "Prove it.", "rubric": "A proof."}, *({"prompt": str(n), "answer": "1"} for n in range(5))]
    Path(config.data.train).write_text("".join(json.dumps(row) + "\n" for row in rows))
    (problem,) = errors(config)
    assert "rubric" in problem


def test_a_folder_without_a_tokenizer_is_named(config: Config, inputs: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copy(inputs / "base" / name, folder / name)
    config.model.path = str(folder)
    assert errors(config) == [f"model.path: the tokenizer in {folder} is missing or has no chat template"]


def test_an_engine_shorter_than_the_longest_response_is_refused(config: Config) -> None:
    config.engine.max_model_len = 64
    (problem,) = errors(config)
    assert problem.startswith("engine.max_model_len: found 64, longest prompt + response: ")
    config.engine.max_model_len = 700
    assert read_inputs(config).max_model_len == 700


def test_the_engine_has_room_for_the_longest_value_prompt(config: Config) -> None:
    """This tokenizer needs 552 tokens for the wording alone."""
    config.critic.kind = "generative"
    found = read_inputs(config)
    longest = max(found.train, key=lambda problem: len(problem.prompt_ids))
    full = found.tokenizer.encode("7", add_special_tokens=False) * 60
    assert len(full) == 60
    prompt = build_value_prompt(found.tokenizer, longest.question, full, 0, full)
    assert len(prompt) + config.critic.max_value_tokens <= found.max_model_len


def test_value_prompts_longer_than_the_engine_reads_are_refused_at_start(config: Config) -> None:
    config.critic.kind, config.engine.max_model_len, config.critic.max_context_len = "generative", 800, 900
    assert errors(config) == ["critic.max_context_len: found 900, the engine reads 800"]


def test_stop_tokens_are_the_tokenizers_and_the_generation_configs(config: Config, tmp_path: Path) -> None:
    tokenizer = read_inputs(config).tokenizer
    eos = tokenizer.eos_token_id
    assert stop_token_ids(str(tmp_path), tokenizer) == [eos]
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [eos, 7]}))
    assert stop_token_ids(str(tmp_path), tokenizer) == sorted([eos, 7])
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": 9}))
    assert stop_token_ids(str(tmp_path), tokenizer) == sorted([eos, 9])


@pytest.fixture
def folder(config: Config, inputs: Path, tmp_path: Path) -> Path:
    """The model's, a copy to break."""
    config.model.path = str(shutil.copytree(inputs / "base", tmp_path / "model"))
    return Path(config.model.path)


def test_the_copy_is_good(config: Config, folder: Path) -> None:
    assert read_inputs(config).train


FIELDS = [  # of config.json: name, value (None: null; MISSING: not there), what is said of it
    ("num_hidden_layers", "2", "found '2'; accepted: an integer, 1 to 1,000"),
    ("num_hidden_layers", None, "found null; accepted: an integer"),
    ("num_hidden_layers", -1, "found -1; accepted: an integer"),
    ("num_hidden_layers", 0, "found 0; accepted: an integer"),
    ("num_hidden_layers", 10**9, "found 1000000000; accepted: an integer"),
    ("num_hidden_layers", 1e9, "found 1000000000.0; accepted: an integer"),
    ("num_hidden_layers", float("nan"), "found nan; accepted: an integer"),
    ("num_hidden_layers", True, "found True; accepted: an integer"),
    ("hidden_size", MISSING, "missing; accepted: an integer, 1 to 1,000,000"),
    ("vocab_size", [], "found []; accepted: an integer, 1 to 10,000,000"),
    ("num_key_value_heads", 3, "found 3; accepted: divisors of num_attention_heads (4)"),
    ("head_dim", 0, "found 0; accepted: an integer, 1 to 10,000, or null"),
    ("head_dim", 31, "found 31; "),
    ("rms_norm_eps", float("nan"), "found nan; accepted: a number above 0, up to 1"),
    ("rms_norm_eps", -1e-6, "found -1e-06; accepted: a number above 0, up to 1"),
    ("rms_norm_eps", 0.0, "found 0.0; accepted: a number above 0, up to 1"),
    ("rope_parameters", "default", "found 'default'; accepted: an object, or null"),
    ("rope_parameters", {"rope_type": "default", "rope_theta": "x"}, ".rope_theta: found 'x', accepted: a number"),
    ("rope_parameters", {"rope_type": [1], "rope_theta": 1e4}, "rope_type: found [1], accepted: default, llama3"),
    ("max_position_embeddings", None, "found null; accepted: an integer, 1 to 2,147,483,647"),
    ("tie_word_embeddings", "false", "found 'false'; accepted: true or false"),
    ("model_type", "gpt2", "found 'gpt2' with architecture Qwen3ForCausalLM, accepted: qwen3"),
    ("model_type", MISSING, "found nothing with architecture Qwen3ForCausalLM, accepted: qwen3"),
    ("architectures", MISSING, "found [], accepted: one of Qwen3ForCausalLM, "),
    ("architectures", 5, "found 5; accepted: a list with one name"),
    ("architectures", [["Qwen3ForCausalLM"]], "found [['Qwen3ForCausalLM']]; accepted: a list with one name"),
    ("auto_map", {"AutoConfig": "own.Config"}, "code that a model's folder brings along is never run; "),
    ("quantization_config", 7, "found 7; cannot be read: "),
    ("use_cache", "yes", "found 'yes'; cannot be read: "),
    ("layer_types", ["sliding_attention"] * 4, "found sliding_attention, accepted for Qwen3ForCausalLM: full_att"),
    ("num_labels", 10**9, "found 1000000000; accepted: an integer, 0 to 100,000"),
    ("vocab_size", 64, "found 64, but the tokenizer's ids go up to "),
]


def written(file: Path, **changes: object) -> None:
    """`file` with other values of its fields."""
    fields = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({name: value for name, value in fields.items() if value is not MISSING}))


@pytest.mark.parametrize(("name", "value", "said"), FIELDS, ids=[f"{name}: {said[:20]}" for name, _, said in FIELDS])
def test_a_field_of_the_models_config_is_named(
    name: str, value: object, said: str, config: Config, folder: Path
) -> None:
    (folder / "own.py").write_text("raise SystemExit('code of the folder was run')")
    written(folder / "config.json", **{name: value})
    named = [problem for problem in errors(config) if problem.startswith(f"{folder / 'config.json'}: {name}")]
    assert len(named) == 1 and said in named[0], named


def test_fields_are_named_all_at_once(config: Config, folder: Path) -> None:
    """And a model that cannot be read hides no broken row of a problem file."""
    written(folder / "config.json", hidden_size="big", num_hidden_layers=None, architectures=[], rms_norm_eps="x")
    config.data.train = str(folder / "train.jsonl")
    Path(config.data.train).write_text("{")
    starts = ("architectures", "hidden_size", "num_hidden_layers", "rms_norm_eps")
    *found, row = errors(config)
    assert [problem.split(": ")[:2] for problem in found] == [[str(folder / "config.json"), start] for start in starts]
    assert row.startswith(f"{config.data.train}: line 1: not valid JSON")


BROKEN = [  # a file, its bytes, what is said
    ("config.json", b"\xff\xfe\0", "{file}: cannot be read as JSON: 'utf-8' codec can't decode"),
    ("config.json", b"[]", "{file}: found []; accepted: a JSON object"),
    ("config.json", b"", "{file}: cannot be read as JSON: Expecting value"),
    ("config.json", b"[" * 9999, "{file}: cannot be read as JSON: nested too deep"),
    ("generation_config.json", b"{bad", "{file}: cannot be read as JSON: Expecting property name"),
    ("generation_config.json", b"[]", "{file}: found []; accepted: a JSON object"),
    *[
        ("generation_config.json", b'{"eos_token_id": %s}' % ids, "{file}: eos_token_id: found ")
        for ids in (b"[null]", b"true", b"-1", b'"2"', b"100000", b"[[1]]", b"1.0", b"{}")
    ],
    ("tokenizer.json", b"{bad", "{file}: cannot be read as JSON"),
    ("tokenizer.json", b"", "{file}: cannot be read as JSON"),
    ("tokenizer.json", b"\0\xff", "{file}: cannot be read as JSON"),
    ("tokenizer.json", b'{"version": "1.0"}', "{file}: no readable tokenizer: Model missing"),
    ("tokenizer_config.json", b"[]", "{file}: found []; accepted: a JSON object"),
    ("tokenizer_config.json", b'{"eos_token": 5}', "{file}: no readable tokenizer: TypeError: "),
    ("chat_template.jinja", b"{% if %}", "{file}: chat template: fails on a question: TemplateSyntaxError: "),
    ("chat_template.jinja", b"{{ raise_exception('no') }}", "{file}: chat template: fails on a question: TemplateErr"),
    ("chat_template.jinja", b"{{ messages | frobnicate }}", "{file}: chat template: fails on a question: "),
    ("chat_template.jinja", b"Answer 7.", "{file}: chat template: leaves the question 'What is 17 + 5?' out of the"),
    ("model.safetensors", b"", "model.path: {file}: cannot be read as safetensors: "),
    ("model.safetensors", b"a text file, nothing else", "model.path: {file}: cannot be read as safetensors: "),
    ("model.safetensors", b"\xff" * 7 + b"\x7f{}", "model.path: {file}: cannot be read as safetensors: "),
    ("model.safetensors.index.json", b"{", "model.path: {file}: cannot be read as JSON: "),
    ("model.safetensors.index.json", b"[]", "model.path: {file}: found []; accepted: a JSON object"),
    ("model.safetensors.index.json", b"{}", "model.path: {file}: weight_map: found nothing; accepted: an object"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "content", "said"), BROKEN)
def test_a_broken_file_of_a_model_is_named(name: str, content: bytes, said: str, config: Config, folder: Path) -> None:
    (folder / name).write_bytes(content)
    (problem,) = errors(config)
    assert problem.startswith(said.format(file=folder / name)) and len(problem.splitlines()) == 1


def test_a_missing_tokenizer_file_is_named(config: Config, folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    (problem,) = errors(config)
    assert str(folder) in problem and "tokenizer" in problem


def test_a_generative_critics_template_shows_all_turns(config: Config, folder: Path) -> None:
    template = "{{ messages[-1].content }}"
    (folder / "chat_template.jinja").write_text(template)
    read_inputs(config)
    config.critic.kind = "generative"
    start = f"{folder / 'chat_template.jinja'}: chat template: "
    assert errors(config) == [f"{start}leaves turns out; accepted: one that a dialogue is read from"]
    (folder / "chat_template.jinja").write_text(template + "{{ 'x' if messages | length == 1 else 1 // 0 }}")
    assert errors(config)[0].startswith(f"{start}fails on user, assistant, user: ZeroDivisionError")


def test_tensors_of_other_names_shapes_and_types_are_named_from_their_headers(config: Config, folder: Path) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    layer = "model.layers.0.self_attn"
    tensors[f"{layer}.k_proj.weight"] = tensors[f"{layer}.k_proj.weight"][:-1].contiguous()
    tensors[f"{layer}.q_norm.weight"] = tensors[f"{layer}.q_norm.weight"].to(torch.int8)
    tensors["bad\nname"] = tensors.pop("model.norm.weight")
    save_file(tensors, file)
    width = tensors["model.embed_tokens.weight"].shape[1]
    assert sorted(errors(config)) == sorted([
        f"model.path: {file}: {layer}.k_proj.weight: found shape (63, {width}), config.json says (64, {width})",
        f"model.path: {file}: {layer}.q_norm.weight: found I8; accepted: BF16, F16, F32, F64",
        f"model.path: 'bad\\nname': found in {folder}, but the model has no such tensor",
        f"model.path: model.norm.weight: missing in {folder}",
    ])  # fmt: skip


@pytest.mark.parametrize("maker", ["qwen2_untied", "qwen2_tied", "llama3", "smollm2", "qwen3_moe", "qwen3_moe_last"])
def test_every_familys_tensors_have_the_shapes_that_are_asked_for(maker: str, tmp_path: Path) -> None:
    write(maker, tmp_path)
    assert weight_problems(load_hf_config(tmp_path), tmp_path) == []
    assert weight_problems(load_hf_config(tmp_path), tmp_path, value_outputs=1) == []


def test_a_value_head_of_another_kind_is_found_before_a_run(config: Config, inputs: Path, folder: Path) -> None:
    config.critic.path, config.model.path = str(folder), str(inputs / "base")
    width = load_file(folder / "model.safetensors")["model.norm.weight"].shape[0]
    save_file({"value_head.weight": torch.zeros(1, width)}, folder / "value_head.safetensors")
    read_inputs(config)
    config.critic.head = "two_hot"
    (problem,) = errors(config)
    assert problem.startswith(f"critic.head: value_head.weight in {folder} has shape (1, {width}) (bce or mse)")


def test_of_many_wrong_tensors_the_first_are_named(config: Config, folder: Path) -> None:
    save_file({f"surplus.{i}": torch.zeros(1) for i in range(50)}, folder / "model.safetensors")
    found = errors(config)
    assert len(found) == 21 and "more errors" in found[-1]
