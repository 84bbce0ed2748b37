"""The data that flows through a step, and the small protocols between the parts.

Token data on the host is numpy (cheap to pickle, gather and checkpoint); tensors appear only in `PackedBatch`, which
the Megatron step consumes. B prefixes, G chunks a group, N new, P prompt, S prefix, T packed tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
import torch

Mode = Literal["chunk", "full", "audit"]
Stop = Literal["chunk_end", "eos", "budget"]
TargetTag = Literal["terminal", "mixed", "bootstrapped"]

EMPTY_IDS = np.zeros(0, dtype=np.int32)


class UserError(Exception):
    """A mistake in what the user gave us (config, file, checkpoint): the entry points print it without a traceback.

    `problems` lists every one found, each naming the field or file, what was found and what is accepted.
    """

    def __init__(self, problems: str | Sequence[str]):
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        super().__init__("\n".join(self.problems))


@dataclass(frozen=True, slots=True)
class Problem:
    """One row of a problem set, tokenised. `grading` is what the grader needs (see grading/rules.py)."""

    problem_id: str
    prompt_ids: np.ndarray  # int32[P], chat-templated, generation prompt included
    question: str
    grading: Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Trajectory:
    """A complete response, right or wrong, as sampled: ids only, never text."""

    problem_id: str
    response_ids: np.ndarray  # int32[L]
    reward: float
    version: int  # of the weights that sampled it


@dataclass(frozen=True, slots=True)
class Prefix:
    """The replayed state that a group of chunks continues. An empty `response_ids` is the bare problem."""

    problem_id: str
    response_ids: np.ndarray  # int32[S]
    replayed: bool  # False: a fresh problem used while the replay buffer is empty; kept out of the critic's books


@dataclass(frozen=True, slots=True)
class Continuation:
    """How one prefix is continued: `group_size` samples of at most `max_new_tokens`."""

    prefix: Prefix
    mode: Mode
    group_size: int
    max_new_tokens: int


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """One request to the engine. Token ids in, one sample out."""

    prompt_ids: np.ndarray  # int32[P + S]
    max_new_tokens: int
    temperature: float
    seed: int
    num_top_logprobs: int = 0  # also return the k most likely tokens' log-probs at each position
    top_p: float = 1.0
    top_k: int = 0  # sample among the k most likely tokens; 0: the whole vocabulary
    record_experts: bool = False  # also return which experts the engine's routers chose


@dataclass(frozen=True, slots=True)
class Sample:
    """What the engine returns. `token_ids` holds the end-of-sequence token when `finish` is "stop"."""

    token_ids: np.ndarray  # int32[N]
    logprobs: np.ndarray  # float32[N], at the sampling temperature, over what top_p and top_k left
    versions: np.ndarray  # int32[N], of the weights that sampled each token
    finish: Literal["stop", "length"]
    top_ids: np.ndarray | None = None  # int32[N, k]
    top_logprobs: np.ndarray | None = None  # float32[N, k]; -inf outside of what top_p and top_k left
    routed_experts: np.ndarray | None = None  # uint8 or uint16[P + S + N - 1, layers, k]: the last was never fed


@dataclass(frozen=True, slots=True)
class Chunk:
    """The generated tokens of one continuation: the action."""

    token_ids: np.ndarray  # int32[N]
    behavior_logprobs: np.ndarray  # float32[N]
    versions: np.ndarray  # int32[N]
    stop: Stop  # "chunk_end" bootstraps from the critic; "eos" and "budget" are graded
    top_ids: np.ndarray | None = None  # int32[N, k], the sampler's k most likely tokens, where they were asked for
    top_logprobs: np.ndarray | None = None  # float32[N, k]
    routed_experts: np.ndarray | None = None  # [P + S + N - 1, layers, k], the sample's


@dataclass(frozen=True, slots=True)
class ChunkGroup:
    continuation: Continuation
    chunks: tuple[Chunk, ...]  # [G]
    num_context: int  # P + S


@dataclass(frozen=True, slots=True)
class Grade:
    """A grader's verdict. `valid` is False when the grader itself failed (not when the answer is wrong)."""

    reward: float
    valid: bool = True


@dataclass(frozen=True, slots=True)
class CriticState:
    """A state to be valued: problem, response so far, and (privileged) a reference solution of the problem."""

    problem: Problem
    response_ids: np.ndarray  # int32[S]
    reference_ids: np.ndarray | None  # int32[R]


@dataclass(frozen=True, slots=True)
class CriticExample:
    """One term of the critic's loss: the state, its target value in [0, 1], and its weight."""

    state: CriticState
    value: float
    weight: float


