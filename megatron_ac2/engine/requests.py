"""Requests divided over engine replicas, and their samples as a few flat arrays for one gather. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from megatron_ac2.types import Sample, SampleRequest, UserError

Packed = dict[str, np.ndarray]
_FINISHES = ("stop", "length")
_LONGEST_TAIL = 8  # tokens


def check_requests(requests: Sequence[SampleRequest], max_model_len: int, vocab_size: int) -> None:
    """Raise `UserError` naming every request that the engine could not answer, before any of them runs."""
    problems = []
    for index, request in enumerate(requests):
        prompt_len, new = len(request.prompt_ids), request.max_new_tokens
        if prompt_len < 1 or new < 1:
            problems.append(
                f"request {index}: found {prompt_len} prompt tokens and max_new_tokens {new}; both must be >= 1"
            )
        elif prompt_len + new > max_model_len:
            problems.append(
                f"request {index}: {prompt_len} prompt tokens + max_new_tokens {new} = {prompt_len + new}, "
                f"more than engine.max_model_len ({max_model_len})"
            )
        problems += [f"request {index}: {problem}" for problem in _sampling_problems(request, vocab_size)]
    if problems:
        shown = problems[:10]
        raise UserError(shown + [f"... and {len(problems) - 10} more requests"] * (len(problems) > 10))


def _sampling_problems(request: SampleRequest, vocab_size: int) -> Iterator[str]:
    """Conditions that a NaN does not meet either."""
    if not request.temperature >= 0:
        yield f"found temperature {request.temperature}; must be >= 0"
    if not 0 <= request.num_top_logprobs <= vocab_size:
        yield f"found num_top_logprobs {request.num_top_logprobs}; must be in [0, {vocab_size}], the vocabulary's size"
    if not 0 < request.top_p <= 1:
        yield f"found top_p {request.top_p}; must be in (0, 1]"
    if request.top_k < 0:
        yield f"found top_k {request.top_k}; must be >= 0, where 0 is the whole vocabulary"


def divide_requests(requests: Sequence[SampleRequest], num_replicas: int) -> list[list[int]]:
    """[replica][request index]: longest groups first, each to the replica with the fewest new tokens to come.

    Requests of one prompt stay together, for the second finds the first one's prompt in the prefix cache, and so do
    prompts that go on for a few tokens more; a group larger than a replica's fair share is cut. Equal loads are told
    apart by prompt length, then by order.
    """
    groups = _groups(requests, num_replicas)
    load = [(0, 0, replica) for replica in range(num_replicas)]  # (new tokens, prompt tokens, replica)
    shares: list[list[int]] = [[] for _ in range(num_replicas)]
    for new_tokens, prompt_len, members in sorted(groups, key=lambda g: (-g[0], -g[1], g[2][0])):
        total, prompts, replica = min(load)
        load[replica] = (total + new_tokens, prompts + prompt_len, replica)
        shares[replica] += members
    return [sorted(share) for share in shares]


def _groups(requests: Sequence[SampleRequest], num_replicas: int) -> list[tuple[int, int, list[int]]]:
    """(new tokens, prompt length, request indices) of each prompt, none above a replica's fair share."""
    fair_share = sum(request.max_new_tokens for request in requests) / num_replicas
    groups = []
    for members in _by_prompt(requests):
        prompt_len = len(requests[members[0]].prompt_ids)
        piece: list[int] = []
        new_tokens = 0
        for index in members:
            if piece and new_tokens + requests[index].max_new_tokens > fair_share:
                groups.append((new_tokens, prompt_len, piece))
                piece, new_tokens = [], 0
            piece.append(index)
            new_tokens += requests[index].max_new_tokens
        groups.append((new_tokens, prompt_len, piece))
    return groups


def _by_prompt(requests: Sequence[SampleRequest]) -> list[list[int]]:
    """Request indices that share a prompt but for a few tokens more: a critic's questions about one state differ so."""
    members: dict[bytes, list[int]] = {}
    for index, request in enumerate(requests):
        members.setdefault(np.asarray(request.prompt_ids, dtype=">u4").tobytes(), []).append(index)
    shared: list[tuple[bytes, list[int]]] = []
    for prompt, indices in sorted(members.items()):
        start = shared[-1][0] if shared else None
        if start is not None and prompt.startswith(start) and len(prompt) - len(start) <= 4 * _LONGEST_TAIL:
            shared[-1][1].extend(indices)
        else:
            shared.append((prompt, indices))
    return [sorted(indices) for _, indices in shared]


