"""The generative critic: the actor's own weights, asked for a value through the engine, trained on value tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from megatron_ac2.algorithm.value_prompt import build_value_prompt, parse_value, value_ids
from megatron_ac2.config import Config
from megatron_ac2.data.packing import pack, plan_microbatches
from megatron_ac2.kernels.chunk_loss import vocab_parallel_logprobs_and_entropy
from megatron_ac2.parallel.topology import Topology
from megatron_ac2.training import step
from megatron_ac2.types import CriticExample, CriticState, PackedBatch, Sampler, SampleRequest, Values

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_LOSS_DIVISOR = 4.0  # the paper's; a reply is at most four tokens: digit, point, digit, end of turn


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
        self.max_context_len = self.config.max_context_len or model_max_len
        self.pad_id = pad_id
        self.align = align or step.token_alignment(topology)

    def score(self, states: Sequence[CriticState]) -> Values:
        """Decode greedily; a reply that begins with no number on the grid is invalid, with value 0. A collective."""
        prompts = [self.prompt_ids(state) for state in states]
        reply_len = self.config.max_value_tokens
        asked = [i for i, ids in enumerate(prompts) if len(ids) + reply_len <= self.max_context_len]
        value = np.zeros(len(states), dtype=np.float32)
        valid = np.zeros(len(states), dtype=bool)
        if asked:
            requests = [SampleRequest(prompts[i], reply_len, temperature=0.0, seed=0) for i in asked]
            for index, sample in zip(asked, self.sampler.sample(requests), strict=True):
                reply = self.tokenizer.decode(sample.token_ids, skip_special_tokens=True)
                value[index], valid[index] = parse_value(reply)
        return Values(value, valid)

    def update(self, examples: Sequence[CriticExample]) -> dict[str, float]:
        """One step on sum_i weight_i NLL_i / 4 / sum_i weight_i, NLL_i over a reply's value and end-of-turn tokens.

        A collective. Metrics: loss, token_accuracy (share of reply tokens with probability above one half), num_pairs,
        num_skipped, grad_norm, update_norm, stepped. No pair left, or a loss that is not finite: no step ("stepped" 0).
        """
        examples = [example for example in examples if example.weight > 0]
        pairs = [pair for example in examples if (pair := self._pair(example)) is not None]
        mean_weight = sum(pair.weight for pair in pairs) / max(len(pairs), 1)
        plan = plan_microbatches(
            [len(pair.token_ids) for pair in pairs], self.topology.data, self.config.max_tokens_per_microbatch
        )
        mine = plan[self.topology.data_rank]
        microbatches = [self._pack([pairs[index] for index in indices], mean_weight) for indices in mine]
        sums = step.forward_backward(self.model, microbatches, self._reply_loss, self.topology)
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

    def _pack(self, pairs: Sequence[_Pair], mean_weight: float) -> PackedBatch:
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
        )
        return step.to_device(batch, self.topology.device)

    def _reply_loss(self, logits: torch.Tensor, batch: PackedBatch) -> step.Loss:
        logprobs, _ = vocab_parallel_logprobs_and_entropy(
            logits, batch.labels, self.topology.pg.tp, 1.0, self.vocab_size
        )
        mask = batch.loss_mask
        loss = -(logprobs * mask * batch.fields["weights"]).sum() / _LOSS_DIVISOR
        likely = ((logprobs.detach().exp() > 0.5) * mask).sum()
        return loss, batch.fields["pairs"].sum(), {"likely": likely, "reply_tokens": mask.sum()}
