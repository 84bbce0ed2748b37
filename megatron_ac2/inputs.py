"""What a run reads from disk; mistakes in files, model and layout are found here, before any rank starts."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, PretrainedConfig, PreTrainedTokenizerBase

from megatron_ac2.algorithm.value_prompt import build_value_prompt
from megatron_ac2.config import Config, critic_kind
from megatron_ac2.critic_inputs import critic_problems
from megatron_ac2.data.graders import ungradable
from megatron_ac2.data.problems import load_problems
from megatron_ac2.engine.routed_experts import recording_problems
from megatron_ac2.model.build import check_layout, load_hf_config, transformer_config
from megatron_ac2.model.router_replay import replay_problems
from megatron_ac2.parallel.topology import check_world
from megatron_ac2.types import Problem, UserError


@dataclass(frozen=True, slots=True)
class Inputs:
    """What is read from disk before any process group exists."""

    hf_config: PretrainedConfig
    critic_hf_config: PretrainedConfig | None
    tokenizer: PreTrainedTokenizerBase
    train: list[Problem]
    validation: list[Problem]
    max_model_len: int

    @property
    def pad_id(self) -> int:
        return self.tokenizer.pad_token_id or 0


def read_inputs(config: Config) -> Inputs:
    """Model configs, tokenizer and problems. Raises one `UserError` with all that is wrong with them."""
    problems: list[str] = []
    world_size = int(os.environ.get("WORLD_SIZE", "1"))

    def attempt(read: Callable[[], Any], path_field: str = "model.path") -> Any:
        try:
            return read()
        except UserError as error:
            problems.extend(problem.replace("model.path", path_field, 1) for problem in error.problems)
            return None

    hf_config = attempt(lambda: load_hf_config(config.model.path))
    critic_hf = hf_config
    has_own_critic = critic_kind(config) == "value_head"
    if has_own_critic and config.critic.path not in (None, config.model.path):
        critic_hf = attempt(lambda: load_hf_config(config.critic.path), "critic.path")
    tokenizer = attempt(lambda: load_tokenizer(config.model.path)) if hf_config is not None else None
    train = attempt(lambda: load_problems(config.data.train, tokenizer)) if tokenizer is not None else None
    validation: list[Problem] = []
    if tokenizer is not None and config.data.validation:
        validation = attempt(lambda: load_problems(config.data.validation, tokenizer)) or []
    if hf_config is not None:
        problems += check_layout(hf_config, config.parallel)
        attempt(lambda: transformer_config(hf_config, config.parallel, torch.float32, config.megatron, config.fp8))
        if config.actor.router_replay:
            problems += replay_problems(hf_config, config.megatron)
            problems += recording_problems(config.engine.tensor_parallel, not torch.cuda.is_available())
    if critic_hf is not None and has_own_critic:
        problems += critic_problems(config, hf_config, critic_hf, tokenizer, world_size)
    if config.actor.loss_op == "triton" and not torch.cuda.is_available():
        problems.append("actor.loss_op: found triton, but there is no GPU; accepted here: auto, torch, naive")
    problems += check_world(config.parallel, world_size)
    max_model_len = 0
    if train:
        problems += ungradable(train)[:20] + ungradable(validation)[:20] + _stream_errors(config, train)
        max_model_len = _max_model_len(config, hf_config, tokenizer, [*train, *validation], problems)
    if problems:
        raise UserError(list(dict.fromkeys(problems)))
    critic_hf = critic_hf if has_own_critic else None
    return Inputs(hf_config, critic_hf, tokenizer, train, validation, max_model_len)


def load_tokenizer(path: str) -> PreTrainedTokenizerBase:
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
    except Exception as error:
        raise UserError(f"model.path: no readable tokenizer in {path}: {error}") from error
    if tokenizer.eos_token_id is None:
        raise UserError(f"model.path: the tokenizer in {path} has no end-of-sequence token")
    if not tokenizer.chat_template:  # so does transformers' empty stand-in for tokenizer files that are not there
        raise UserError(f"model.path: the tokenizer in {path} is missing or has no chat template")
    return tokenizer


def stop_token_ids(path: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The tokenizer's end of sequence and those of generation_config.json: chat models often end on either of two."""
    file = Path(path) / "generation_config.json"
    found = json.loads(file.read_text()).get("eos_token_id") if file.is_file() else None
    more: Sequence[int] = [found] if isinstance(found, int) else found or []
    return sorted({int(tokenizer.eos_token_id), *map(int, more)})


def _stream_errors(config: Config, train: Sequence[Problem]) -> list[str]:
    name = "num_prefixes" if config.sampling.routing == "grpo" else "num_fresh"
    asked = getattr(config.sampling, name)
    if asked <= len(train):
        return []
    return [f"sampling.{name}: found {asked}, but {config.data.train} holds {len(train)} problems"]


def _max_model_len(
    config: Config,
    hf_config: PretrainedConfig,
    tokenizer: PreTrainedTokenizerBase,
    problems_set: Sequence[Problem],
    problems: list[str],
) -> int:
    """The engine's longest context: prompt + budget; a generative critic's value prompt may hold a reference too."""
    budget, critic, chosen = config.sampling.response_budget, config.critic, config.engine.max_model_len
    longest = max(len(problem.prompt_ids) for problem in problems_set) + budget
    limit = hf_config.max_position_embeddings
    if longest > limit:
        problems.append(
            f"sampling.response_budget: found {budget}; with the longest prompt that is {longest} tokens, "
            f"the model reads {limit}"
        )
    if chosen is not None and chosen < longest:
        problems.append(f"engine.max_model_len: found {chosen}, longest prompt + response: {longest}")
    wanted = longest
    is_generative = critic_kind(config) == "generative"
    if is_generative:
        wording = len(build_value_prompt(tokenizer, "", [], budget, []))
        wanted += wording + budget + critic.max_value_tokens
    max_model_len = chosen or min(wanted, limit)
    if is_generative and (critic.max_context_len or 0) > max_model_len:
        problems.append(f"critic.max_context_len: found {critic.max_context_len}, the engine reads {max_model_len}")
    return max_model_len
