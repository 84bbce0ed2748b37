"""The generative critic's soft value: the grid's mean under the model's own probabilities (docs/ALGORITHM.md §4).

The replies that spell the grid's values share their beginnings. Where the model's next token decides between them is a
branch; one next-token distribution a branch gives the probability of every reply.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

# Below it a reply off the grid is likelier than one on it: what is left says too little to be renormalised.
MIN_GRID_MASS = 0.5


@dataclass(frozen=True, slots=True)
class ReplyTree:
    """The replies of a grid of K values, by the branches that they pass."""

    branches: tuple[tuple[int, ...], ...]  # tokens of a reply before it parts from another, shortest first
    choices: Mapping[float, tuple[tuple[int, int], ...]]  # value -> (branch index, next token) at each branch it passes


@dataclass(frozen=True, slots=True)
class SoftValue:
    value: float  # in [0, 1]; 0 where no reply has any mass
    mass: float  # probability of all the grid's replies together, before they are renormalised

    @property
    def valid(self) -> bool:
        return self.mass >= MIN_GRID_MASS


def reply_tree(replies: Mapping[float, Sequence[int]]) -> ReplyTree:
    """Value -> its reply's token ids, end of turn left out; at least two. Raises `ValueError` where one reply is the
    beginning of another (or equal to it): no next token could tell them apart."""
    ids = {value: tuple(int(token) for token in reply) for value, reply in replies.items()}
    children: dict[tuple[int, ...], set[int]] = {}
    for reply in ids.values():
        for depth, token in enumerate(reply):
            children.setdefault(reply[:depth], set()).add(token)
    for value, reply in ids.items():
        if reply in children or not reply or list(ids.values()).count(reply) > 1:
            raise ValueError(f"the reply of value {value} is the beginning of another value's: token ids {reply}")
    branches = tuple(sorted((path for path, tokens in children.items() if len(tokens) > 1), key=lambda p: (len(p), p)))
    index = {path: number for number, path in enumerate(branches)}
    choices = {
        value: tuple((index[reply[:depth]], token) for depth, token in enumerate(reply) if reply[:depth] in index)
        for value, reply in ids.items()
    }
    return ReplyTree(branches, choices)


def soft_value(tree: ReplyTree, top_ids: Sequence[np.ndarray], top_logprobs: Sequence[np.ndarray]) -> SoftValue:
    """Next-token log-probs at each branch, int[k] and float[k] nats of its k most likely tokens -> sum_z z p(z).

    p(z) is the product of the probabilities at the branches that z passes, renormalised over the grid. Tokens between
    branches count as certain, a token that is not among the k as impossible (their k must hold what matters: at least
    as many as a branch has children, and then some).
    """
    tables = [
        dict(zip(ids.tolist(), np.exp(logprobs.astype(np.float64)).tolist(), strict=True))
        for ids, logprobs in zip(top_ids, top_logprobs, strict=True)
    ]
    if len(tables) != len(tree.branches):
        raise ValueError(f"expected log-probs at {len(tree.branches)} branches, found {len(tables)}")
    weights = {
        value: float(np.prod([tables[branch].get(token, 0.0) for branch, token in path]))
        for value, path in tree.choices.items()
    }
    mass = sum(weights.values())
    mean = sum(value * weight for value, weight in weights.items()) / mass if mass > 0 else 0.0
    return SoftValue(value=min(max(mean, 0.0), 1.0), mass=mass)
