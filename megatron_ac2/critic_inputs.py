"""What must hold of a critic with a model and perhaps a layout of its own, before any rank starts."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoTokenizer, PretrainedConfig, PreTrainedTokenizerBase

from megatron_ac2.config import Config, critic_parallel
from megatron_ac2.model.build import check_layout, transformer_config
from megatron_ac2.model.fp8 import shape_problems
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
    if critic_hf is not hf_config and hf_config is not None:
        problems += _vocabulary_problems(config.critic.path, hf_config, critic_hf, tokenizer)
    return problems


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
        theirs = AutoTokenizer.from_pretrained(path, local_files_only=True).get_vocab()
    except Exception as error:
        return [*problems, f"critic.path: no readable tokenizer in {path}: {error}"]
    ours = tokenizer.get_vocab()
    odd = sorted(token for token in ours if theirs.get(token) != ours[token])
    if odd:
        named = ", ".join(f"{token!r}: {ours[token]}, there {theirs.get(token)}" for token in odd[:_MAX_NAMED])
        problems.append(f"critic.path: its tokenizer is not the actor's: {len(odd)} tokens differ: {named}")
    return problems
