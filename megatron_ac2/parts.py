"""The parts of a run, built from a configuration; mistakes in files and model are found before any rank starts."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoTokenizer, PretrainedConfig, PreTrainedTokenizerBase

from megatron_ac2.algorithm.value_prompt import PROMPT_HASH, build_value_prompt
from megatron_ac2.config import Config
from megatron_ac2.data.graders import RuleGrader, ungradable
from megatron_ac2.data.problems import load_problems
from megatron_ac2.engine.engine import ColocatedEngine
from megatron_ac2.model.build import build_model, check_layout, load_hf_config, transformer_config, wrap_ddp
from megatron_ac2.model.checkpoint import load_checkpoint, save_checkpoint
from megatron_ac2.model.hf_weights import load_hf_weights
from megatron_ac2.parallel.topology import Topology, check_world, init_topology
from megatron_ac2.perf import DecodingCost
from megatron_ac2.state import RunState, identity
from megatron_ac2.training.actor import Actor
from megatron_ac2.training.generative_critic import GenerativeCritic
from megatron_ac2.training.optimizer import SharedWeightsOptimizer
from megatron_ac2.training.value_head_critic import ValueHeadCritic
from megatron_ac2.types import Critic, Grader, Problem, UserError


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


@dataclass(frozen=True, slots=True)
class Parts:
    topology: Topology
    hf_config: PretrainedConfig
    tokenizer: PreTrainedTokenizerBase
    actor: Actor
    critic: Critic | None
    engine: ColocatedEngine
    grader: Grader
    validation: list[Problem]
    decoding_cost: DecodingCost
    models: dict[str, torch.nn.Module]  # what a checkpoint holds, by role
    optimizers: dict[str, SharedWeightsOptimizer]
    identity: dict[str, str]

    def decode(self, ids: np.ndarray) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=True)


def read_inputs(config: Config) -> Inputs:
    """Model configs, tokenizer and problems. Raises one `UserError` with all that is wrong with them."""
    problems: list[str] = []

    def attempt(read: Callable[[], Any], path_field: str = "model.path") -> Any:
        try:
            return read()
        except UserError as error:
            problems.extend(problem.replace("model.path", path_field, 1) for problem in error.problems)
            return None

    hf_config = attempt(lambda: load_hf_config(config.model.path))
    critic_hf = hf_config
    if _has_value_head(config) and config.critic.path not in (None, config.model.path):
        critic_hf = attempt(lambda: load_hf_config(config.critic.path), "critic.path")
    tokenizer = attempt(lambda: load_tokenizer(config.model.path)) if hf_config is not None else None
    train = attempt(lambda: load_problems(config.data.train, tokenizer)) if tokenizer is not None else None
    validation: list[Problem] = []
    if tokenizer is not None and config.data.validation:
        validation = attempt(lambda: load_problems(config.data.validation, tokenizer)) or []
    if hf_config is not None:
        problems += check_layout(hf_config, config.parallel)
        attempt(lambda: transformer_config(hf_config, config.parallel, torch.float32, config.megatron))
    if critic_hf is not None and critic_hf is not hf_config:
        problems += [f"critic.path: {problem}" for problem in check_layout(critic_hf, config.parallel)]
        if hf_config is not None and critic_hf.vocab_size != hf_config.vocab_size:
            problems.append(f"critic.path: vocabulary of {critic_hf.vocab_size}, the actor's is {hf_config.vocab_size}")
    problems += check_world(config.parallel, int(os.environ.get("WORLD_SIZE", "1")))
    max_model_len = 0
    if train:
        problems += ungradable(train)[:20] + ungradable(validation)[:20] + _stream_errors(config, train)
        max_model_len = _max_model_len(config, hf_config, tokenizer, [*train, *validation], problems)
    if problems:
        raise UserError(list(dict.fromkeys(problems)))
    return Inputs(
        hf_config, critic_hf if _has_value_head(config) else None, tokenizer, train, validation, max_model_len
    )


def build(config: Config) -> tuple[Parts, RunState]:
    """All parts, with the weights of `model.path` and `critic.path`, and the state of a run at step 0."""
    inputs = read_inputs(config)
    topology = init_topology(config.parallel, config.run.seed, config.run.timeout_minutes)
    dtype = getattr(torch, config.model.dtype)
    actor_model = _load_model(inputs.hf_config, config.model.path, "lm", topology, config,
                              config.actor.optimizer.distributed)  # fmt: skip
    roles = {"actor": config.actor.optimizer}
    if _is_generative(config):
        roles["critic"] = config.critic.optimizer
    models = {"actor": actor_model}
    optimizers = {"actor": SharedWeightsOptimizer(actor_model, roles, dtype)}
    engine = ColocatedEngine(
        config.model.path, config.engine, topology, config.model.dtype, inputs.max_model_len,
        stop_token_ids(config.model.path, inputs.tokenizer), config.run.seed,
    )  # fmt: skip
    if inputs.critic_hf_config is not None:
        models["critic"] = _load_model(inputs.critic_hf_config, config.critic.path or config.model.path, "value",
                                       topology, config, config.critic.optimizer.distributed)  # fmt: skip
        optimizers["critic"] = SharedWeightsOptimizer(models["critic"], {"critic": config.critic.optimizer}, dtype)
    parts = Parts(
        topology=topology, hf_config=inputs.hf_config, tokenizer=inputs.tokenizer,
        actor=Actor(actor_model, optimizers["actor"].for_role("actor"), topology, config, inputs.hf_config.vocab_size,
                    inputs.pad_id),
        critic=_build_critic(config, inputs, topology, models, optimizers, engine),
        engine=engine, grader=RuleGrader(config.data.grading_timeout), validation=inputs.validation,
        decoding_cost=DecodingCost.of(inputs.hf_config), models=models, optimizers=optimizers,
        identity=identity(config, inputs.hf_config, inputs.tokenizer, PROMPT_HASH),
    )  # fmt: skip
    return parts, RunState.fresh(config, inputs.train)


def _build_critic(
    config: Config,
    inputs: Inputs,
    topology: Topology,
    models: Mapping[str, torch.nn.Module],
    optimizers: Mapping[str, SharedWeightsOptimizer],
    engine: ColocatedEngine,
) -> Critic | None:
    """The critic that `critic.kind` asks for; None for the baselines, which have none."""
    if _is_generative(config):
        return GenerativeCritic(
            models["actor"], optimizers["actor"].for_role("critic"), engine, inputs.tokenizer, topology, config,
            inputs.hf_config.vocab_size, model_max_len=inputs.max_model_len, pad_id=inputs.pad_id,
        )  # fmt: skip
    if inputs.critic_hf_config is None:
        return None
    return ValueHeadCritic(
        models["critic"], optimizers["critic"].for_role("critic"), topology, config, separator_id=inputs.pad_id,
        model_max_len=inputs.critic_hf_config.max_position_embeddings, pad_id=inputs.pad_id,
    )  # fmt: skip


def save(parts: Parts, state: RunState, config: Config) -> None:
    save_checkpoint(
        checkpoint_root(config), state.next_step, parts.models, parts.optimizers, state.state_dict(),
        keep=config.run.keep_checkpoints, identity=parts.identity,
    )  # fmt: skip


def load_latest(parts: Parts, state: RunState, config: Config) -> None:
    """Weights, optimizers and state of the latest checkpoint in `run.dir`, if `run.resume` and there is one."""
    if not config.run.resume:
        return
    saved = load_checkpoint(checkpoint_root(config), parts.models, parts.optimizers, identity=parts.identity)
    if saved is not None:
        state.load_state_dict(saved)


def checkpoint_root(config: Config) -> Path:
    return Path(config.run.dir) / "checkpoints"


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


def _is_generative(config: Config) -> bool:
    return config.sampling.routing == "ac2" and config.critic.kind == "generative"


def _has_value_head(config: Config) -> bool:
    return config.sampling.routing == "ac2" and config.critic.kind == "value_head"


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
    is_generative = _is_generative(config)
    if is_generative:
        wording = len(build_value_prompt(tokenizer, "", [], budget, []))
        wanted += wording + budget + critic.max_value_tokens
    max_model_len = chosen or min(wanted, limit)
    if is_generative and (critic.max_context_len or 0) > max_model_len:
        problems.append(f"critic.max_context_len: found {critic.max_context_len}, the engine reads {max_model_len}")
    return max_model_len


def _load_model(
    hf_config: PretrainedConfig, path: str, head: str, topology: Topology, config: Config, distributed: bool
) -> torch.nn.Module:
    dtype = getattr(torch, config.model.dtype)
    model = build_model(hf_config, topology, config.parallel, dtype, head, config.megatron, config.run.seed)
    load_hf_weights(model, hf_config, topology, path)
    return wrap_ddp(model, distributed)
