"""What a run reads from disk; mistakes in files, model and layout are found here, before any rank starts."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from megatron_ac2.algorithm.value_prompt import build_value_prompt
from megatron_ac2.config import Config, critic_kind
from megatron_ac2.critic_inputs import context_warnings, critic_problems
from megatron_ac2.data.problems import load_problems
from megatron_ac2.engine.routed_experts import recording_problems
from megatron_ac2.engine.vllm_arguments import engine_problems
from megatron_ac2.grading.confinement import why_unconfined
from megatron_ac2.grading.rules import ungradable
from megatron_ac2.model.build import check_layout, load_hf_config, transformer_config
from megatron_ac2.model.hf_headers import weight_problems
from megatron_ac2.model.router_replay import replay_problems
from megatron_ac2.model.tokenizer import load_tokenizer, stop_token_ids, vocabulary_problems
from megatron_ac2.parallel.topology import check_world
from megatron_ac2.state import RunState
from megatron_ac2.types import Problem, UserError

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Inputs:
    """What is read from disk before any process group exists."""

    hf_config: PretrainedConfig
    critic_hf_config: PretrainedConfig | None
    tokenizer: PreTrainedTokenizerBase
    train: list[Problem]
    validation: list[Problem]
    max_model_len: int
    warnings: list[str]  # what is legal but deserves a word at start, and takes files to see

    @property
    def pad_id(self) -> int:
        return self.tokenizer.pad_token_id or 0


def read_inputs(config: Config, world_size: int | None = None) -> Inputs:
    """Model configs, tokenizer and problems. Raises one `UserError` with all that is wrong with them, or in which way
    the run cannot be: a run asks here, and the doctor does. `world_size`: None, as torchrun says; 0, not known.
    """
    problems = _missing(config)
    world_size = int(os.environ.get("WORLD_SIZE", "1")) if world_size is None else world_size
    attempt = partial(_attempt, problems)
    hf_config = attempt(lambda: load_hf_config(config.model.path))
    critic_hf = hf_config if (has_own_critic := critic_kind(config) == "value_head") else None
    if has_own_critic and config.critic.path not in (None, config.model.path):
        critic_hf = attempt(lambda: load_hf_config(config.critic.path), "critic.path")
    dialogue = critic_kind(config) == "generative"
    tokenizer = attempt(lambda: load_tokenizer(config.model.path, dialogue)) if hf_config is not None else None
    train, validation = (
        attempt(partial(load_problems, file, tokenizer)) or []
        if file is not None and os.path.isfile(file) else []
        for file in (config.data.train, config.data.validation)
    )  # fmt: skip
    if hf_config is not None:
        problems += _model_problems(config, hf_config)
    if tokenizer is not None:
        attempt(lambda: stop_token_ids(config.model.path, tokenizer))
        problems += vocabulary_problems(config.model.path, hf_config.vocab_size, tokenizer)
    if critic_hf is not None:
        problems += critic_problems(config, hf_config, critic_hf, tokenizer, world_size)
    problems += _platform_problems(config, world_size)
    max_model_len, warnings = 0, []
    if train:
        problems += ungradable(train)[:20] + ungradable(validation)[:20] + _stream_errors(config, train)
        max_model_len, context = _lengths(config, hf_config, tokenizer, [*train, *validation], problems)
        limit = max_model_len if critic_hf is None else critic_hf.max_position_embeddings
        warnings += context_warnings(config, context, limit)
        attempt(lambda: RunState.fresh(config, train))
    if problems:
        raise UserError(list(dict.fromkeys(problems)))
    return Inputs(hf_config, critic_hf, tokenizer, train, validation, max_model_len, warnings)


def _attempt(problems: list[str], read: Callable[[], T], path_field: str = "model.path") -> T | None:
    try:
        return read()
    except UserError as error:
        problems.extend(problem.replace("model.path", path_field, 1) for problem in error.problems)
        return None


def _model_problems(config: Config, hf_config: PretrainedConfig) -> list[str]:
    """Of the actor's weights, layout and Megatron's options, and of a reference model's weights."""
    reference = config.actor.reference_kl
    folders = {"model.path": config.model.path}
    if reference.coefficient and reference.path is not None and os.path.isdir(reference.path):
        folders["actor.reference_kl.path"] = reference.path
    problems = [f"{field}: {p}" for field, folder in folders.items() for p in weight_problems(hf_config, folder)]
    problems += check_layout(hf_config, config.parallel)
    _attempt(
        problems,
        lambda: transformer_config(hf_config, config.parallel, torch.float32, config.megatron, config.fp8),
    )
    if config.actor.router_replay:
        problems += replay_problems(hf_config, config.megatron)
    return problems


