"""Advantages and critic targets by token: GAE, BRACE, RFPO (docs/ALGORITHM.md §6), and N-step targets by chunk.

Collective: every rank calls with equal arguments and gets equal results.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from megatron_ac2.algorithm.nstep import nstep_targets
from megatron_ac2.algorithm.references import ReferenceBank
from megatron_ac2.algorithm.rfpo import Calibration, calibrated_rewards, rfpo_advantages
from megatron_ac2.algorithm.token_returns import brace, gae
from megatron_ac2.config import Config, EstimatorConfig
from megatron_ac2.credit import Credit
from megatron_ac2.random_streams import stream
from megatron_ac2.rollout import response_of
from megatron_ac2.training.actor import Actor
from megatron_ac2.types import (
    ChunkGroup,
    CriticState,
    DenseExample,
    Problem,
    TokenCritic,
    TrainSequence,
)

TOKEN_ESTIMATORS = ("gae", "brace", "rfpo")


@dataclass(frozen=True, slots=True)
class TokenCredit:
    sequences: list[TrainSequence]  # with an advantage of its own a token; weight 0 where the critic cannot read it
    examples: list[DenseExample]  # the critic's targets of this step; none from a frozen critic


def assign_token_credit(
    groups: Sequence[ChunkGroup],
    sequences: Sequence[TrainSequence],
    credit: Credit,
    problems: Mapping[str, Problem],
    references: ReferenceBank,
    critic: TokenCritic,
    actor: Actor,
    config: Config,
    *,
    step: int,
    calibration: Calibration | None,
) -> TokenCredit:
    """Replace the chunk advantages of `sequences` (in the order of the chunks) by the estimator's, token by token.

    RFPO reads the value of the finished response too; it needs a `calibration`, and trains no critic.
    """
    kind = config.estimator.kind
    if kind == "rfpo":
        references = ReferenceBank()  # it was calibrated without any
    members = [(b, g) for b, group in enumerate(groups) for g in range(len(group.chunks))]
    states = [_state(groups[b], response_of(groups[b], groups[b].chunks[g]), problems, references) for b, g in members]
    paths = critic.score_paths(states, [_positions(groups[b], g) for b, g in members])
    ends = np.array([credit.endpoints.value[end] for end in members], dtype=np.float64)
    if kind == "rfpo":
        assert calibration is not None
        lengths = np.array([len(state.response_ids) for state in states])
        ends = _mixed_rewards(ends, paths, lengths, calibration, config, step)
    ratios = _ratios(actor, sequences) if kind == "brace" else [None] * len(members)
    trained, examples = [], []
    for state, sequence, path, end, ratio in zip(states, sequences, paths, ends, ratios, strict=True):
        if path is None:
            trained.append(replace(sequence, weight=0.0))
            continue
        values = path[:-1].astype(np.float64)
        advantages, targets = _of_one(config.estimator, values, end, ratio)
        trained.append(replace(sequence, advantages=advantages.astype(np.float32)))
        if targets is not None and sequence.weight > 0:
            start = len(state.response_ids) - len(values)
            examples.append(_example(state, np.arange(start, start + len(values)), targets, values))
    return TokenCredit(trained, examples)


def _of_one(
    estimator: EstimatorConfig, values: np.ndarray, end_value: float, ratios: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray | None]:
    """values f64[N] of the states in which the N tokens were chosen -> advantages [N], critic targets [N] or None."""
    if estimator.kind == "gae":
        return gae(values, end_value, estimator.gamma, estimator.gae_lambda)
    if estimator.kind == "brace":
        targets, advantages = brace(
            values, end_value, ratios, horizon=estimator.brace_horizon, rho_max=estimator.brace_rho_max,
            c_max=estimator.brace_c_max, lam=estimator.brace_lambda, gamma=estimator.gamma,
            product_max=estimator.brace_product_max,
        )  # fmt: skip
        return advantages, targets
    return rfpo_advantages(end_value, values), None


def _example(state: CriticState, positions: np.ndarray, targets: np.ndarray, values: np.ndarray) -> DenseExample:
    bounded = np.clip(targets, 0.0, 1.0).astype(np.float32)  # a critic's values are probabilities of success
    return DenseExample(state, positions, bounded, old_values=values.astype(np.float32))


def _ratios(actor: Actor, sequences: Sequence[TrainSequence]) -> list[np.ndarray]:
    """Trainer / engine, float64[N] a sequence, under the weights before this step's update: one more forward pass."""
    found = actor.logprobs(sequences)
    return [np.exp(own.astype(np.float64) - s.behavior_logprobs) for own, s in zip(found, sequences, strict=True)]


