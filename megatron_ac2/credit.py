"""From sampled groups to endpoint values, advantages and the critic's books: asks grader and critic, decides nothing.

Collective: every rank calls with equal arguments and gets an equal `Credit`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from megatron_ac2.algorithm.advantages import group_advantages
from megatron_ac2.algorithm.endpoint import EndpointValues, closed_ends, critic_books, endpoint_values, open_ends
from megatron_ac2.algorithm.readiness import ErrorRecord
from megatron_ac2.algorithm.references import ReferenceBank
from megatron_ac2.algorithm.shaping import overlong_penalty
from megatron_ac2.config import Config
from megatron_ac2.grading.answers import answer_is_complete
from megatron_ac2.rollout import Rollout, audit_states, context_ids, response_of
from megatron_ac2.types import (
    ChunkGroup,
    Critic,
    CriticState,
    CriticTarget,
    Grade,
    Problem,
    TrainSequence,
    Trajectory,
    Values,
)

GradeMany = Callable[[Sequence[tuple[Problem, np.ndarray]]], list[Grade]]
NO_VALUES = Values(np.zeros(0, dtype=np.float32), np.zeros(0, dtype=bool))


@dataclass(frozen=True, slots=True)
class Credit:
    """Of one step; G is the largest group's size, `endpoints.present` says which members exist."""

    fresh: tuple[Trajectory, ...]  # graded fresh rollouts, for the replay buffer
    grades: Mapping[tuple[int, int], Grade]  # of the closed ends (group, member)
    endpoints: EndpointValues  # [B, G]
    advantages: np.ndarray  # float32[B, G]
    weights: np.ndarray  # float32[B, G]
    targets: tuple[CriticTarget, ...]
    records: tuple[ErrorRecord, ...]  # one a target, in the same order
    probes: Values  # [B]; empty without a critic
    audits: tuple[tuple[float, float], ...]  # (critic value at prefix + chunk_len, that member's own reward)


def assign_credit(
    rollout: Rollout,
    problems: Mapping[str, Problem],
    references: ReferenceBank,
    critic: Critic | None,
    grade: GradeMany,
    decode: Callable[[np.ndarray], str],
    config: Config,
    *,
    version: int,
) -> Credit:
    """One value an end, one advantage a chunk. `version` of the weights that sampled and that the critic has.

    `critic` None: every end must be closed, and no book is kept (the GRPO baselines, estimators that work by token).
    """
    groups = rollout.groups
    stops = [[chunk.stop for chunk in group.chunks] for group in groups]
    # An open chunk that already holds a complete answer has nothing left to bootstrap: it is graded.
    answered = [end for end in open_ends(stops) if answer_is_complete(decode(_response(groups, end)))]
    fresh, by_end = _grade(rollout, closed_ends(stops) + answered, problems, grade, version)
    valued_ends = [end for end in open_ends(stops) if end not in by_end]
    probes, ends, audits = _ask_critic(groups, valued_ends, problems, references, critic, config.sampling.chunk_len)
    endpoints = endpoint_values(stops, by_end, valued_ends, ends)
    advantages, weights = _advantages(groups, endpoints, probes, config)
    targets, records = (
        critic_books(
            [group.continuation.prefix for group in groups], endpoints, probes, version=version,
            min_valid=config.replay.min_valid_for_target, modes=[group.continuation.mode for group in groups],
        )
        if critic is not None
        else ([], [])
    )  # fmt: skip
    outcomes = tuple((value, float(endpoints.value[end])) for end, value in audits if endpoints.target_valid[end])
    return Credit(fresh, by_end, endpoints, advantages, weights, tuple(targets), tuple(records), probes, outcomes)


def _grade(
    rollout: Rollout, ends: Sequence[tuple[int, int]], problems: Mapping[str, Problem], grade: GradeMany, version: int
) -> tuple[tuple[Trajectory, ...], dict[tuple[int, int], Grade]]:
    """The fresh rollouts as trajectories, and the grades of `ends`. A failed grader leaves a trajectory reward 0."""
    items = [(problem, sample.token_ids) for problem, sample in rollout.fresh]
    items += [
        (problems[rollout.groups[end[0]].continuation.prefix.problem_id], _response(rollout.groups, end))
        for end in ends
    ]  # fmt: skip
    grades = grade(items)
    fresh = tuple(
        Trajectory(problem.problem_id, sample.token_ids, result.reward if result.valid else 0.0, version)
        for (problem, sample), result in zip(rollout.fresh, grades)
    )
    return fresh, dict(zip(ends, grades[len(rollout.fresh) :], strict=True))