def _missing(config: Config) -> list[str]:
    """Files and packages that are named and not there, models' folders apart."""
    files = {"data.train": config.data.train, "data.validation": config.data.validation}
    problems = [
        f"{field}: file not found: {file}" for field, file in files.items() if file and not os.path.isfile(file)
    ]
    if (folder := config.actor.reference_kl.path) is not None and not os.path.isdir(folder):
        problems.append(f"actor.reference_kl.path: folder not found: {folder}")
    for name in ("wandb", "tensorboard"):
        if getattr(config.run, name) and importlib.util.find_spec(name) is None:
            problems.append(f"run.{name}: found true, but {name} is not installed: pip install {name}, or set false")
    return problems + folder_problems("run.dir", config.run.dir)


def folder_problems(field: str, folder: str) -> list[str]:
    """What keeps a run from writing to a folder, which it makes where there is none, as messages."""
    existing = next(path for path in (Path(folder), *Path(folder).parents, Path(".")) if os.path.lexists(path))
    if not os.path.isdir(existing):
        return [f"{field}: found {folder}, but {existing} is not a folder"]
    if not os.access(existing, os.W_OK | os.X_OK):
        return [f"{field}: found {folder}, but this user may not write to {existing}"]
    return []


def _platform_problems(config: Config, world_size: int) -> list[str]:
    """What this machine and so many processes cannot run, whatever the model."""
    problems = []
    if config.actor.loss_op == "triton" and not torch.cuda.is_available():
        problems.append("actor.loss_op: found triton, but there is no GPU; accepted here: auto, torch, naive")
    if config.data.confine_answers and (reason := why_unconfined()) is not None:
        problems.append(
            f"data.confine_answers: found true, but what answers might do cannot be confined here: {reason}; accepted: "
            "on Linux with libseccomp, or false, to grade them in processes that could do what this user can"
        )
    on_cpu = not torch.cuda.is_available()
    if config.actor.router_replay:
        problems += recording_problems(config.engine.tensor_parallel, on_cpu)
    problems += check_world(config.parallel, world_size)
    return problems + engine_problems(config.engine, world_size, on_cpu)


def _stream_errors(config: Config, train: Sequence[Problem]) -> list[str]:
    name = "num_prefixes" if config.sampling.routing == "grpo" else "num_fresh"
    asked = getattr(config.sampling, name)
    if asked <= len(train):
        return []
    return [f"sampling.{name}: found {asked}, but {config.data.train} holds {len(train)} problems"]


def _lengths(
    config: Config,
    hf_config: PretrainedConfig,
    tokenizer: PreTrainedTokenizerBase,
    problems_set: Sequence[Problem],
    problems: list[str],
) -> tuple[int, int]:
    """The engine's longest context: prompt + budget; a generative critic's value prompt may hold a reference too.

    Also the longest context that the critic, of either kind, may be asked about.
    """
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
    context, is_generative = longest, critic_kind(config) == "generative"
    if critic.use_references:
        context += budget + (not is_generative)  # a value head reads a separator before the problem
    if is_generative:
        context += len(build_value_prompt(tokenizer, "", [], budget, [])) + critic.max_value_tokens
    max_model_len = chosen or min(context if is_generative else longest, limit)
    if is_generative and (critic.max_context_len or 0) > max_model_len:
        problems.append(f"critic.max_context_len: found {critic.max_context_len}, the engine reads {max_model_len}")
    return max_model_len, context
