"""The parts of a run, built from a configuration; mistakes in files and model are found before any rank starts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from megatron_ac2.algorithm.value_prompt import PROMPT_HASH
from megatron_ac2.architecture import sparse_layers
from megatron_ac2.config import Config, critic_kind, critic_parallel
from megatron_ac2.config_training import ParallelConfig
from megatron_ac2.engine.engine import ColocatedEngine
from megatron_ac2.grading.rules import RuleGrader
from megatron_ac2.inputs import Inputs, read_inputs, stop_token_ids
from megatron_ac2.model.build import build_model
from megatron_ac2.model.checkpoint import CheckpointSaver, Kept, load_checkpoint
from megatron_ac2.model.data_parallel import wrap_ddp
from megatron_ac2.model.hf_files import HfReader
from megatron_ac2.model.hf_weights import load_hf_weights
from megatron_ac2.model.value_head import HEAD_OUTPUTS
from megatron_ac2.parallel.topology import Topology, add_topology, init_topology
from megatron_ac2.perf import DecodingCost
from megatron_ac2.rollout import Decoding, grade_responses
from megatron_ac2.state import RunState, identity
from megatron_ac2.training.actor import Actor
from megatron_ac2.training.generative_critic import GenerativeCritic
from megatron_ac2.training.offload import Offload
from megatron_ac2.training.optimizer import SharedWeightsOptimizer
from megatron_ac2.training.value_head_critic import ValueHeadCritic
from megatron_ac2.turns import Turns
from megatron_ac2.types import Critic, Grade, Grader, Problem


@dataclass(frozen=True, slots=True)
class Parts:
    topology: Topology  # the actor's
    hf_config: PretrainedConfig
    tokenizer: PreTrainedTokenizerBase
    actor: Actor
    critic: Critic | None
    engine: ColocatedEngine
    grader: Grader
    validation: list[Problem]
    decoding: Decoding
    decoding_cost: DecodingCost
    models: dict[str, torch.nn.Module]  # what a checkpoint holds, by role
    optimizers: dict[str, SharedWeightsOptimizer]
    identity: dict[str, str]
    saver: CheckpointSaver
    turns: Turns
    warnings: list[str]  # for the start

    def decode(self, ids: np.ndarray) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=True)

    def grade(self, items: Sequence[tuple[Problem, np.ndarray]], reward_range: tuple[float, float]) -> list[Grade]:
        return grade_responses(self.grader, self.tokenizer, items, self.topology, reward_range)


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a model is cut over the processes."""

    topology: Topology
    parallel: ParallelConfig


def build(config: Config) -> tuple[Parts, RunState]:
    """All parts, with the weights of `model.path` and `critic.path`, and the state of a run at step 0.

    With run.offload it is the trainer's turn: to load a checkpoint, and to publish.
    """
    inputs = read_inputs(config)
    grader = _grader(config, inputs)  # loads while the models do
    topology = init_topology(config.parallel, config.run.seed, config.run.timeout_minutes)
    place = _Place(topology, config.parallel)
    critic_place = _critic_place(config, inputs, place)
    models, optimizers = _build_models(config, inputs, place, critic_place)
    reference = _reference_model(config, inputs, place)
    frozen = {} if reference is None else {"reference": reference}
    offload = Offload(config.run.offload, models | frozen, optimizers)
    offload.leave()  # the engine takes its share of the memory that it finds free
    engine = ColocatedEngine(
        config.model.path, config.engine, topology, config.model.dtype, inputs.max_model_len,
        stop_token_ids(config.model.path, inputs.tokenizer), config.run.seed,
        recorded_layers=np.flatnonzero(sparse_layers(inputs.hf_config)) if config.actor.router_replay else (),
    )  # fmt: skip
    turns = Turns(offload, engine)
    turns.train(publish_follows=True)
    parts = Parts(
        topology=topology, hf_config=inputs.hf_config, tokenizer=inputs.tokenizer,
        actor=Actor(models["actor"], optimizers["actor"].for_role("actor"), topology, config,
                    inputs.hf_config.vocab_size, inputs.pad_id, reference=reference),
        critic=_build_critic(config, inputs, critic_place.topology, models, optimizers, engine),
        engine=engine, grader=grader, validation=inputs.validation,
        decoding=Decoding.of(config, inputs.hf_config.vocab_size), decoding_cost=DecodingCost.of(inputs.hf_config),
        models=models, optimizers=optimizers,
        identity=run_identity(config, inputs),
        saver=CheckpointSaver(
            checkpoint_root(config), Kept(config.run.keep_checkpoints, config.run.keep_every),
            config.run.async_save, config.run.timeout_minutes,
        ),
        turns=turns, warnings=inputs.warnings,
    )  # fmt: skip
    return parts, RunState.fresh(config, inputs.train)


def _grader(config: Config, inputs: Inputs) -> Grader:
    data = config.data
    problems = [*inputs.train, *inputs.validation]
    return RuleGrader(problems, data.grading_timeout, data.grading_workers, data.confine_answers)


def _critic_place(config: Config, inputs: Inputs, actor: _Place) -> _Place:
    """A layout of its own over the same processes, where the critic has a model of its own and is to have one."""
    if inputs.critic_hf_config is None or config.critic.parallel in (None, config.parallel):
        return actor
    parallel = critic_parallel(config)
    return _Place(add_topology(parallel, actor.topology, config.run.seed, config.run.timeout_minutes), parallel)


