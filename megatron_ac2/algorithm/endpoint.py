"""One value a chunk end, and what the critic's books take from it (docs/ALGORITHM.md §3, items 5 to 7).

An end is (group, member). A chunk cut by its own limit is open: the critic values it. Everything else is closed: it was
finished or used up the response budget, and the reward is its value.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from megatron_ac2.algorithm.advantages import critic_target, probe_error
from megatron_ac2.algorithm.readiness import ErrorRecord
from megatron_ac2.types import CriticTarget, Grade, Prefix, Stop, UserError, Values

End = tuple[int, int]


@dataclass(frozen=True, slots=True)
class EndpointValues:
    value: np.ndarray  # float32[B, G]; 0 where neither mask below holds
    valid: np.ndarray  # bool[B, G]: in the actor's loss; False where the critic's answer is invalid
    target_valid: np.ndarray  # bool[B, G]: in the critic's target; also False where the grader failed
    from_critic: np.ndarray  # bool[B, G]: valued by the critic, not by a reward


def open_ends(stops: Sequence[Sequence[Stop]]) -> list[End]:
    """The ends that the critic values, in order. stops [B][G]."""
    return [(b, g) for b, group in enumerate(stops) for g, stop in enumerate(group) if stop == "chunk_end"]


def closed_ends(stops: Sequence[Sequence[Stop]]) -> list[End]:
    """The ends that a reward values, in order. stops [B][G]."""
    return [(b, g) for b, group in enumerate(stops) for g, stop in enumerate(group) if stop != "chunk_end"]


def endpoint_values(
    stops: Sequence[Sequence[Stop]],
    grades: Mapping[End, Grade],
    critic_ends: Sequence[End],
    critic_values: Values,
) -> EndpointValues:
    """stops [B][G] with equal G; `critic_values` in the order of `critic_ends`.

    A chunk that already holds a complete answer may be graded instead of valued. A closed end without a grade held no
    answer: reward 0, and that is known. A failed grader is reward 0 for the actor and unknown for the critic.
    Raises ValueError for an open end left without a value, a critic value where none belongs, or groups of unequal
    size; UserError for a reward outside [0, 1].
    """
    shape = (len(stops), len(stops[0]) if stops else 0)
    if any(len(group) != shape[1] for group in stops):
        raise ValueError(f"endpoint_values: groups of unequal size {sorted({len(group) for group in stops})}")
    _check_ends(stops, grades, critic_ends, critic_values)
    value = np.zeros(shape, dtype=np.float32)
    valid = np.ones(shape, dtype=bool)
    target_valid = np.ones(shape, dtype=bool)
    from_critic = np.zeros(shape, dtype=bool)
    for end, grade in grades.items():
        value[end] = _reward(grade)
        target_valid[end] = grade.valid
    for end, answer, answered in zip(critic_ends, critic_values.value, critic_values.valid):
        known = bool(answered) and bool(np.isfinite(answer))
        value[end] = answer if known else 0.0
        valid[end] = target_valid[end] = known
        from_critic[end] = True
    return EndpointValues(value, valid, target_valid, from_critic)


def critic_books(
    prefixes: Sequence[Prefix],
    endpoints: EndpointValues,
    probes: Values,
    *,
    min_valid: int,
    version: int,
) -> tuple[list[CriticTarget], list[ErrorRecord]]:
    """The step's new critic targets and the critic's errors on them, in the order of the groups.

    prefixes [B] and probes [B] (V(s), one a group) match the rows of `endpoints`. A group that was not replayed, or has
    fewer than `min_valid` valid values, enters neither list. `version`: of the weights that gave the values.
    """
    if not len(prefixes) == len(probes.value) == len(endpoints.value):
        raise ValueError(
            f"critic_books: {len(prefixes)} prefixes, {len(probes.value)} probes, {len(endpoints.value)} groups"
        )
    targets, records = [], []
    for b, prefix in enumerate(prefixes):
        found = critic_target(endpoints.value[b], endpoints.target_valid[b], endpoints.from_critic[b], min_valid)
        if not prefix.replayed or found is None:
            continue
        target, tag = found
        probe, probe_valid = float(probes.value[b]), bool(probes.valid[b])
        targets.append(CriticTarget(prefix.problem_id, prefix.response_ids, target, tag, version))
        error = probe_error(probe, probe_valid, target)
        records.append(ErrorRecord(prefix.problem_id, error, probe, probe_valid, tag))
    return targets, records


def _check_ends(
    stops: Sequence[Sequence[Stop]], grades: Mapping[End, Grade], critic_ends: Sequence[End], critic_values: Values
) -> None:
    if not len(critic_ends) == len(critic_values.value) == len(critic_values.valid):
        raise ValueError(f"endpoint_values: {len(critic_ends)} critic ends, {len(critic_values.value)} critic values")
    is_open, scored = set(open_ends(stops)), set(critic_ends)
    if not scored <= is_open or scored & grades.keys():
        raise ValueError("endpoint_values: a critic value for an end that is closed or graded")
    missing = sorted(is_open - scored - grades.keys())
    if missing:
        raise ValueError(f"endpoint_values: no value for the open ends (group, member) {missing}")


def _reward(grade: Grade) -> float:
    if not grade.valid:
        return 0.0
    if not 0.0 <= grade.reward <= 1.0:
        raise UserError(f"grader: found reward {grade.reward}, accepted: 0 to 1")
    return grade.reward
