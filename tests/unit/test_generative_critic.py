"""The generative critic's questions and its reading of the replies; its update is in tests/distributed."""

from __future__ import annotations

import numpy as np
import pytest

from megatron_ac2.algorithm import value_prompt
from megatron_ac2.config import Config
from megatron_ac2.training.generative_critic import GenerativeCritic
from megatron_ac2.types import CriticState, Problem, Sample
from tools.prepare_quickstart import train_tokenizer

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


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(["user assistant\n", value_prompt._QUESTION])


def make_critic(tokenizer, sampler, use_references=True, max_context_len=None) -> GenerativeCritic:
    config = Config()
    config.sampling.response_budget = 50
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
