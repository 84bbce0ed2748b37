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
from megatron_ac2.types import CriticTarget, Grade, Mode, Prefix, Stop, UserError, Values

End = tuple[int, int]


@dataclass(frozen=True, slots=True)
class EndpointValues:
    """G is the size of the largest group; a smaller one is padded at its end, with False in every mask."""

    value: np.ndarray  # float32[B, G]; 0 where neither of the next two masks holds
    valid: np.ndarray  # bool[B, G]: in the actor's loss; False where the critic's answer is invalid
    target_valid: np.ndarray  # bool[B, G]: in the critic's target; also False where the grader failed
    from_critic: np.ndarray  # bool[B, G]: valued by the critic, not by a reward
    present: np.ndarray  # bool[B, G]: a member, not padding


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
    """stops [B][members of the group]; `critic_values` in the order of `critic_ends`.

    A chunk that already holds a complete answer may be graded instead of valued. A closed end without a grade held no
    answer: reward 0, and that is known. A failed grader is reward 0 for the actor and unknown for the critic.
    Raises ValueError for an open end left without a value, and for a value or a grade where none belongs; UserError for
    a reward outside [0, 1].
    """
    _check_ends(stops, grades, critic_ends, critic_values)
    sizes = np.array([len(group) for group in stops], dtype=np.int64)
    present = np.arange(sizes.max(initial=0)) < sizes[:, None]
    value = np.zeros(present.shape, dtype=np.float32)
    valid, target_valid = present.copy(), present.copy()
    from_critic = np.zeros_like(present)
    for end, grade in grades.items():
        value[end] = _reward(grade)
        target_valid[end] = grade.valid
    for end, answer, answered in zip(critic_ends, critic_values.value, critic_values.valid):
        known = bool(answered) and bool(np.isfinite(answer))
        value[end] = answer if known else 0.0
        valid[end] = target_valid[end] = known
        from_critic[end] = True
    return EndpointValues(value, valid, target_valid, from_critic, present)


def critic_books(
    prefixes: Sequence[Prefix],
    endpoints: EndpointValues,
    probes: Values,
    *,
    min_valid: int,
    version: int,
    modes: Sequence[Mode] | None = None,
) -> tuple[list[CriticTarget], list[ErrorRecord]]:
    """The step's new critic targets and the critic's errors on them, in the order of the groups.

    prefixes [B], probes [B] (V(s), one a group) and the groups' modes [B] (None: no audits) match the rows of
    `endpoints`. A group that was not replayed, or has fewer than `min_valid` valid values, enters neither list; a group
    of less than `min_valid` members needs all of them. `version`: of the weights that gave the values.
    """
    modes = ["full"] * len(prefixes) if modes is None else modes
    if not len(prefixes) == len(probes.value) == len(endpoints.value) == len(modes):
        raise ValueError(
            f"critic_books: {len(prefixes)} prefixes, {len(probes.value)} probes, {len(endpoints.value)} groups, "
            f"{len(modes)} modes"
        )
    targets, records = [], []
    for b, prefix in enumerate(prefixes):
        needed = min(min_valid, int(endpoints.present[b].sum()))
        found = critic_target(endpoints.value[b], endpoints.target_valid[b], endpoints.from_critic[b], needed)
        if not prefix.replayed or found is None:
            continue
        target, tag = found
        probe, probe_valid = float(probes.value[b]), bool(probes.valid[b])
        targets.append(CriticTarget(prefix.problem_id, prefix.response_ids, target, tag, version))
        error = probe_error(probe, probe_valid, target)
        records.append(ErrorRecord(prefix.problem_id, error, probe, probe_valid, tag, modes[b] == "audit"))
    return targets, records


def _check_ends(
    stops: Sequence[Sequence[Stop]], grades: Mapping[End, Grade], critic_ends: Sequence[End], critic_values: Values
) -> None:
    if not len(critic_ends) == len(critic_values.value) == len(critic_values.valid):
        raise ValueError(f"endpoint_values: {len(critic_ends)} critic ends, {len(critic_values.value)} critic values")
    is_open, scored = set(open_ends(stops)), set(critic_ends)
    unknown = sorted(grades.keys() - is_open - set(closed_ends(stops)))
    if unknown:
        raise ValueError(f"endpoint_values: grades of no end (group, member) {unknown}")
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
