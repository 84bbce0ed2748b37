"""Requests divided over engine replicas, and their samples as a few flat arrays for one gather. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from megatron_ac2.types import Sample, SampleRequest, UserError

Packed = dict[str, np.ndarray]
_FINISHES = ("stop", "length")


def check_requests(requests: Sequence[SampleRequest], max_model_len: int) -> None:
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
        if request.temperature < 0 or request.num_top_logprobs < 0:
            problems.append(
                f"request {index}: found temperature {request.temperature} and num_top_logprobs "
                f"{request.num_top_logprobs}; both must be >= 0"
            )
    if problems:
        shown = problems[:10]
        raise UserError(shown + [f"... and {len(problems) - 10} more requests"] * (len(problems) > 10))


def divide_requests(requests: Sequence[SampleRequest], num_replicas: int) -> list[list[int]]:
    """[replica][request index]: longest groups first, each to the replica with the fewest new tokens to come.

    Requests of one prompt stay together, for the second finds the first one's prompt in the prefix cache; a group
    larger than a replica's fair share is cut. Equal loads are told apart by prompt length, then by order.
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
    by_prompt: dict[bytes, list[int]] = {}
    for index, request in enumerate(requests):
        by_prompt.setdefault(np.asarray(request.prompt_ids, dtype=np.int32).tobytes(), []).append(index)
    fair_share = sum(request.max_new_tokens for request in requests) / num_replicas
    groups = []
    for members in by_prompt.values():
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


def pack_samples(samples: Mapping[int, Sample]) -> Packed:
    """{request index: sample} -> flat arrays: thousands of small arrays would pickle slowly."""
    ordered = sorted(samples.items())
    values = [sample for _, sample in ordered]
    tops = [sample for sample in values if sample.top_ids is not None]

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
    }


def unpack_samples(packed: Packed) -> dict[int, Sample]:
    """The inverse of `pack_samples`; the samples' arrays are views into the flat ones."""
    samples = {}
    at = top_at = 0
    columns = (packed[name].tolist() for name in ("index", "length", "finish", "num_top"))
    for index, length, finish, num_top in zip(*columns, strict=True):
        here, top = slice(at, at + length), slice(top_at, top_at + length * num_top)
        samples[index] = Sample(
            token_ids=packed["token_ids"][here],
            logprobs=packed["logprobs"][here],
            versions=packed["versions"][here],
            finish=_FINISHES[finish],
            top_ids=packed["top_ids"][top].reshape(length, num_top) if num_top else None,
            top_logprobs=packed["top_logprobs"][top].reshape(length, num_top) if num_top else None,
        )
        at, top_at = here.stop, top.stop
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
