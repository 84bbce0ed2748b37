"""What a run reads before any rank starts: every mistake that files and model can show, in one message."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import Qwen3ForCausalLM

from megatron_ac2.algorithm.value_prompt import build_value_prompt
from megatron_ac2.config import Config
from megatron_ac2.config_training import ParallelConfig
from megatron_ac2.inputs import read_inputs, stop_token_ids
from megatron_ac2.types import UserError
from tools.prepare_quickstart import prepare
from tools.quickstart_model import base_config


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
