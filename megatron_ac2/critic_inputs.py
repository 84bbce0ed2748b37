"""What must hold of a critic with a model and perhaps a layout of its own, before any rank starts."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from megatron_ac2.config import Config, critic_kind, critic_parallel
from megatron_ac2.model.build import check_layout, transformer_config
from megatron_ac2.model.fp8 import shape_problems
from megatron_ac2.model.hf_headers import weight_problems
from megatron_ac2.model.tokenizer import read_tokenizer
from megatron_ac2.model.value_head import HEAD_OUTPUTS
from megatron_ac2.parallel.topology import check_world
from megatron_ac2.training.value_head_critic import context_problems
from megatron_ac2.types import UserError

_MAX_NAMED = 3


def critic_problems(
    config: Config,
    hf_config: PretrainedConfig | None,
    critic_hf: PretrainedConfig,
    tokenizer: PreTrainedTokenizerBase | None,
    world_size: int,
) -> list[str]:
    """As messages; `hf_config` and `tokenizer` are the actor's, None where they could not be read."""
    problems = context_problems(config, critic_hf.max_position_embeddings)
    parallel = critic_parallel(config)
    unfit_shapes = shape_problems(config.fp8, critic_hf, parallel)
    if config.critic.parallel is not None:
        unfit = [*check_world(parallel, world_size), *check_layout(critic_hf, parallel), *unfit_shapes]
        problems += [problem.replace("parallel.", "critic.parallel.") for problem in dict.fromkeys(unfit)]
    elif critic_hf is not hf_config:
        problems += [f"critic.path: {problem}" for problem in (*check_layout(critic_hf, parallel), *unfit_shapes)]
    try:
        transformer_config(critic_hf, parallel, torch.float32, config.megatron)
    except UserError as error:
        problems += error.problems
    if critic_hf is not hf_config:
        weights = weight_problems(critic_hf, config.critic.path, HEAD_OUTPUTS[config.critic.head])
        problems += [problem if problem.startswith("critic.") else f"critic.path: {problem}" for problem in weights]
    if critic_hf is not hf_config and hf_config is not None:
        problems += _vocabulary_problems(config.critic.path, hf_config, critic_hf, tokenizer)
    return problems


def context_warnings(config: Config, longest: int, limit: int) -> list[str]:
    """A word where states of up to `longest` tokens, wording and reference included, meet a critic that reads `limit`
    of them, and the user has not limited them: no context is ever cut, the longer ones go without a value."""
    if critic_kind(config) == "none" or config.critic.max_context_len is not None or longest <= limit:
        return []
    what = "a whole response and a reference of that length" if config.critic.use_references else "a whole response"
    return [
        f"critic.max_context_len is null and the critic reads {limit} tokens: with the longest problem and {what} a "
        f"context has {longest}; what is longer than the limit gets no value and trains no critic"
    ]


def _vocabulary_problems(
    path: str, hf_config: PretrainedConfig, critic_hf: PretrainedConfig, tokenizer: PreTrainedTokenizerBase | None
) -> list[str]:
    """The critic reads the actor's tokens: each needs a row of its embedding, and must mean the same to both."""
    problems = []
    if critic_hf.vocab_size < hf_config.vocab_size:
        found = f"vocabulary of {critic_hf.vocab_size}, the actor's is {hf_config.vocab_size}"
        problems.append(f"critic.path: {found}; accepted: at least as long")
    if tokenizer is None or not any(Path(path).glob("tokenizer*")):
        return problems
    try:
        theirs = read_tokenizer(path).get_vocab()
    except UserError as error:
        return problems + [f"critic.path: {problem.removeprefix('model.path: ')}" for problem in error.problems]
    ours = tokenizer.get_vocab()
    odd = sorted(token for token in ours if theirs.get(token) != ours[token])
    if odd:
        named = ", ".join(f"{token!r}: {ours[token]}, there {theirs.get(token)}" for token in odd[:_MAX_NAMED])
        problems.append(f"critic.path: its tokenizer is not the actor's: {len(odd)} tokens differ: {named}")
    return problems
