"""Dividing requests over replicas, and samples packed flat for one gather."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest

from megatron_ac2.engine.requests import (
    check_requests,
    divide_requests,
    merge_shares,
    pack_samples,
    to_sample,
    unpack_samples,
)
from megatron_ac2.types import Sample, SampleRequest, UserError


def request(prompt: list[int], new: int, temperature: float = 0.8, **kwargs) -> SampleRequest:
    return SampleRequest(np.array(prompt, dtype=np.int32), new, temperature, 0, **kwargs)


def completion(sampled: list[int], *rows: list[tuple[int, float]], finish: str = "length") -> SimpleNamespace:
    """As vLLM returns one: a row a position, (id, log-prob) of the sampled token and then of the most likely."""
    ids, logprobs = zip(*(pair for row in rows for pair in row), strict=True)
    flat = SimpleNamespace(token_ids=list(ids), logprobs=list(logprobs))
    return SimpleNamespace(token_ids=sampled, logprobs=flat, finish_reason=finish)


def sample(length: int, num_top: int = 0, finish: str = "length", version: int = 3, num_fed: int = 0) -> Sample:
    rng = np.random.default_rng(length)
    return Sample(
        token_ids=rng.integers(0, 99, length).astype(np.int32),
        logprobs=-rng.random(length).astype(np.float32),
        versions=np.full(length, version, dtype=np.int32),
        finish=finish,
        top_ids=rng.integers(0, 99, (length, num_top)).astype(np.int32) if num_top else None,
        top_logprobs=-rng.random((length, num_top)).astype(np.float32) if num_top else None,
        routed_experts=rng.integers(0, 255, (num_fed, 3, 2)).astype(np.uint8) if num_fed else None,
    )


def test_longest_groups_first_to_the_least_loaded():
    # loads: A 3 x 10 = 30, B 20, C 2 x 8 = 16, D 5; fair share 35.5
    requests = [request([1], 10)] * 3 + [request([2], 20)] + [request([3], 8)] * 2 + [request([4], 5)]
    assert divide_requests(requests, 2) == [[0, 1, 2, 6], [3, 4, 5]]


def test_one_prompt_stays_on_one_replica_unless_it_exceeds_the_fair_share():
    interleaved = [request([7 + index % 4, 1], 6) for index in range(16)]
    shares = divide_requests(interleaved, 4)
    assert [{index % 4 for index in share} for share in shares] == [{0}, {1}, {2}, {3}]
    lonely = divide_requests([request([5], 4)] * 8, 2)
    assert [len(share) for share in lonely] == [4, 4]


@pytest.mark.parametrize("num_replicas", [1, 3, 5])
def test_every_request_goes_somewhere_once(num_replicas):
    rng = np.random.default_rng(0)
    requests = [request([int(rng.integers(3))], int(rng.integers(1, 50))) for _ in range(11)]
    shares = divide_requests(requests, num_replicas)
    assert len(shares) == num_replicas
    assert sorted(index for share in shares for index in share) == list(range(11))
    assert divide_requests(requests, num_replicas) == shares


def test_equal_new_tokens_are_balanced_by_prompt_length():
    shares = divide_requests([request([index] * length, 4) for index, length in enumerate((900, 800, 200, 100))], 2)
    assert [sum((900, 800, 200, 100)[index] for index in share) for share in shares] == [1000, 1000]


def test_prompts_that_go_on_for_a_few_tokens_stay_together():
    """Two questions about each of four states: the state's prompt, and two tokens more."""
    states = [[300 + state, 5, 6, 7, 8] for state in range(4)]
    requests = [request(state + tail, 1) for state in states for tail in ([], [1, 2])]
    for order in (np.arange(8), np.random.default_rng(0).permutation(8)):
        shares = divide_requests([requests[index] for index in order], 2)
        assert [len(share) for share in shares] == [4, 4]
        assert all(len({order[index] // 2 for index in share}) == 2 for share in shares)


def test_a_long_continuation_is_a_prompt_of_its_own():
    # 1 + 8 tokens join the bare prompt, 1 + 9 do not; 30 new tokens, fair share 15
    assert divide_requests([request([1], 10), request([1] * 9, 5), request([2], 15)], 2) == [[0, 1], [2]]
    assert divide_requests([request([1], 10), request([1] * 10, 5), request([2], 15)], 2) == [[2], [0, 1]]


def test_no_requests():
    assert divide_requests([], 2) == [[], []]
    assert merge_shares([pack_samples({}), pack_samples({})], 0) == []


def test_pack_and_unpack_are_inverse_with_mixed_top_k():
    samples = {4: sample(3, num_top=2, num_fed=7), 0: sample(5, finish="stop"), 9: sample(1, num_top=4, version=8)}
    samples |= {10: sample(2, num_fed=4)}
    back = unpack_samples(pack_samples(samples))
    assert sorted(back) == [0, 4, 9, 10]
    for index, expected in samples.items():
        assert back[index].finish == expected.finish
        for name in ("token_ids", "logprobs", "versions", "top_ids", "top_logprobs", "routed_experts"):
            found, wanted = getattr(back[index], name), getattr(expected, name)
            assert (found is None) == (wanted is None)
            if wanted is not None:
                np.testing.assert_array_equal(found, wanted)
                assert found.dtype == wanted.dtype


def test_merge_restores_the_order_asked():
    merged = merge_shares([pack_samples({1: sample(2), 2: sample(3)}), pack_samples({0: sample(4)})], 3)
    assert [len(s.token_ids) for s in merged] == [4, 2, 3]


@pytest.mark.parametrize("second", [{}, {0: 4}, {1: 4, 2: 4}])
def test_merge_refuses_a_missing_or_doubled_sample(second):
    packed = pack_samples({index: sample(length) for index, length in second.items()})
    with pytest.raises(RuntimeError, match="asked for 2 samples"):
        merge_shares([pack_samples({0: sample(2)}), packed], 2)


def test_impossible_requests_are_all_named():
    requests = [request([1] * 10, 6), request([1] * 10, 7), request([], 4), request([1], 0), request([1], 1)]
    with pytest.raises(UserError) as caught:
        check_requests(requests, 16, 99)
    assert [problem.split(":")[0] for problem in caught.value.problems] == ["request 1", "request 2", "request 3"]
    assert "10 prompt tokens + max_new_tokens 7 = 17" in caught.value.problems[0]
    with pytest.raises(UserError, match="and 10 more"):
        check_requests([request([1], 99)] * 20, 16, 99)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"top_p": 0.0}, "top_p 0.0; must be in (0, 1]"),
        ({"top_p": 1.01}, "top_p 1.01"),
        ({"top_p": math.nan}, "top_p nan"),
        ({"top_k": -1}, "top_k -1; must be >= 0"),
        ({"num_top_logprobs": -1}, "num_top_logprobs -1"),
        ({"num_top_logprobs": 100}, "num_top_logprobs 100; must be in [0, 99]"),
        ({"temperature": -0.1}, "temperature -0.1"),
        ({"temperature": math.nan}, "temperature nan"),
    ],
)
def test_impossible_sampling_is_named(change, words):
    with pytest.raises(UserError) as caught:
        check_requests([request([1], 1), request([1], 1, **change)], 16, 99)
    (problem,) = caught.value.problems
    assert problem.startswith("request 1: ") and words in problem


