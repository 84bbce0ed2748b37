"""Dividing requests over replicas, and samples packed flat for one gather."""

from __future__ import annotations

import numpy as np
import pytest

from megatron_ac2.engine.requests import check_requests, divide_requests, merge_shares, pack_samples, unpack_samples
from megatron_ac2.types import Sample, SampleRequest, UserError


def request(prompt: list[int], new: int, **kwargs) -> SampleRequest:
    return SampleRequest(np.array(prompt, dtype=np.int32), new, 0.8, 0, **kwargs)


def sample(length: int, num_top: int = 0, finish: str = "length", version: int = 3) -> Sample:
    rng = np.random.default_rng(length)
    return Sample(
        token_ids=rng.integers(0, 99, length).astype(np.int32),
        logprobs=-rng.random(length).astype(np.float32),
        versions=np.full(length, version, dtype=np.int32),
        finish=finish,
        top_ids=rng.integers(0, 99, (length, num_top)).astype(np.int32) if num_top else None,
        top_logprobs=-rng.random((length, num_top)).astype(np.float32) if num_top else None,
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


def test_no_requests():
    assert divide_requests([], 2) == [[], []]
    assert merge_shares([pack_samples({}), pack_samples({})], 0) == []


def test_pack_and_unpack_are_inverse_with_mixed_top_k():
    samples = {4: sample(3, num_top=2), 0: sample(5, finish="stop"), 9: sample(1, num_top=4, version=8)}
    back = unpack_samples(pack_samples(samples))
    assert sorted(back) == [0, 4, 9]
    for index, expected in samples.items():
        assert back[index].finish == expected.finish
        for name in ("token_ids", "logprobs", "versions", "top_ids", "top_logprobs"):
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
        check_requests(requests, 16)
    assert [problem.split(":")[0] for problem in caught.value.problems] == ["request 1", "request 2", "request 3"]
    assert "10 prompt tokens + max_new_tokens 7 = 17" in caught.value.problems[0]
    with pytest.raises(UserError, match="and 10 more"):
        check_requests([request([1], 99)] * 20, 16)