def _mixed_rewards(
    rewards: np.ndarray, paths: Sequence[np.ndarray | None], lengths: np.ndarray, calibration: Calibration,
    config: Config, step: int,
) -> np.ndarray:  # fmt: skip
    """The critic's verdict in place of the reward, but for the share of trajectories that keep their label."""
    final = np.array([np.nan if path is None else path[-1] for path in paths], dtype=np.float64)
    keeps_label = stream(config.run.seed, "labels", step).random(len(rewards)) < config.estimator.rfpo_label_fraction
    return np.where(keeps_label, rewards, calibrated_rewards(calibration, np.nan_to_num(final), lengths))


def nstep_examples(
    groups: Sequence[ChunkGroup],
    credit: Credit,
    problems: Mapping[str, Problem],
    references: ReferenceBank,
    critic: TokenCritic,
    config: Config,
) -> list[DenseExample]:
    """Targets at every chunk boundary of this step's replayed groups, bootstrapped from the frozen critic (T-SAC).

    A group shares the target of its prefix: the mean over the siblings. Members without a known end are left out.
    """
    chosen = [(b, _known_members(credit, b, group)) for b, group in enumerate(groups) if _is_replayed(group)]
    chosen = [(b, members) for b, members in chosen if members]
    states, positions = [], []
    for b, members in chosen:
        for g in members:
            states.append(_state(groups[b], response_of(groups[b], groups[b].chunks[g]), problems, references))
            positions.append(_boundaries(groups[b], g, config.sampling.chunk_len))
    paths = iter(zip(states, positions, critic.score_paths(states, positions, frozen=True), strict=True))
    examples = []
    for b, members in chosen:
        read = [(next(paths), g) for g in members]
        read = [((state, where, path), g) for (state, where, path), g in read if path is not None]
        if not read:
            continue
        ends = np.array([credit.endpoints.value[b, g] for _, g in read], dtype=np.float64)
        (shared, shared_mask), own = nstep_targets([path for (_, _, path), _ in read], ends, config.critic.nstep_max)
        prefix = groups[b].continuation.prefix.response_ids
        start = _state(groups[b], prefix, problems, references)
        examples.append(_nstep_example(start, np.array([len(prefix)]), shared[None], shared_mask[None]))
        for ((state, where, _), _), (targets, mask) in zip(read, own, strict=True):
            if len(where):
                examples.append(_nstep_example(state, where, targets, mask))
    return examples


def _nstep_example(state: CriticState, where: np.ndarray, targets: np.ndarray, mask: np.ndarray) -> DenseExample:
    return DenseExample(state, where, targets.astype(np.float32), mask=mask)


def _is_replayed(group: ChunkGroup) -> bool:
    return group.continuation.prefix.replayed


def _known_members(credit: Credit, b: int, group: ChunkGroup) -> list[int]:
    return [g for g in range(len(group.chunks)) if credit.endpoints.target_valid[b, g]]


def _positions(group: ChunkGroup, g: int) -> np.ndarray:
    """Before each of the chunk's tokens, and after the last: int[N + 1]."""
    start = len(group.continuation.prefix.response_ids)
    return np.arange(start, start + len(group.chunks[g].token_ids) + 1)


def _boundaries(group: ChunkGroup, g: int, chunk_len: int) -> np.ndarray:
    """Where whole chunks end inside the member's continuation, its own end left out."""
    start = len(group.continuation.prefix.response_ids)
    return np.arange(start + chunk_len, start + len(group.chunks[g].token_ids), chunk_len)


def _state(
    group: ChunkGroup, response_ids: np.ndarray, problems: Mapping[str, Problem], references: ReferenceBank
) -> CriticState:
    problem_id = group.continuation.prefix.problem_id
    return CriticState(problems[problem_id], response_ids, references.get(problem_id))