def test_the_limits_of_sampling_are_accepted():
    check_requests([request([1], 1, top_p=1e-3, top_k=5, num_top_logprobs=99), request([1], 1, 0.0, top_k=0)], 16, 99)


def test_a_completion_becomes_arrays():
    done = completion([7, 1], [(7, -2.0), (5, -0.5), (6, -1.0)], [(1, -0.1), (1, -0.1), (4, -9.0)], finish="stop")
    found = to_sample(done, request([1], 9, num_top_logprobs=2), version=3)
    assert found.token_ids.tolist() == [7, 1] and found.finish == "stop" and found.versions.tolist() == [3, 3]
    np.testing.assert_allclose(found.logprobs, [-2.0, -0.1], rtol=1e-6)
    assert found.top_ids.tolist() == [[5, 6], [1, 4]]
    np.testing.assert_allclose(found.top_logprobs, [[-0.5, -1.0], [-0.1, -9.0]], rtol=1e-6)


def test_a_sampled_token_that_ties_with_the_last_recorded_one_takes_its_place():
    rows = [(7, -1.0), (5, -0.5), (6, -1.0)], [(5, -0.5), (5, -0.5), (6, -1.0)]
    found = to_sample(completion([7, 5], *rows), request([1], 9, num_top_logprobs=2, top_k=2), 0)
    assert found.top_ids.tolist() == [[5, 7], [5, 6]]
    for free in ({"top_k": 0}, {"top_k": 3}, {"top_k": 2, "temperature": 0.0}):  # there it may be any token
        found = to_sample(completion([7, 5], *rows), request([1], 9, num_top_logprobs=2, **free), 0)
        assert found.top_ids.tolist() == [[5, 6], [5, 6]]


def test_a_completion_that_ended_otherwise_is_an_error():
    with pytest.raises(RuntimeError, match="abort"):
        to_sample(completion([7], [(7, -2.0)], finish="abort"), request([1], 9), 0)