def _advantages(
    groups: Sequence[ChunkGroup], endpoints: EndpointValues, probes: Values, config: Config
) -> tuple[np.ndarray, np.ndarray]:
    """What the actor's endpoint values are worth under `estimator`: advantages and weights, float32[B, G] each."""
    values, valid = endpoints.value, endpoints.valid
    sampling, estimator = config.sampling, config.estimator
    if sampling.overlong_cache:
        values = values + _overlong_penalties(groups, values.shape, sampling.response_budget, sampling.overlong_cache)
    baselines = None
    if estimator.kind == "singleton":
        is_single = np.array([group.continuation.mode == "chunk" for group in groups], dtype=bool)
        baselines = np.where(is_single, probes.value, np.nan)
        valid = valid & ~(is_single & ~probes.valid)[:, None]  # without V(s) there is nothing to compare with
    return group_advantages(
        values, valid, baselines, endpoints.present, kind=estimator.baseline, divide_by_std=estimator.divide_by_std
    )


def _overlong_penalties(groups: Sequence[ChunkGroup], shape: tuple[int, ...], budget: int, cache: int) -> np.ndarray:
    penalties = np.zeros(shape, dtype=np.float32)
    for b, group in enumerate(groups):
        for g, chunk in enumerate(group.chunks):
            response_len = len(group.continuation.prefix.response_ids) + len(chunk.token_ids)
            penalties[b, g] = overlong_penalty(response_len, budget, cache)
    return penalties


def _response(groups: Sequence[ChunkGroup], end: tuple[int, int]) -> np.ndarray:
    return response_of(groups[end[0]], groups[end[0]].chunks[end[1]])


def _ask_critic(
    groups: Sequence[ChunkGroup],
    valued_ends: Sequence[tuple[int, int]],
    problems: Mapping[str, Problem],
    references: ReferenceBank,
    critic: Critic | None,
    chunk_len: int,
) -> tuple[Values, Values, list[tuple[tuple[int, int], float]]]:
    """One call for the probes V(s), the chunk ends V(s + c_i) and the audits, with the weights before this update."""
    if critic is None:
        return NO_VALUES, NO_VALUES, []

    def state(problem_id: str, response_ids: np.ndarray) -> CriticState:
        return CriticState(problems[problem_id], response_ids, references.get(problem_id))

    prefixes = [group.continuation.prefix for group in groups]
    audits = audit_states(groups, chunk_len)
    states = [state(prefix.problem_id, prefix.response_ids) for prefix in prefixes]
    states += [state(prefixes[b].problem_id, _response(groups, (b, g))) for b, g in valued_ends]
    states += [state(prefixes[b].problem_id, ids) for (b, _), ids in audits]
    values = critic.score(states)
    bounds = np.cumsum([len(prefixes), len(valued_ends)])
    probe, end, audit = (
        Values(value, valid)
        for value, valid in zip(np.split(values.value, bounds), np.split(values.valid, bounds), strict=True)
    )
    audited = [(member, float(value)) for (member, _), value, valid in zip(audits, audit.value, audit.valid) if valid]
    return probe, end, audited


def train_sequences(
    groups: Sequence[ChunkGroup], credit: Credit, problems: Mapping[str, Problem]
) -> list[TrainSequence]:
    """All chunks in slot order: the tokens of a chunk share its advantage, its prefix is context."""
    sequences = []
    for b, group in enumerate(groups):
        prefix = group.continuation.prefix
        context = context_ids(problems[prefix.problem_id], prefix.response_ids)
        sequences += [
            TrainSequence(
                token_ids=np.concatenate([context, chunk.token_ids]),
                num_context=len(context),
                behavior_logprobs=chunk.behavior_logprobs,
                advantages=np.full(len(chunk.token_ids), credit.advantages[b, g], dtype=np.float32),
                weight=float(credit.weights[b, g]),
                empty_prefix=len(prefix.response_ids) == 0,
                top_ids=chunk.top_ids,
                top_logprobs=chunk.top_logprobs,
                routed_experts=chunk.routed_experts,
            )
            for g, chunk in enumerate(group.chunks)
        ]
    return sequences


def reference_candidates(rollout: Rollout, credit: Credit, min_reward: float) -> dict[str, list[np.ndarray]]:
    """Complete responses graded at least `min_reward`, fresh and trained, by problem (docs/ALGORITHM.md §3.9)."""
    found: dict[str, list[np.ndarray]] = {}
    for trajectory in credit.fresh:
        if trajectory.reward >= min_reward:
            found.setdefault(trajectory.problem_id, []).append(trajectory.response_ids)
    for end, grade in credit.grades.items():
        if grade.valid and grade.reward >= min_reward:
            problem_id = rollout.groups[end[0]].continuation.prefix.problem_id
            found.setdefault(problem_id, []).append(_response(rollout.groups, end))
    return found