@dataclass(frozen=True, slots=True)
class DenseExample:
    """Values along one response: row i of `targets` belongs to the state after the first `positions[i]` tokens of it.

    A row holds one target, or N of which the weights choose: the losses of a row are averaged, not its targets.
    """

    state: CriticState
    positions: np.ndarray  # int[k], distinct, in [0, S]
    targets: np.ndarray  # float32[k] or float32[k, N], in [0, 1]
    weight: float = 1.0  # of each of the k labels
    mask: np.ndarray | None = None  # bool[k, N]: which targets of a row exist, at least one; None: all
    old_values: np.ndarray | None = None  # float32[k], V before this step's updates, for the clipped loss


@dataclass(frozen=True, slots=True)
class CriticTarget:
    """An entry of the critic-target buffer (docs/ALGORITHM.md §2)."""

    problem_id: str
    response_ids: np.ndarray  # int32[S], the prefix
    value: float  # on the grid {0, .1, ..., 1}
    tag: TargetTag
    version: int  # of the weights that produced the endpoint values


@dataclass(frozen=True, slots=True)
class Values:
    """A critic's answers, in the order of the states asked."""

    value: np.ndarray  # float32[N]
    valid: np.ndarray  # bool[N]


@dataclass(frozen=True, slots=True)
class TrainSequence:
    """One sequence of the actor's loss: prompt + prefix is context, the chunk's tokens carry `advantages`."""

    token_ids: np.ndarray  # int32[P + S + N]
    num_context: int  # P + S; tokens before it get no loss
    behavior_logprobs: np.ndarray  # float32[N]
    advantages: np.ndarray  # float32[N]; equal within a chunk unless the estimator works by token
    weight: float  # 0 takes the sequence out of the loss (invalid critic value)
    empty_prefix: bool  # entropy control looks at these only
    top_ids: np.ndarray | None = None  # int32[N, k]
    top_logprobs: np.ndarray | None = None  # float32[N, k]
    routed_experts: np.ndarray | None = None  # [at most P + S + N, layers, k]: of the first tokens, context included


@dataclass(slots=True)
class PackedBatch:
    """One microbatch: sequences laid end to end (the "thd" layout), padded at the end to an aligned length.

    Each sequence may have padding of its own behind it, which is counted to it. `context` > 1: per-token tensors are
    one context-parallel rank's T / context positions (parallel/context.py); `cu_seqlens`, `max_seq_len` the whole's.

    `labels[t]` is the token after position t inside the same sequence; `fields` sit at the position whose logits
    predict it. `loss_mask` is zero on context, padding and each sequence's last position.
    """

    token_ids: torch.Tensor  # int64[1, T]
    position_ids: torch.Tensor  # int64[1, T], restarts at every sequence
    labels: torch.Tensor  # int64[1, T]
    loss_mask: torch.Tensor  # float32[1, T]
    cu_seqlens: torch.Tensor  # int32[num_sequences + 1], padding counted as one more sequence
    max_seq_len: int
    # [1, T] or [1, T, k] each: behavior_logprobs, proximal_logprobs, advantages, targets, top_ids, ...
    fields: dict[str, torch.Tensor]
    context: int = 1
    routed_experts: torch.Tensor | None = None  # int16[1, T, layers, k], each token's at its own position


class Sampler(Protocol):
    """A collective: every rank passes the same requests and gets every result, in order."""

    version: int

    def sample(self, requests: Sequence[SampleRequest]) -> list[Sample]: ...


class Grader(Protocol):
    def grade(self, items: Sequence[tuple[Problem, str]]) -> list[Grade]:
        """One grade for each (problem, response text)."""
        ...


class Critic(Protocol):
    """All that the loop knows of a critic. Both calls are collectives over the whole job, with equal arguments."""

    def score(self, states: Sequence[CriticState]) -> Values: ...

    def update(self, examples: Sequence[CriticExample]) -> dict[str, float]: ...


class TokenCritic(Critic, Protocol):
    """A critic with a value at every token of a response: what gae, brace, rfpo and N-step targets need."""

    def score_paths(
        self, states: Sequence[CriticState], positions: Sequence[np.ndarray], frozen: bool = False
    ) -> list[np.ndarray | None]:
        """V after the first `positions[i]` response tokens of state i, float32 each; None where it is too long.

        `frozen`: by the snapshot, which `refresh_snapshot` renews.
        """
        ...

    def update_dense(self, examples: Sequence[DenseExample]) -> dict[str, float]: ...
