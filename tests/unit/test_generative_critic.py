"""The generative critic's questions and its reading of the replies; its update is in tests/distributed."""

from __future__ import annotations

import numpy as np
import pytest

from megatron_ac2.algorithm import value_prompt
from megatron_ac2.config import Config
from megatron_ac2.training.generative_critic import GenerativeCritic
from megatron_ac2.types import CriticState, Problem, Sample, UserError
from tools.quickstart_model import train_tokenizer

PROBLEM = Problem("p", np.array([5, 6], dtype=np.int32), "What is 2 + 2?", {})
REFERENCE = np.array([20, 21, 22], dtype=np.int32)


class ScriptedSampler:
    """Replies with the texts given, in order, and keeps what it was asked."""

    version = 0

    def __init__(self, tokenizer, *replies: str):
        self.tokenizer, self.replies, self.requests = tokenizer, replies, None

    def sample(self, requests):
        self.requests = list(requests)
        return [self.reply(text) for _, text in zip(requests, self.replies, strict=True)]

    def reply(self, text: str) -> Sample:
        ids = np.array(self.tokenizer.encode(text, add_special_tokens=False), dtype=np.int32)
        return Sample(ids, np.zeros(len(ids), np.float32), np.zeros(len(ids), np.int32), "length")


class TableSampler:
    """Gives each prompt's next-token probabilities, by token text, from the end of the prompt's text."""

    version = 0

    def __init__(self, tokenizer, tables: dict[str, dict[str, float]]):
        self.tokenizer, self.tables, self.calls = tokenizer, tables, []

    def sample(self, requests):
        self.calls.append(list(requests))
        return [self.reply(self.tokenizer.decode(request.prompt_ids), request) for request in requests]

    def reply(self, prompt: str, request) -> Sample:
        table = next(table for end, table in self.tables.items() if prompt.endswith(end))
        ids = [self.tokenizer.encode(text, add_special_tokens=False)[0] for text in table]
        free = [token for token in range(999) if token not in ids]
        top_ids = np.array([(ids + free)[: request.num_top_logprobs]], dtype=np.int32)
        top_logprobs = np.full(top_ids.shape, -np.inf, dtype=np.float32)
        top_logprobs[0, : len(ids)] = np.log(list(table.values()))
        one = np.zeros(1, dtype=np.int32)
        return Sample(one, np.zeros(1, np.float32), one, "length", top_ids, top_logprobs)


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(["user assistant\n", value_prompt._QUESTION])


def make_critic(tokenizer, sampler, use_references=True, max_context_len=None, value="greedy") -> GenerativeCritic:
    config = Config()
    config.sampling.response_budget = 50
    config.critic.value = value
    config.critic.use_references, config.critic.max_context_len = use_references, max_context_len
    return GenerativeCritic(
        None, None, sampler, tokenizer, None, config, len(tokenizer), model_max_len=2000, align=1
    )  # no model: score asks the sampler alone


def state(response_len: int, reference=None) -> CriticState:
    return CriticState(PROBLEM, np.full(response_len, 40, dtype=np.int32), reference)


def test_replies_on_the_grid_are_values_and_others_invalid(tokenizer):
    sampler = ScriptedSampler(tokenizer, "0.7<|im_end|>", "0.55", "no idea", "1.0<|im_end|>")
    values = make_critic(tokenizer, sampler).score([state(n) for n in range(4)])
    assert values.valid.tolist() == [True, False, False, True]
    np.testing.assert_allclose(values.value, [0.7, 0, 0, 1], atol=1e-6)
    assert values.value.dtype == np.float32


def test_the_engine_is_asked_greedily_for_a_few_tokens(tokenizer):
    sampler = ScriptedSampler(tokenizer, "0.1")
    make_critic(tokenizer, sampler).score([state(8)])
    (request,) = sampler.requests
    assert request.temperature == 0 and request.max_new_tokens == 4
    expected = value_prompt.build_value_prompt(tokenizer, PROBLEM.question, state(8).response_ids, 42)
    assert request.prompt_ids.tolist() == expected.tolist()