def to_sample(
    completion: Any, request: SampleRequest, version: int, routed_experts: np.ndarray | None = None
) -> Sample:
    """vLLM's completion -> arrays. Its log-probs hold, a position, the sampled token and then the k most likely."""
    num_top = request.num_top_logprobs
    token_ids = np.array(completion.token_ids, dtype=np.int32)
    shape = (len(token_ids), 1 + num_top)
    ids = np.array(completion.logprobs.token_ids, dtype=np.int32).reshape(shape)
    logprobs = np.array(completion.logprobs.logprobs, dtype=np.float32).reshape(shape)
    if completion.finish_reason not in ("stop", "length") or not np.array_equal(ids[:, 0], token_ids):
        raise RuntimeError(f"vLLM ended a request with {completion.finish_reason!r} after {len(token_ids)} tokens")
    if request.temperature > 0 and 0 < request.top_k <= num_top:
        _take_in_sampled_ties(ids, logprobs)
    return Sample(
        token_ids=token_ids,
        logprobs=logprobs[:, 0].copy(),
        versions=np.full(len(token_ids), version, dtype=np.int32),
        finish=completion.finish_reason,
        top_ids=ids[:, 1:].copy() if num_top else None,
        top_logprobs=logprobs[:, 1:].copy() if num_top else None,
        routed_experts=routed_experts,
    )


def _take_in_sampled_ties(ids: np.ndarray, logprobs: np.ndarray) -> None:
    """A sampled token outside of the recorded ones is as likely as the last of them, and takes its place."""
    outside = (ids[:, 1:] != ids[:, :1]).all(axis=1)
    ids[outside, -1], logprobs[outside, -1] = ids[outside, 0], logprobs[outside, 0]


def pack_samples(samples: Mapping[int, Sample]) -> Packed:
    """{request index: sample} -> flat arrays: thousands of small arrays would pickle slowly."""
    ordered = sorted(samples.items())
    values = [sample for _, sample in ordered]
    tops = [sample for sample in values if sample.top_ids is not None]
    routed = [sample.routed_experts for sample in values if sample.routed_experts is not None]

    def flat(arrays: list[np.ndarray], dtype: type) -> np.ndarray:
        return np.concatenate([array.ravel() for array in arrays]).astype(dtype) if arrays else np.zeros(0, dtype)

    return {
        "index": np.array([index for index, _ in ordered], dtype=np.int32),
        "length": np.array([len(sample.token_ids) for sample in values], dtype=np.int32),
        "finish": np.array([_FINISHES.index(sample.finish) for sample in values], dtype=np.int8),
        "num_top": np.array([0 if s.top_ids is None else s.top_ids.shape[1] for s in values], dtype=np.int32),
        "token_ids": flat([sample.token_ids for sample in values], np.int32),
        "logprobs": flat([sample.logprobs for sample in values], np.float32),
        "versions": flat([sample.versions for sample in values], np.int32),
        "top_ids": flat([sample.top_ids for sample in tops], np.int32),
        "top_logprobs": flat([sample.top_logprobs for sample in tops], np.float32),
        "num_routed": np.array([0 if s.routed_experts is None else len(s.routed_experts) for s in values], np.int32),
        "routed_experts": np.concatenate(routed) if routed else np.zeros((0, 0, 0), np.uint8),
    }


def unpack_samples(packed: Packed) -> dict[int, Sample]:
    """The inverse of `pack_samples`; the samples' arrays are views into the flat ones."""
    samples = {}
    at = top_at = routed_at = 0
    columns = (packed[name].tolist() for name in ("index", "length", "finish", "num_top", "num_routed"))
    for index, length, finish, num_top, num_routed in zip(*columns, strict=True):
        here, top = slice(at, at + length), slice(top_at, top_at + length * num_top)
        routed = slice(routed_at, routed_at + num_routed)
        samples[index] = Sample(
            token_ids=packed["token_ids"][here],
            logprobs=packed["logprobs"][here],
            versions=packed["versions"][here],
            finish=_FINISHES[finish],
            top_ids=packed["top_ids"][top].reshape(length, num_top) if num_top else None,
            top_logprobs=packed["top_logprobs"][top].reshape(length, num_top) if num_top else None,
            routed_experts=packed["routed_experts"][routed] if num_routed else None,
        )
        at, top_at, routed_at = here.stop, top.stop, routed.stop
    return samples


def merge_shares(shares: Sequence[Packed], num_requests: int) -> list[Sample]:
    """All replicas' shares -> one sample a request, in the order asked. RuntimeError if one is missing or doubled."""
    merged: dict[int, Sample] = {}
    num_samples = 0
    for share in shares:
        samples = unpack_samples(share)
        num_samples += len(share["index"])
        merged.update(samples)
    if num_samples != num_requests or sorted(merged) != list(range(num_requests)):
        raise RuntimeError(f"asked for {num_requests} samples, the engine returned {num_samples}")
    return [merged[index] for index in range(num_requests)]
