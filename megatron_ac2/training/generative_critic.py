"""The generative critic: the actor's own weights, asked for a value through the engine, trained on value tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch

from megatron_ac2.algorithm.soft_value import ReplyTree, reply_tree, soft_value
from megatron_ac2.algorithm.value_prompt import build_value_prompt, grid_replies, parse_value, value_ids
from megatron_ac2.config import Config
from megatron_ac2.data.packing import longest, pack
from megatron_ac2.parallel.context import length_multiple
from megatron_ac2.parallel.topology import Topology
from megatron_ac2.training import step
from megatron_ac2.training.context_parallel import held_part
from megatron_ac2.training.token_head import TokenHead, loss_rows, negative_log_likelihood
from megatron_ac2.types import CriticExample, CriticState, PackedBatch, Sampler, SampleRequest, UserError, Values

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_LOSS_DIVISOR = 4.0  # the paper's; a reply is at most four tokens: digit, point, digit, end of turn
_NUM_TOP_LOGPROBS = 32  # a branch of the grid's replies has at most eleven children, some of them unlikely


@dataclass(frozen=True, slots=True)
class _Pair:
    """A value prompt and its right reply."""

    token_ids: np.ndarray  # int32[prompt + reply]
    prompt_len: int
    weight: float  # mean one over the update


class GenerativeCritic:
    """Implements `types.Critic`. Prompts over the context limit are invalid in `score` and skipped in `update`.

    `model` is the actor's DDP; `optimizer` steps the same weights with moments of its own. `model_max_len` limits
    prompt and reply together where config.critic.max_context_len is null.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: step.Optimizer,
        sampler: Sampler,
        tokenizer: PreTrainedTokenizerBase,
        topology: Topology,
        config: Config,
        vocab_size: int,
        *,
        model_max_len: int,
        pad_id: int = 0,
        align: int | None = None,
    ):
        self.model = model
        self.optimizer = optimizer
        self.sampler = sampler
        self.tokenizer = tokenizer
        self.topology = topology
        self.config = config.critic
        self.response_budget = config.sampling.response_budget
        self.vocab_size = vocab_size
        self.loss_op = config.actor.loss_op
        self.max_context_len = self.config.max_context_len or model_max_len
        self.pad_id = pad_id
        self.align = align or step.token_alignment(topology, config.fp8)
        self.tree = _tree(self.config.value, tokenizer)

    def score(self, states: Sequence[CriticState]) -> Values:
        """`critic.value` greedy: the reply decoded greedily; invalid, with value 0, if it begins with no grid number.

        soft: the mean over the grid under the model's probabilities; invalid where the grid has less than
        `soft_value.MIN_GRID_MASS` of them. Either way one call of the sampler for all states. A collective.
        """
        prompts = [self.prompt_ids(state) for state in states]
        asked = [i for i, ids in enumerate(prompts) if len(ids) + self._reply_len() <= self.max_context_len]
        value = np.zeros(len(states), dtype=np.float32)
        valid = np.zeros(len(states), dtype=bool)
        if asked:
            answer = self._greedy if self.tree is None else self._soft
            value[asked], valid[asked] = zip(*answer([prompts[index] for index in asked]), strict=True)
        return Values(value, valid)

    def _reply_len(self) -> int:
        return self.config.max_value_tokens if self.tree is None else 1 + max(map(len, self.tree.branches))

    def _greedy(self, prompts: Sequence[np.ndarray]) -> list[tuple[float, bool]]:
        requests = [SampleRequest(ids, self.config.max_value_tokens, temperature=0.0, seed=0) for ids in prompts]
        replies = [sample.token_ids for sample in self.sampler.sample(requests)]
        return [parse_value(self.tokenizer.decode(ids, skip_special_tokens=True)) for ids in replies]

    def _soft(self, prompts: Sequence[np.ndarray]) -> list[tuple[float, bool]]:
        num_branches = len(self.tree.branches)
        paths = [np.array(path, dtype=np.int32) for path in self.tree.branches]
        num_top = min(_NUM_TOP_LOGPROBS, self.vocab_size)
        samples = self.sampler.sample([
            SampleRequest(np.concatenate([ids, path]), 1, temperature=1.0, seed=0, num_top_logprobs=num_top)
            for ids in prompts for path in paths
        ])  # fmt: skip
        answers = []
        for start in range(0, len(samples), num_branches):
            here = samples[start : start + num_branches]
            found = soft_value(self.tree, [s.top_ids[0] for s in here], [s.top_logprobs[0] for s in here])
            answers.append((found.value if found.valid else 0.0, found.valid))
        return answers

    def update(self, examples: Sequence[CriticExample]) -> dict[str, float]:
        """One step on sum_i weight_i NLL_i / 4 / sum_i weight_i, NLL_i over a reply's value and end-of-turn tokens.

        A collective. Metrics: loss, token_accuracy (share of reply tokens with probability above one half), num_pairs,
        num_skipped, grad_norm, update_norm, stepped. No pair left, or a loss that is not finite: no step ("stepped" 0).
        """
        examples = [example for example in examples if example.weight > 0]
        pairs = [pair for example in examples if (pair := self._pair(example)) is not None]
        mean_weight = sum(pair.weight for pair in pairs) / max(len(pairs), 1)
        lengths = [len(pair.token_ids) for pair in pairs]
        mine = step.my_microbatches(lengths, self.topology, self.config.max_tokens_per_microbatch)
        filler = longest([pair.token_ids for pair in pairs])
        microbatches = [self._pack([pairs[index] for index in indices], mean_weight, filler) for indices in mine]
        head = TokenHead(self.model, self.topology, self.vocab_size, temperature=1.0, op=self.loss_op)
        sums = step.forward_backward(self.model, microbatches, partial(_reply_loss, head), self.topology)
        return {
            "loss": sums["loss"],
            "token_accuracy": sums["likely"] / max(sums["reply_tokens"], 1.0),
            "num_pairs": sums["count"],
            "num_skipped": float(len(examples) - len(pairs)),
            **step.apply_step(self.optimizer, sums),
        }

    def prompt_ids(self, state: CriticState) -> np.ndarray:
        """The value prompt of a state, with the reference where it has one and references are used: int32[N]."""
        return build_value_prompt(
            self.tokenizer,
            state.problem.question,
            state.response_ids,
            max(self.response_budget - len(state.response_ids), 0),
            state.reference_ids if self.config.use_references else None,
        )

    def _pair(self, example: CriticExample) -> _Pair | None:
        prompt = self.prompt_ids(example.state)
        reply = value_ids(self.tokenizer, example.value)
        if len(prompt) + len(reply) > self.max_context_len:
            return None
        return _Pair(np.concatenate([prompt, reply]), len(prompt), example.weight)

    def _pack(self, pairs: Sequence[_Pair], mean_weight: float, filler: np.ndarray | None) -> PackedBatch:
        """fields["weights"]: the pair's weight on each reply token; fields["pairs"]: 1 on each reply's first token."""
        weights, firsts = [], []
        for pair in pairs:
            reply_len = len(pair.token_ids) - pair.prompt_len
            weights.append(np.full(reply_len, pair.weight / mean_weight, dtype=np.float32))
            firsts.append(np.eye(1, reply_len, dtype=np.float32)[0])
        batch = pack(
            [pair.token_ids for pair in pairs],
            {"weights": weights, "pairs": firsts},
            [pair.prompt_len for pair in pairs],
            self.align,
            self.pad_id,
            length_multiple=length_multiple(self.topology.context),
            filler=filler,
        )
        return held_part(batch, self.topology)


def _reply_loss(head: TokenHead, output: torch.Tensor, batch: PackedBatch) -> step.Loss:
    rows = loss_rows(batch.loss_mask)
    weights = batch.fields["weights"][0, rows] / _LOSS_DIVISOR
    found = head.loss(output, batch, rows, negative_log_likelihood(weights))
    return found.loss, batch.fields["pairs"].sum(), found.metrics | {"reply_tokens": batch.loss_mask.sum()}


def _tree(value: str, tokenizer: PreTrainedTokenizerBase) -> ReplyTree | None:
    """What the soft value asks about; None for the greedy one."""
    if value not in ("greedy", "soft"):
        raise UserError(f"critic.value: found {value!r}, accepted: greedy, soft")
    return reply_tree(grid_replies(tokenizer)) if value == "soft" else None