@pytest.mark.parametrize("use_references", [True, False])
def test_a_reference_is_shown_only_if_references_are_used(tokenizer, use_references):
    sampler = ScriptedSampler(tokenizer, "0.1")
    make_critic(tokenizer, sampler, use_references).score([state(3, REFERENCE)])
    text = tokenizer.decode(sampler.requests[0].prompt_ids)
    assert ("<reference>" in text) == use_references


def test_too_long_prompts_are_invalid_and_not_asked(tokenizer):
    critic = make_critic(tokenizer, ScriptedSampler(tokenizer, "0.3"))
    limit = len(critic.prompt_ids(state(2))) + 4
    sampler = ScriptedSampler(tokenizer, "0.3")
    values = make_critic(tokenizer, sampler, max_context_len=limit).score([state(9), state(2)])
    assert len(sampler.requests) == 1
    assert values.valid.tolist() == [False, True] and values.value[0] == 0


def test_nothing_to_ask(tokenizer):
    sampler = ScriptedSampler(tokenizer)
    values = make_critic(tokenizer, sampler).score([])
    assert sampler.requests is None and values.value.shape == values.valid.shape == (0,)


def test_the_soft_value_is_asked_in_one_call_with_a_token_a_branch(tokenizer):
    sampler = TableSampler(tokenizer, {": ": {"0": 0.75, "1": 0.25}, ": 0.": {"2": 0.5, "6": 0.5}})
    critic = make_critic(tokenizer, sampler, value="soft")
    values = critic.score([state(2), state(3)])
    np.testing.assert_allclose(values.value, [0.55, 0.55], atol=1e-6)  # 0.25 * 1 + 0.75 * 0.4
    assert values.valid.all() and values.value.dtype == np.float32
    (requests,) = sampler.calls
    tail = tokenizer.encode("0.", add_special_tokens=False)
    expected = [[*critic.prompt_ids(state(n)), *path] for n in (2, 3) for path in ([], tail)]
    assert [request.prompt_ids.tolist() for request in requests] == expected
    assert {(r.max_new_tokens, r.temperature, r.top_p, r.top_k) for r in requests} == {(1, 1.0, 1.0, 0)}
    assert all(request.num_top_logprobs >= 20 for request in requests)


@pytest.mark.parametrize("value", value_prompt.GRID)
def test_soft_equals_greedy_where_the_model_is_certain(tokenizer, value):
    first, _, last = f"{value:.1f}"
    sampler = TableSampler(tokenizer, {": ": {first: 1.0}, ": 0.": {last: 1.0}})
    soft = make_critic(tokenizer, sampler, value="soft").score([state(2)])
    greedy = make_critic(tokenizer, ScriptedSampler(tokenizer, f"{value:.1f}")).score([state(2)])
    np.testing.assert_allclose(soft.value, greedy.value, atol=1e-7)
    assert soft.valid.all() and greedy.valid.all()


def test_half_and_half_is_the_mean_and_off_the_grid_is_invalid(tokenizer):
    tables = {": ": {"0": 1.0}, ": 0.": {"2": 0.5, "6": 0.5}}
    values = make_critic(tokenizer, TableSampler(tokenizer, tables), value="soft").score([state(2)])
    np.testing.assert_allclose(values.value, [0.4], atol=1e-6)
    tables[": "] = {"0": 0.4, "n": 0.6}
    values = make_critic(tokenizer, TableSampler(tokenizer, tables), value="soft").score([state(2)])
    assert values.value.tolist() == [0.0] and values.valid.tolist() == [False]


def test_soft_too_long_prompts_are_invalid_and_not_asked(tokenizer):
    tables = {": ": {"0": 1.0}, ": 0.": {"3": 1.0}}
    limit = len(make_critic(tokenizer, None).prompt_ids(state(2))) + 3  # two tokens of a path, and one to ask for
    sampler = TableSampler(tokenizer, tables)
    values = make_critic(tokenizer, sampler, max_context_len=limit, value="soft").score([state(3), state(2)])
    assert values.valid.tolist() == [False, True] and len(sampler.calls[0]) == 2
    np.testing.assert_allclose(values.value, [0, 0.3], atol=1e-6)


def test_an_unknown_value_is_refused(tokenizer):
    with pytest.raises(UserError, match="critic.value: found 'mean', accepted: greedy, soft"):
        make_critic(tokenizer, None, value="mean")
