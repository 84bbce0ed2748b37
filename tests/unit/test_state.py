"""What a checkpoint and the run that loads it must have in common: every change is named, and nothing else is."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from types import SimpleNamespace

import numpy as np
import pytest

from megatron_ac2.config import Config
from megatron_ac2.config_training import ParallelConfig
from megatron_ac2.state import identity
from megatron_ac2.types import Problem

PROBLEMS = [Problem(name, np.array([1, 2]), f"How much is {name}?", {"answer": "3"}) for name in "abc"]
HF = {"model_type": "qwen3", "hidden_size": 64, "num_hidden_layers": 4, "rms_norm_eps": 1e-6,
      "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}  # fmt: skip


@dataclass
class Tokenizer:
    """The part of a tokenizer that is compared."""

    chat_template: str = "{{ messages }}"
    vocabulary: dict[str, int] = field(default_factory=lambda: {"a": 0, "b": 1})
    eos_token_id: int = 1
    step: int = 1  # characters a token

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return [ord(letter) % 2 for letter in text[:: self.step]]

    def get_vocab(self) -> dict[str, int]:
        return self.vocabulary

    def __len__(self) -> int:
        return len(self.vocabulary)


def made(
    kind: str = "generative", head: str = "bce", tokenizer: Tokenizer | None = None, wording: str = "w",
    problems: list[Problem] = PROBLEMS, critic: dict | None = None, seed: int = 0, reference: str = "none",
    **architecture: object,
) -> dict[str, str]:  # fmt: skip
    config = Config()
    config.critic.kind, config.critic.head, config.run.seed = kind, head, seed
    critic_hf = None if critic is None else SimpleNamespace(**critic)
    return identity(
        config,
        SimpleNamespace(**(HF | architecture)),
        tokenizer or Tokenizer(),
        wording,
        problems,
        critic_hf,
        reference,
    )


def other_tokens(problem: Problem) -> Problem:
    return replace(problem, prompt_ids=np.array([7, 8, 9]))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({}, set()),
        ({"problems": [*map(other_tokens, PROBLEMS)]}, set()),  # the tokenizer's doing, which it names
        ({"problems": PROBLEMS[:2]}, {"data.train"}),
        ({"problems": PROBLEMS[::-1]}, {"data.train"}),
        ({"problems": [*PROBLEMS[:2], replace(PROBLEMS[2], grading={"answer": "4"})]}, {"data.train"}),
        ({"problems": [*PROBLEMS[:2], replace(PROBLEMS[2], question="?")]}, {"data.train"}),
        ({"tokenizer": Tokenizer(vocabulary={"a": 1, "b": 0})}, {"tokenizer"}),
        ({"tokenizer": Tokenizer(step=2)}, {"tokenizer"}),  # other merges of the same vocabulary
        ({"tokenizer": Tokenizer(eos_token_id=0)}, {"tokenizer"}),
        ({"tokenizer": Tokenizer(chat_template="")}, {"chat_template"}),
        ({"wording": "other"}, {"value_prompt"}),
        ({"seed": 1}, {"run.seed"}),
        ({"reference": "8 bytes, ab12"}, {"actor.reference_kl.path"}),
        ({"num_hidden_layers": 5}, {"model"}),
        ({"rope_parameters": {"rope_theta": 1e6}}, {"model"}),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0}}, {"model"}),
        ({"num_experts": 8}, {"model"}),
        ({"kind": "value_head"}, {"critic.kind", "critic.head"}),
        ({"kind": "value_head", "critic": HF}, {"critic.kind", "critic.head", "critic.model"}),
        ({"kind": "value_head", "problems": PROBLEMS[:1], "wording": "x"},
         {"critic.kind", "critic.head", "data.train", "value_prompt"}),
    ],
)  # fmt: skip
def test_every_change_is_named_and_nothing_else(changes: dict, named: set[str]) -> None:
    old, new = made(), made(**changes)
    assert old.keys() == new.keys()
    assert {key for key in old if old[key] != new[key]} == named


def test_critics_with_a_model_of_their_own_differ_by_it_and_by_their_head() -> None:
    old = made("value_head", critic=HF)
    assert made("value_head", critic=HF | {"hidden_size": 32})["critic.model"] != old["critic.model"]
    assert made("value_head", "two_hot", critic=HF)["critic.head"] == "two_hot" != old["critic.head"]


def test_the_layout_is_no_part_of_it() -> None:
    """A run may go on in another layout, of the actor or of the critic alone, with or without offload."""
    config, tokenizer = Config(), Tokenizer()
    config.critic.kind = "value_head"
    other = replace(config, parallel=ParallelConfig(tensor=2, sequence=True))
    other.critic = replace(config.critic, parallel=ParallelConfig(pipeline=2))
    other.run = replace(config.run, offload="all")
    hf = SimpleNamespace(**HF)
    assert identity(config, hf, tokenizer, "w", PROBLEMS, hf) == identity(other, hf, tokenizer, "w", PROBLEMS, hf)


def test_values_say_what_they_stand_for() -> None:
    found = made()
    assert (
        found["model"]
        == "model_type=qwen3, hidden_size=64, num_hidden_layers=4, rms_norm_eps=1e-06, rope_theta=10000.0"
    )
    assert found["data.train"].startswith("3 problems, ") and found["tokenizer"].startswith("2 tokens, ")
    assert found["critic.model"] == "none" and found["critic.head"] == "none"
