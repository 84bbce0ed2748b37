"""From a plan to graded and valued chunks: what the engine, the grader and the critic are asked in one step.

Every function here is a collective: all ranks call it with equal arguments and get equal results.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from megatron_ac2.data.graders import grade_many
from megatron_ac2.parallel.collectives import gather_objects, split_evenly
from megatron_ac2.parallel.topology import Topology
from megatron_ac2.random_streams import request_seed
from megatron_ac2.types import (
    Chunk,
    ChunkGroup,
    Continuation,
    Grade,
    Grader,
    Problem,
    Sample,
    Sampler,
    SampleRequest,
    Stop,
)


@dataclass(frozen=True, slots=True)
class Rollout:
    """What one step sampled. `fresh` responses are complete; they feed the replay buffer and no loss."""

    fresh: tuple[tuple[Problem, Sample], ...]
    groups: tuple[ChunkGroup, ...]  # [B]


def context_ids(problem: Problem, response_ids: np.ndarray) -> np.ndarray:
    """Prompt and response so far, as the policy sees it: int32[P + S]. The policy never sees a reference."""
    return np.concatenate([problem.prompt_ids, response_ids]).astype(np.int32)


def stop_reason(sample: Sample, continuation: Continuation, response_budget: int) -> Stop:
    """The engine's finish reason, read against the budget: a length cut is terminal only at the budget's end.

    Raises RuntimeError if the engine cut a response that it was to roll out in full.
    """
    if sample.finish == "stop":
        return "eos"
    used = len(continuation.prefix.response_ids) + len(sample.token_ids)
    if used >= response_budget:
        return "budget"
    if continuation.mode != "chunk":
        raise RuntimeError(
            f"the engine cut a {continuation.mode} rollout at {used} of {response_budget} response tokens"
        )
    return "chunk_end"


def sample_step(
    sampler: Sampler,
    problems: Mapping[str, Problem],
    fresh: Sequence[Problem],
    continuations: Sequence[Continuation],
    *,
    response_budget: int,
    temperature: float,
    seed: int,
    step: int,
) -> Rollout:
    """Fresh full rollouts and all groups in one call, so that the engine's batch never runs dry between the two."""
    requests = [
        SampleRequest(problem.prompt_ids, response_budget, temperature, request_seed(seed, "fresh", step, slot))
        for slot, problem in enumerate(fresh)
    ]
    for slot, continuation in enumerate(continuations):
        ids = context_ids(problems[continuation.prefix.problem_id], continuation.prefix.response_ids)
        requests += [
            SampleRequest(
                ids,
                continuation.max_new_tokens,
                temperature,
                request_seed(seed, "chunk", step, slot * continuation.group_size + member),
            )
            for member in range(continuation.group_size)
        ]
    samples = iter(sampler.sample(requests))
    fresh_samples = tuple((problem, next(samples)) for problem in fresh)
    groups = tuple(
        ChunkGroup(
            continuation,
            tuple(_chunk(next(samples), continuation, response_budget) for _ in range(continuation.group_size)),
            len(problems[continuation.prefix.problem_id].prompt_ids) + len(continuation.prefix.response_ids),
        )
        for continuation in continuations
    )
    return Rollout(fresh_samples, groups)


def _chunk(sample: Sample, continuation: Continuation, response_budget: int) -> Chunk:
    stop = stop_reason(sample, continuation, response_budget)
    return Chunk(sample.token_ids, sample.logprobs, sample.versions, stop)


def response_of(group: ChunkGroup, chunk: Chunk) -> np.ndarray:
    """The whole response after the chunk: int32[S + N]."""
    return np.concatenate([group.continuation.prefix.response_ids, chunk.token_ids]).astype(np.int32)


def grade_responses(
    grader: Grader, tokenizer, items: Sequence[tuple[Problem, np.ndarray]], topology: Topology
) -> list[Grade]:
    """Each rank grades its share (verifiers are slow Python), then all ranks learn every grade."""
    mine = split_evenly(len(items), topology.world_size, topology.rank)
    texts = ((items[index][0], tokenizer.decode(items[index][1], skip_special_tokens=True)) for index in mine)
    grades = grade_many(grader, texts)
    return [grade for share in gather_objects(grades) for grade in share]


def audit_states(groups: Sequence[ChunkGroup], chunk_len: int) -> list[tuple[tuple[int, int], np.ndarray]]:
    """((group, member), response at prefix + chunk_len) of the first long enough member of each audited group."""
    found = []
    for index, group in enumerate(groups):
        if group.continuation.mode != "audit":
            continue
        member = next((g for g, chunk in enumerate(group.chunks) if len(chunk.token_ids) > chunk_len), None)
        if member is not None:
            prefix_ids = group.continuation.prefix.response_ids
            found.append(((index, member), np.concatenate([prefix_ids, group.chunks[member].token_ids[:chunk_len]])))
    return found
