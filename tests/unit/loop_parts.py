"""What the tests of the loop's host logic share: a vocabulary of characters, and stand-ins for engine, grader, critic.

The stand-ins only record and answer; every rule of a step under test runs for real. Token ids are character codes, and
`EOS` ends a response, so that a response's text is plain to see.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from megatron_ac2.algorithm.references import ReferenceBank
from megatron_ac2.config import Config
from megatron_ac2.credit import Credit, assign_credit
from megatron_ac2.rollout import Decoding, Rollout, sample_step
from megatron_ac2.types import (
    Continuation,
    CriticState,
    Grade,
    Mode,
    Prefix,
    Problem,
    Sample,
    SampleRequest,
    Values,
)

EOS = 0
BUDGET, CHUNK_LEN = 20, 5
DECODING = Decoding(response_budget=BUDGET, temperature=0.8)


def ids(text: str) -> np.ndarray:
    return np.array([ord(letter) for letter in text], dtype=np.int32)


def text_of(token_ids: np.ndarray) -> str:
    return "".join(chr(token) for token in token_ids if token != EOS)


PROBLEMS = {name: Problem(name, ids(name + "?"), name + "?", {"answer": "1"}) for name in "abcd"}


def prefix(name: str, response: str = "", replayed: bool = True) -> Prefix:
    return Prefix(name, ids(response), replayed)


def continuation(where: Prefix, mode: Mode, group_size: int = 2) -> Continuation:
    left = BUDGET - len(where.response_ids)
    return Continuation(where, mode, group_size, min(CHUNK_LEN, left) if mode == "chunk" else left)


@dataclass
class ScriptedSampler:
    """Answers each request with the next text; one that ends in "$" ended by itself, others were cut by length."""

    texts: list[str]
    version: int = 3
    requests: list[SampleRequest] = field(default_factory=list)

    def sample(self, requests: Sequence[SampleRequest]) -> list[Sample]:
        self.requests = list(requests)
        assert len(self.requests) == len(self.texts)
        return [self._sample(text) for text in self.texts]

    def _sample(self, text: str) -> Sample:
        finished = text.endswith("$")
        token_ids = np.append(ids(text[:-1]), EOS).astype(np.int32) if finished else ids(text)
        logprobs = -np.arange(1, len(token_ids) + 1, dtype=np.float32)
        versions = np.full(len(token_ids), self.version, dtype=np.int32)
        return Sample(token_ids, logprobs, versions, "stop" if finished else "length")


@dataclass
class RecordingGrader:
    """Grades all responses with one function of the text; keeps (problem, text) in the order asked."""

    rule: Callable[[str], Grade] = lambda text: Grade(float("1" in text))
    asked: list[tuple[str, str]] = field(default_factory=list)

    def __call__(self, items: Sequence[tuple[Problem, np.ndarray]]) -> list[Grade]:
        self.asked += [(problem.problem_id, text_of(response)) for problem, response in items]
        return [self.rule(text_of(response)) for _, response in items]


@dataclass
class RecordingCritic:
    """Values every state by one function of its response text (None: unreadable); keeps the states asked."""

    rule: Callable[[str], float | None] = lambda text: 0.5
    states: list[CriticState] = field(default_factory=list)

    def score(self, states: Sequence[CriticState]) -> Values:
        self.states = list(states)
        answers = [self.rule(text_of(state.response_ids)) for state in states]
        value = np.array([0.0 if answer is None else answer for answer in answers], dtype=np.float32)
        return Values(value, np.array([answer is not None for answer in answers], dtype=bool))

    @property
    def asked(self) -> list[tuple[str, str]]:
        return [(state.problem.problem_id, text_of(state.response_ids)) for state in self.states]


def roll(continuations: Sequence[Continuation], texts: list[str], fresh: str = "") -> Rollout:
    """The texts of the fresh problems come first, then those of each group's members."""
    fresh_problems = [PROBLEMS[name] for name in fresh]
    return sample_step(ScriptedSampler(texts), PROBLEMS, fresh_problems, continuations, DECODING, seed=0, step=3)


def config_of(min_valid: int = 1, **estimator: object) -> Config:
    config = Config()
    config.sampling.response_budget, config.sampling.chunk_len = BUDGET, CHUNK_LEN
    config.replay.min_valid_for_target = min_valid
    for name, value in estimator.items():
        setattr(config.estimator, name, value)
    return config


def credit_of(
    rollout: Rollout,
    critic: RecordingCritic | None = None,
    grader: RecordingGrader | None = None,
    references: ReferenceBank | None = None,
    min_valid: int = 1,
    config: Config | None = None,
) -> Credit:
    return assign_credit(
        rollout, PROBLEMS, references or ReferenceBank(), critic, grader or RecordingGrader(), text_of,
        config or config_of(min_valid), version=3,
    )  # fmt: skip
