"""From a plan to graded and valued chunks: what the engine, the grader and the critic are asked in one step.

Every function here is a collective: all ranks call it with equal arguments and get equal results.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from megatron_ac2.algorithm.shaping import map_reward
from megatron_ac2.config import Config, num_recorded_logprobs
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
class Decoding:
    """How the engine samples in training. `num_top_logprobs`: recorded a position of a chunk, for the actor's loss."""

    response_budget: int
    temperature: float
    top_p: float = 1.0
    top_k: int = 0
    num_top_logprobs: int = 0
    record_experts: bool = False  # of chunks

    @classmethod
    def of(cls, config: Config, vocab_size: int) -> Decoding:
        sampling = config.sampling
        return cls(
            sampling.response_budget, sampling.temperature, sampling.top_p, sampling.top_k or 0,
            num_recorded_logprobs(config, vocab_size), config.actor.router_replay,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Rollout:
    """What one step sampled. `fresh` responses are complete; they feed the replay buffer and no loss."""

    fresh: tuple[tuple[Problem, Sample], ...]
    groups: tuple[ChunkGroup, ...]  # [B]
    discarded: tuple[ChunkGroup, ...] = ()  # sampled, and counted as decoding, but not trained on


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
    decoding: Decoding,
    *,
    seed: int,
    step: int,
    round: int = 0,
) -> Rollout:
    """Fresh full rollouts and all groups in one call, so that the engine's batch never runs dry between the two.

    A step that samples more than once (DAPO's dynamic sampling) numbers its rounds, for draws of their own.
    """
    requests = [
        SampleRequest(
            problem.prompt_ids, decoding.response_budget, decoding.temperature,
            request_seed(seed, "fresh", step, slot), top_p=decoding.top_p, top_k=decoding.top_k,
        )
        for slot, problem in enumerate(fresh)
    ]  # fmt: skip
    slot = 0
    for continuation in continuations:
        ids = context_ids(problems[continuation.prefix.problem_id], continuation.prefix.response_ids)
        for _ in range(continuation.group_size):
            purpose = f"chunk round {round}" if round else "chunk"
            requests.append(_chunk_request(ids, continuation, decoding, request_seed(seed, purpose, step, slot)))
            slot += 1
    samples = iter(sampler.sample(requests))
    fresh_samples = tuple((problem, next(samples)) for problem in fresh)
    groups = tuple(
        ChunkGroup(
            continuation,
            tuple(_chunk(next(samples), continuation, decoding) for _ in range(continuation.group_size)),
            len(problems[continuation.prefix.problem_id].prompt_ids) + len(continuation.prefix.response_ids),
        )
        for continuation in continuations
    )
    return Rollout(fresh_samples, groups)


def _chunk_request(ids: np.ndarray, continuation: Continuation, decoding: Decoding, seed: int) -> SampleRequest:
    return SampleRequest(
        ids, continuation.max_new_tokens, decoding.temperature, seed, decoding.num_top_logprobs, decoding.top_p,
        decoding.top_k, decoding.record_experts,
    )  # fmt: skip


def _chunk(sample: Sample, continuation: Continuation, decoding: Decoding) -> Chunk:
    stop = stop_reason(sample, continuation, decoding.response_budget)
    return Chunk(
        sample.token_ids, sample.logprobs, sample.versions, stop, sample.top_ids, sample.top_logprobs,
        sample.routed_experts,
    )  # fmt: skip


def response_of(group: ChunkGroup, chunk: Chunk) -> np.ndarray:
    """The whole response after the chunk: int32[S + N]."""
    return np.concatenate([group.continuation.prefix.response_ids, chunk.token_ids]).astype(np.int32)


def grade_responses(
    grader: Grader,
    tokenizer,
    items: Sequence[tuple[Problem, np.ndarray]],
    topology: Topology,
    reward_range: tuple[float, float] = (0.0, 1.0),
) -> list[Grade]:
    """Each rank grades its share (verifiers are slow Python), then all ranks learn every grade, mapped onto [0, 1]."""
    mine = split_evenly(len(items), topology.world_size, topology.rank)
    texts = [(items[index][0], tokenizer.decode(items[index][1], skip_special_tokens=True)) for index in mine]
    grades = [_mapped(grade, *reward_range) for grade in grader.grade(texts)]
    return [grade for share in gather_objects(grades) for grade in share]


def _mapped(grade: Grade, low: float, high: float) -> Grade:
    return replace(grade, reward=map_reward(grade.reward, low, high)) if grade.valid else grade


class GradeCache:
    """Asks for each response once: a step that looks at rewards before it assigns credit does not grade twice."""

    def __init__(self, grade: Callable[[Sequence[tuple[Problem, np.ndarray]]], list[Grade]]):
        self._grade = grade
        self._known: dict[tuple[str, bytes], Grade] = {}

    def __call__(self, items: Sequence[tuple[Problem, np.ndarray]]) -> list[Grade]:
        keys = [(problem.problem_id, response.tobytes()) for problem, response in items]
        unknown = {key: item for key, item in zip(keys, items) if key not in self._known}
        self._known.update(zip(unknown, self._grade(list(unknown.values())), strict=True))
        return [self._known[key] for key in keys]


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