def _build_models(
    config: Config, inputs: Inputs, place: _Place, critic_place: _Place
) -> tuple[dict[str, torch.nn.Module], dict[str, SharedWeightsOptimizer]]:
    """What a checkpoint holds, by role: actor, and a value head's critic with the snapshot that N-step targets need."""
    dtype = getattr(torch, config.model.dtype)
    roles = {"actor": config.actor.optimizer}
    if critic_kind(config) == "generative":
        roles["critic"] = config.critic.optimizer
    distributed = config.actor.optimizer.distributed
    actor = _load_model(inputs.hf_config, config.model.path, _policy_head(config), place, config, distributed)
    models: dict[str, torch.nn.Module] = {"actor": actor}
    optimizers = {"actor": SharedWeightsOptimizer(actor, roles, dtype)}
    if inputs.critic_hf_config is not None:
        path, distributed = config.critic.path or config.model.path, config.critic.optimizer.distributed
        critic = _load_model(inputs.critic_hf_config, path, "value", critic_place, config, distributed)
        models["critic"] = critic
        optimizers["critic"] = SharedWeightsOptimizer(critic, {"critic": config.critic.optimizer}, dtype)
        if config.critic.fit == "nstep":
            # Without weights of its own: the critic makes it a copy of itself, a checkpoint brings the run's.
            snapshot = _new_model(inputs.critic_hf_config, "value", critic_place, config)
            models["critic_snapshot"] = snapshot.requires_grad_(False)
    return models, optimizers


def _reference_model(config: Config, inputs: Inputs, place: _Place) -> torch.nn.Module | None:
    """The frozen model of actor.reference_kl. Its weights are on disk already, so that no checkpoint holds them."""
    if not config.actor.reference_kl.coefficient:
        return None
    head = _policy_head(config)
    return _load_model(inputs.hf_config, _reference_path(config), head, place, config, distributed=False, trained=False)


def _reference_path(config: Config) -> str:
    return config.actor.reference_kl.path or config.model.path


def _policy_head(config: Config) -> str:
    return "lm" if config.actor.loss_op == "naive" else "hidden"


def _build_critic(
    config: Config,
    inputs: Inputs,
    topology: Topology,
    models: Mapping[str, torch.nn.Module],
    optimizers: Mapping[str, SharedWeightsOptimizer],
    engine: ColocatedEngine,
) -> Critic | None:
    """The critic that `critic.kind` asks for; None for the baselines, which have none."""
    if critic_kind(config) == "generative":
        return GenerativeCritic(
            models["actor"], optimizers["actor"].for_role("critic"), engine, inputs.tokenizer, topology, config,
            inputs.hf_config.vocab_size, model_max_len=inputs.max_model_len, pad_id=inputs.pad_id,
        )  # fmt: skip
    if inputs.critic_hf_config is None:
        return None
    return ValueHeadCritic(
        models["critic"], optimizers["critic"].for_role("critic"), topology, config, separator_id=inputs.pad_id,
        model_max_len=inputs.critic_hf_config.max_position_embeddings, pad_id=inputs.pad_id,
        snapshot_model=models.get("critic_snapshot"),
    )  # fmt: skip


def save(parts: Parts, state: RunState) -> None:
    """Returns when all is copied, and with run.async_save while it is still being written: see `parts.saver`."""
    with parts.turns.visiting():
        parts.saver.save(state.next_step, parts.models, parts.optimizers, state.state_dict(), parts.identity)


def load_latest(parts: Parts, state: RunState, config: Config) -> None:
    """Weights, optimizers and state of the latest checkpoint in `run.dir`, if `run.resume` and there is one."""
    if not config.run.resume:
        return
    saved = load_checkpoint(
        checkpoint_root(config), parts.models, parts.optimizers, parts.identity, verify=config.run.verify_checkpoint
    )
    if saved is not None:
        state.load_state_dict(saved)


def run_identity(config: Config, inputs: Inputs) -> dict[str, str]:
    """What the run must have in common with a checkpoint that it goes on from."""
    reference = HfReader(_reference_path(config)).fingerprint() if config.actor.reference_kl.coefficient else "none"
    return identity(
        config, inputs.hf_config, inputs.tokenizer, PROMPT_HASH, inputs.train, inputs.critic_hf_config, reference
    )


def checkpoint_root(config: Config) -> Path:
    return Path(config.run.dir) / "checkpoints"


def _load_model(
    hf_config: PretrainedConfig,
    path: str,
    head: str,
    place: _Place,
    config: Config,
    distributed: bool,
    trained: bool = True,
) -> torch.nn.Module:
    """The weights in `path`, as this rank's shard. One that is not trained has no gradient buffers."""
    model = _new_model(hf_config, head, place, config)
    load_hf_weights(model, hf_config, place.topology, path)
    return wrap_ddp(model, distributed, place.parallel.overlap) if trained else model.requires_grad_(False)


def _new_model(hf_config: PretrainedConfig, head: str, place: _Place, config: Config) -> torch.nn.Module:
    dtype = getattr(torch, config.model.dtype)
    return build_model(
        hf_config, place.topology, place.parallel, dtype, head, config.megatron, config.run.seed,
        value_outputs=HEAD_OUTPUTS[config.critic.head], fp8=config.fp8,
    )  # fmt: skip
