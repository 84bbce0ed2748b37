"""Which states a step trains from, and how each is continued (docs/ALGORITHM.md §3, items 1 to 3, and §5)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Set

import numpy as np

from megatron_ac2.types import EMPTY_IDS, Continuation, Mode, Prefix, Trajectory, UserError

# 0.07 * 100 is 7.000000000000001 and 0.29 * 100 is 28.999999999999996: what should be whole must round as if it were.
_ROUNDING = 1e-9
ROUTINGS = ("ac2", "prefix_grpo", "grpo")


def num_fresh_at(step: int, kind: str, num_fresh: int, stale_every: int) -> int:
    """Problems rolled out afresh at `step`: a stale replay buffer is filled at once, at each multiple of `stale_every`.

    rolling, correct_only: `num_fresh` at every step. `kind` is replay.kind.
    """
    if kind != "stale":
        return num_fresh
    return num_fresh * stale_every if step % stale_every == 0 else 0


def fresh_prefixes(problem_ids: Sequence[str], num_prefixes: int) -> list[Prefix]:
    """Bare problems, cycled until the slots are full: the first step, and every step of the `grpo` baseline.

    Raises ValueError without any problem.
    """
    if not problem_ids:
        raise ValueError("fresh_prefixes: no problem to draw from")
    return [Prefix(problem_ids[slot % len(problem_ids)], EMPTY_IDS, replayed=False) for slot in range(num_prefixes)]


def choose_prefixes(
    by_problem: Mapping[str, Sequence[Trajectory]],
    num_prefixes: int,
    cut_grid: int,
    cut_max_fraction: float,
    rng: np.random.Generator,
) -> list[Prefix]:
    """Cycle over the permuted distinct problems; each slot takes one stored trajectory and one cut, both uniform.

    `by_problem` is ReplayBuffer.by_problem(), the same on every rank; `cut_grid` in tokens. Raises ValueError when it
    is empty: an empty buffer is the caller's case for `fresh_prefixes`.
    """
    if not by_problem:
        raise ValueError("choose_prefixes: the replay buffer is empty")
    problem_ids = list(by_problem)
    order = rng.permutation(len(problem_ids))
    prefixes = []
    for slot in range(num_prefixes):
        problem_id = problem_ids[order[slot % len(order)]]
        trajectories = by_problem[problem_id]
        response_ids = trajectories[rng.integers(len(trajectories))].response_ids
        cut = cut_grid * int(rng.integers(num_cuts(len(response_ids), cut_grid, cut_max_fraction)))
        prefixes.append(Prefix(problem_id, response_ids[:cut].copy(), replayed=True))
    return prefixes


def num_cuts(response_len: int, cut_grid: int, cut_max_fraction: float) -> int:
    """How many multiples of `cut_grid` lie in [0, cut_max_fraction * response_len]; at least one, the cut at 0."""
    return math.floor(cut_max_fraction * response_len / cut_grid + _ROUNDING) + 1


def route(
    prefixes: Sequence[Prefix],
    ready: Set[str],
    *,
    audit_fraction: float,
    chunk_len: int,
    response_budget: int,
    group_size: int,
    rng: np.random.Generator,
    routing: str = "ac2",
) -> list[Continuation]:
    """One continuation a slot, in the order of the slots. Lengths in tokens.

    Of the slots whose problem is ready, `ceil(audit_fraction * count)` picked at random are audits and the rest get a
    chunk; all others are rolled out in full. `prefix_grpo` and `grpo` trust no critic: every slot is full.
    Raises UserError for an unknown routing and for a prefix that leaves no token of the budget.
    """
    if routing not in ROUTINGS:
        raise UserError(f"sampling.routing: found {routing!r}, accepted: {', '.join(ROUTINGS)}")
    if routing == "grpo" and any(len(prefix.response_ids) for prefix in prefixes):
        raise ValueError("route: grpo starts from bare problems, found a non-empty prefix")
    modes = _modes(prefixes, ready if routing == "ac2" else frozenset(), audit_fraction, rng)
    continuations = []
    for prefix, mode in zip(prefixes, modes):
        remaining = _remaining(prefix, response_budget)
        max_new_tokens = min(chunk_len, remaining) if mode == "chunk" else remaining
        continuations.append(Continuation(prefix, mode, group_size, max_new_tokens))
    return continuations


def singleton_prefixes(
    continuations: Sequence[Continuation],
    by_problem: Mapping[str, Sequence[Trajectory]],
    cut_grid: int,
    cut_max_fraction: float,
    rng: np.random.Generator,
    *,
    chunk_len: int,
    response_budget: int,
) -> list[Continuation]:
    """The singleton estimator (arXiv 2609.39247): a chunk group of G becomes G chunks from G prefixes of its problem.

    These stand in their group's place, group_size 1 each. A prefix is a (trajectory, cut) drawn as `choose_prefixes`
    does; within a group every pair comes once before any twice. Full and audit groups stay as they are. Lengths in
    tokens; `by_problem` is ReplayBuffer.by_problem(), the same on every rank.
    Raises ValueError for a chunk of a problem that `by_problem` lacks, UserError for a prefix as long as the budget.
    """
    expanded: list[Continuation] = []
    for continuation in continuations:
        problem_id = continuation.prefix.problem_id
        if continuation.mode != "chunk":
            expanded.append(continuation)
            continue
        if problem_id not in by_problem:
            raise ValueError(f"singleton_prefixes: no stored trajectory of problem {problem_id!r}")
        trajectories = by_problem[problem_id]
        for number, cut in _distinct_cuts(trajectories, continuation.group_size, cut_grid, cut_max_fraction, rng):
            prefix = Prefix(problem_id, trajectories[number].response_ids[:cut].copy(), replayed=True)
            max_new_tokens = min(chunk_len, _remaining(prefix, response_budget))
            expanded.append(Continuation(prefix, "chunk", 1, max_new_tokens))
    return expanded


def _distinct_cuts(
    trajectories: Sequence[Trajectory], count: int, cut_grid: int, cut_max_fraction: float, rng: np.random.Generator
) -> list[tuple[int, int]]:
    """`count` pairs (index of a trajectory, cut in tokens): drawn without replacement, anew once all were drawn."""
    cuts = np.array([num_cuts(len(item.response_ids), cut_grid, cut_max_fraction) for item in trajectories])
    pairs = [(number, cut_grid * step) for number, num in enumerate(cuts) for step in range(num)]
    chances = np.repeat(1.0 / (len(cuts) * cuts), cuts)  # trajectory uniform, then cut uniform
    picked: list[tuple[int, int]] = []
    while len(picked) < count:
        size = min(count - len(picked), len(pairs))
        picked += [pairs[pick] for pick in rng.choice(len(pairs), size, replace=False, p=chances)]
    return picked


def _remaining(prefix: Prefix, response_budget: int) -> int:
    """Tokens that the budget leaves after the prefix, at least one."""
    remaining = response_budget - len(prefix.response_ids)
    if remaining < 1:
        raise UserError(
            f"sampling.response_budget: found {response_budget}, but a replayed prefix of problem "
            f"{prefix.problem_id!r} has {len(prefix.response_ids)} tokens; the budget must be longer"
        )
    return remaining


def _modes(prefixes: Sequence[Prefix], ready: Set[str], audit_fraction: float, rng: np.random.Generator) -> list[Mode]:
    ready_slots = [slot for slot, prefix in enumerate(prefixes) if prefix.replayed and prefix.problem_id in ready]
    num_audits = math.ceil(audit_fraction * len(ready_slots) - _ROUNDING)
    modes: list[Mode] = ["full"] * len(prefixes)
    for rank, pick in enumerate(rng.permutation(len(ready_slots))):
        modes[ready_slots[pick]] = "audit" if rank < num_audits else "chunk"
    return modes
