"""The rollouts that a step trains on: one round of them, or rounds until enough groups teach something (DAPO)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from megatron_ac2.algorithm.rfpo import fit_calibration
from megatron_ac2.algorithm.shaping import informative
from megatron_ac2.config import Config
from megatron_ac2.credit import GradeMany
from megatron_ac2.plan import plan_step
from megatron_ac2.report import count_decoding
from megatron_ac2.rollout import Rollout, response_of, sample_step
from megatron_ac2.state import RunState
from megatron_ac2.types import ChunkGroup, CriticState, Problem

if TYPE_CHECKING:
    from megatron_ac2.parts import Parts


def collect(parts: Parts, state: RunState, config: Config, step: int, grade: GradeMany) -> Rollout:
    """A collective. With `sampling.dynamic`, groups whose rewards are all equal are replaced by those of other
    problems, `dynamic_max_rounds` times at most; a step may then train on fewer groups (arXiv 2503.14476, §3.2)."""
    rollout = _sample(parts, state, config, step)
    if not config.sampling.dynamic:
        return rollout
    wanted = config.sampling.num_prefixes
    kept, discarded = _split(rollout.groups, state, grade)
    for round in range(1, config.sampling.dynamic_max_rounds):
        if len(kept) >= wanted:
            break
        more, useless = _split(_sample(parts, state, config, step, round).groups, state, grade)
        kept, discarded = kept + more, discarded + useless
    return Rollout(rollout.fresh, tuple(kept[:wanted]), tuple(kept[wanted:] + discarded))


def _sample(parts: Parts, state: RunState, config: Config, step: int, round: int = 0) -> Rollout:
    fresh, continuations = plan_step(state, config, step)
    return sample_step(
        parts.engine, state.stream.by_id, fresh, continuations, parts.decoding, seed=config.run.seed, step=step,
        round=round,
    )  # fmt: skip


def _split(
    groups: Sequence[ChunkGroup], state: RunState, grade: GradeMany
) -> tuple[list[ChunkGroup], list[ChunkGroup]]:
    """(groups with differing rewards, the others). Full rollouts only: each chunk is a finished response."""
    problems = [state.stream.by_id[group.continuation.prefix.problem_id] for group in groups]
    items = [(problem, response_of(group, c)) for problem, group in zip(problems, groups) for c in group.chunks]
    grades = iter(grade(items))
    kept: list[ChunkGroup] = []
    discarded: list[ChunkGroup] = []
    for group in groups:
        own = [next(grades) for _ in group.chunks]
        # A failed grader counts as reward 0 for the actor: it can make a group differ, as it does in its advantages.
        rewards = np.array([found.reward if found.valid else 0.0 for found in own])
        (kept if informative(rewards, np.ones(len(own), dtype=bool)) else discarded).append(group)
    return kept, discarded


def calibrate(parts: Parts, state: RunState, config: Config, grade: GradeMany) -> None:
    """RFPO: label rollouts of the first policy once, and fit the frozen critic's verdict to them (arXiv 2609.37119)."""
    problems = _take(state, config.estimator.rfpo_num_labelled)
    sampled = sample_step(
        parts.engine,
        state.stream.by_id,
        problems,
        [],
        parts.decoding,
        seed=config.run.seed,
        step=state.next_step,
    ).fresh
    grades = grade([(problem, sample.token_ids) for problem, sample in sampled])
    with parts.turns.visiting():
        values = parts.critic.score([CriticState(problem, sample.token_ids, None) for problem, sample in sampled])
    known = np.array([grade.valid for grade in grades], dtype=bool) & values.valid
    lengths = np.array([len(sample.token_ids) for _, sample in sampled])
    labels = np.array([grade.reward >= 0.5 for grade in grades], dtype=bool)
    state.calibration = fit_calibration(values.value[known], lengths[known], labels[known])
    count_decoding(
        state.counters, parts.decoding_cost, [(len(p.prompt_ids), len(sample.token_ids)) for p, sample in sampled]
    )


def _take(state: RunState, count: int) -> list[Problem]:
    """Problems in the stream's order, more than an epoch of them if asked for."""
    taken: list[Problem] = []
    while len(taken) < count:
        taken += state.stream.take(min(count - len(taken), len(state.stream)))
    return taken
