from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from megatron_ac2.config import Config
from megatron_ac2.rollout import Decoding, audit_states, context_ids, response_of, sample_step, stop_reason
from megatron_ac2.types import Sample
from tests.unit.loop_parts import (
    BUDGET,
    CHUNK_LEN,
    DECODING,
    EOS,
    PROBLEMS,
    ScriptedSampler,
    continuation,
    ids,
    prefix,
    roll,
    text_of,
)


def sample(num_tokens: int, finish: str) -> Sample:
    empty = np.zeros(num_tokens, dtype=np.float32)
    return Sample(np.ones(num_tokens, dtype=np.int32), empty, empty.astype(np.int32), finish)


@pytest.mark.parametrize(
    ("prefix_len", "mode", "num_tokens", "finish", "expected"),
    [
        (4, "chunk", CHUNK_LEN, "length", "chunk_end"),
        (4, "chunk", CHUNK_LEN, "stop", "eos"),  # an end on the chunk's very last token
        (4, "chunk", 1, "stop", "eos"),
        (BUDGET - CHUNK_LEN, "chunk", CHUNK_LEN, "length", "budget"),  # the budget ends with the chunk
        (BUDGET - 2, "chunk", 2, "length", "budget"),
        (BUDGET - 2, "chunk", 2, "stop", "eos"),
        (0, "full", BUDGET, "length", "budget"),
        (4, "audit", BUDGET - 4, "length", "budget"),
    ],
)
def test_stop_reason(prefix_len: int, mode: str, num_tokens: int, finish: str, expected: str) -> None:
    where = continuation(prefix("a", "x" * prefix_len), mode)
    assert stop_reason(sample(num_tokens, finish), where, BUDGET) == expected


@pytest.mark.parametrize("mode", ["full", "audit"])
def test_a_full_rollout_that_the_engine_cut_is_an_error(mode: str) -> None:
    with pytest.raises(RuntimeError, match=f"cut a {mode} rollout at 11 of {BUDGET}"):
        stop_reason(sample(7, "length"), continuation(prefix("a", "xxxx"), mode), BUDGET)


def test_one_call_asks_for_fresh_rollouts_and_groups_in_order() -> None:
    sampler = ScriptedSampler(["f$", "g$", "1$", "2$", "abcde", "fghij"])
    plan = [continuation(prefix("c", "xx"), "full"), continuation(prefix("d", "yy"), "chunk")]
    rollout = sample_step(sampler, PROBLEMS, [PROBLEMS["a"], PROBLEMS["b"]], plan, DECODING, seed=0, step=3)
    asked = [(text_of(request.prompt_ids), request.max_new_tokens) for request in sampler.requests]
    assert asked == [("a?", 20), ("b?", 20), ("c?xx", 18), ("c?xx", 18), ("d?yy", 5), ("d?yy", 5)]
    assert {request.temperature for request in sampler.requests} == {0.8}
    assert [(problem.problem_id, text_of(found.token_ids)) for problem, found in rollout.fresh] == [
        ("a", "f"), ("b", "g")
    ]  # fmt: skip
    texts = [[text_of(chunk.token_ids) for chunk in group.chunks] for group in rollout.groups]
    assert texts == [["1", "2"], ["abcde", "fghij"]]
    assert [group.num_context for group in rollout.groups] == [4, 4]
    first = rollout.groups[0].chunks[0]
    assert first.token_ids.tolist() == [ord("1"), EOS] and first.behavior_logprobs.tolist() == [-1, -2]
    assert first.versions.tolist() == [3, 3]


def test_every_request_has_a_seed_of_its_own_at_every_step() -> None:
    def seeds(step: int, seed: int = 0) -> list[int]:
        sampler = ScriptedSampler(["f$"] * 2 + ["1$"] * 4)
        plan = [continuation(prefix(name), "full") for name in "cd"]
        fresh = [PROBLEMS["a"], PROBLEMS["b"]]
        sample_step(sampler, PROBLEMS, fresh, plan, DECODING, seed=seed, step=step)
        return [request.seed for request in sampler.requests]

    assert seeds(3) == seeds(3)
    drawn = seeds(3) + seeds(4) + seeds(3, seed=1)
    assert len(set(drawn)) == len(drawn) == 18


def test_the_policys_context_and_a_chunks_whole_response() -> None:
    assert text_of(context_ids(PROBLEMS["a"], ids("xy"))) == "a?xy"
    assert context_ids(PROBLEMS["a"], ids("")).dtype == np.int32
    group = roll([continuation(prefix("a", "xy"), "full")], ["1$", "0$"]).groups[0]
    assert text_of(response_of(group, group.chunks[0])) == "xy1"


def test_audits_are_read_where_a_chunk_would_have_ended() -> None:
    plan = [continuation(prefix(name, "x"), mode) for name, mode in zip("abcd", ("audit", "full", "audit", "audit"))]
    texts = ["abcd$", "ab$"] + ["abcdefgh$"] * 2 + ["ab$", "vwxyz1$"] + ["abcdef$", "uvwxyz$"]
    found = audit_states(roll(plan, texts).groups, CHUNK_LEN)
    # a: "abcd" and its end are exactly a chunk long, hence never an open end; b is no audit.
    assert [(member, text_of(response)) for member, response in found] == [((2, 1), "xvwxyz"), ((3, 0), "xabcde")]


def test_experts_are_asked_of_chunks_alone_and_kept() -> None:
    """Nothing trains on a fresh rollout."""
    sampler = ScriptedSampler(["f$", "1$", "2$"])
    decoding = replace(DECODING, record_experts=True)
    plan = [continuation(prefix("c"), "full")]
    rollout = sample_step(sampler, PROBLEMS, [PROBLEMS["a"]], plan, decoding, seed=0, step=0)
    assert [request.record_experts for request in sampler.requests] == [False, True, True]
    assert rollout.groups[0].chunks[0].routed_experts is None  # where the sampler gives none
    config = Config()
    assert not Decoding.of(config, 100).record_experts
    config.actor.router_replay = True
    assert Decoding.of(config, 100).record_experts


def test_what_is_recorded_a_position_covers_the_loss_and_the_filter() -> None:
    """The filter's own k and 16 that may tie with the last of them, no more than the vocabulary has."""
    config = Config()
    assert Decoding.of(config, 100).num_top_logprobs == 0
    config.sampling.top_k, config.sampling.top_p = 20, 0.9
    decoding = Decoding.of(config, 100)
    assert (decoding.top_p, decoding.top_k, decoding.num_top_logprobs) == (0.9, 20, 36)
    config.actor.score_centering.enabled, config.actor.score_centering.top_k = True, 64
    assert Decoding.of(config, 100).num_top_logprobs == 64 and Decoding.of(config, 50).num_top_logprobs == 50
    sampler = ScriptedSampler(["f$", "1$", "2$"])
    sample_step(sampler, PROBLEMS, [PROBLEMS["a"]], [continuation(prefix("b"), "full")], decoding, seed=0, step=0)
    assert [request.num_top_logprobs for request in sampler.requests] == [0, 36, 36]
    assert {(request.top_p, request.top_k) for request in sampler.requests} == {(0.9, 20)}
