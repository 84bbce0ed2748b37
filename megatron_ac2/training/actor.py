"""The actor: score a minibatch with the weights as they are, then take one clipped policy step on it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from megatron_ac2.algorithm.losses import clipped_policy_loss
from megatron_ac2.config import Config
from megatron_ac2.data.packing import pack, plan_microbatches
from megatron_ac2.kernels.chunk_loss import vocab_parallel_logprobs_and_entropy
from megatron_ac2.parallel.topology import Topology
from megatron_ac2.training import step
from megatron_ac2.types import PackedBatch, TrainSequence


@dataclass(slots=True)
class Minibatch:
    """One optimizer update's sequences, as this data-parallel rank's share of microbatches.

    A microbatch's `loss_mask` covers the generated tokens of sequences with a positive weight; fields["generated"]
    covers all generated tokens, fields["empty_prefix"] those of them that answer the bare problem.
    """

    microbatches: list[PackedBatch]
    num_tokens: int  # loss tokens of the whole job
    num_sequences: int  # of the whole job, weight 0 included
    scored: bool = False


class Actor:
    """Every method is a collective over the whole job: all ranks pass the same sequences and get the same metrics.

    `model` is Megatron's DDP over this rank's shard, `vocab_size` the unpadded vocabulary; `align` (packed lengths are
    multiples of it) follows from the layout when None.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: step.Optimizer,
        topology: Topology,
        config: Config,
        vocab_size: int,
        pad_id: int = 0,
        align: int | None = None,
    ):
        self.model = model
        self.optimizer = optimizer
        self.topology = topology
        self.config = config.actor
        self.temperature = config.sampling.temperature
        self.vocab_size = vocab_size
        self.pad_id = pad_id
        self.align = align or step.token_alignment(topology)
        self._updates_since_score = 0

    def pack_minibatch(self, sequences: Sequence[TrainSequence]) -> Minibatch:
        """Divide the minibatch over data ranks and microbatches; all ranks hold all sequences and plan alike."""
        lengths = [len(sequence.token_ids) for sequence in sequences]
        plan = plan_microbatches(lengths, self.topology.data, self.config.max_tokens_per_microbatch)
        mine = plan[self.topology.data_rank]
        num_tokens = sum(_num_generated(sequence) for sequence in sequences if sequence.weight > 0)
        microbatches = [self._pack([sequences[index] for index in indices]) for indices in mine]
        return Minibatch(microbatches, num_tokens, len(sequences))

    def score(self, minibatch: Minibatch) -> dict[str, float]:
        """Fill fields["proximal_logprobs"] (last stage) under the weights as they are, at the sampling temperature.

        Returns sums over the job's generated tokens for `score_metrics`, which may add up several minibatches.
        """
        collected = step.forward_only(self.model, minibatch.microbatches, self._score_microbatch, self.topology)
        minibatch.scored = True
        self._updates_since_score = 0
        return step.reduce_metrics(collected, self.topology)

    def update(self, minibatch: Minibatch, clip_high: float) -> dict[str, float]:
        """One step on a scored minibatch: loss and clip fractions (means over its loss tokens), ratio extremes, norms.

        "ratio_error_first", max |log ratio| of the first update after `score`, is 0 up to rounding if nothing has
        changed the weights in between. Without a loss token, or with a loss that is not finite, no step is taken
        ("stepped" 0). Raises RuntimeError for a minibatch that has not been scored.
        """
        if not minibatch.scored:
            raise RuntimeError("the minibatch has no proximal log-probs: call Actor.score before Actor.update")

        def loss(logits: torch.Tensor, batch: PackedBatch) -> step.Loss:
            return self._policy_loss(logits, batch, clip_high)

        sums = step.forward_backward(self.model, minibatch.microbatches, loss, self.topology)
        if sums["count"] != minibatch.num_tokens:
            raise RuntimeError(f"the job trained on {sums['count']:.0f} tokens, the plan has {minibatch.num_tokens}")
        metrics = _means(sums) | step.apply_step(self.optimizer, sums)
        error = metrics.pop("log_ratio_error_max")
        if self._updates_since_score == 0:
            metrics["ratio_error_first"] = error
        self._updates_since_score += 1
        return metrics

    def _pack(self, sequences: Sequence[TrainSequence]) -> PackedBatch:
        fields = {
            "behavior_logprobs": [sequence.behavior_logprobs for sequence in sequences],
            # The loss is homogeneous in the advantage, so that a weight may ride on it.
            "advantages": [sequence.advantages * sequence.weight for sequence in sequences],
            "trained": [_constant(sequence, sequence.weight > 0) for sequence in sequences],
            "empty_prefix": [_constant(sequence, sequence.empty_prefix) for sequence in sequences],
        }
        token_ids = [sequence.token_ids for sequence in sequences]
        starts = [sequence.num_context for sequence in sequences]
        batch = step.to_device(pack(token_ids, fields, starts, self.align, self.pad_id), self.topology.device)
        batch.fields["generated"] = batch.loss_mask
        batch.loss_mask = batch.loss_mask * batch.fields.pop("trained")
        return batch

    def _score_microbatch(self, logits: torch.Tensor, batch: PackedBatch) -> dict[str, torch.Tensor]:
        logprobs, entropy = self._logprobs_and_entropy(logits, batch)
        batch.fields["proximal_logprobs"] = logprobs
        generated, empty_prefix = batch.fields["generated"], batch.fields["empty_prefix"]
        return {
            "entropy": (entropy * generated).sum(),
            "empty_prefix_entropy": (entropy * empty_prefix).sum(),
            "empty_prefix_tokens": empty_prefix.sum(),
            **mismatch_sums(logprobs, batch.fields["behavior_logprobs"], generated),
        }

    def _policy_loss(self, logits: torch.Tensor, batch: PackedBatch, clip_high: float) -> step.Loss:
        current, _ = self._logprobs_and_entropy(logits, batch)
        proximal, mask = batch.fields["proximal_logprobs"], batch.loss_mask
        loss, sums = clipped_policy_loss(
            current,
            proximal,
            batch.fields["advantages"],
            mask,
            1.0,  # a sum: the division by the job's tokens is Megatron's (training/step.py)
            clip_low=self.config.clip_low,
            clip_high=clip_high,
            dual_clip=self.config.dual_clip,
        )
        metrics = {name: value for name, value in sums.items() if name not in ("loss", "tokens")}  # step.py's to give
        metrics["log_ratio_error_max"] = ((current.detach() - proximal).abs() * mask).max()
        return loss, mask.sum(), metrics

    def _logprobs_and_entropy(self, logits: torch.Tensor, batch: PackedBatch) -> tuple[torch.Tensor, torch.Tensor]:
        return vocab_parallel_logprobs_and_entropy(
            logits, batch.labels, self.topology.pg.tp, self.temperature, self.vocab_size
        )


def mismatch_sums(logprobs: torch.Tensor, behavior: torch.Tensor, mask: torch.Tensor) -> dict[str, torch.Tensor]:
    """Trainer against engine on the sampled tokens, all [1, T]: sums, and one maximum, that `score_metrics` reads."""
    mask = mask.bool()
    difference = (logprobs - behavior).double().masked_fill(~mask, 0.0)  # log ratio trainer / engine; 0 off the mask
    ratio = difference.exp()
    return {
        "tokens": mask.sum(),
        "abs_difference": difference.abs().sum(),
        "abs_difference_max": difference.abs().max(),
        "k1": -difference.sum(),
        "k3": (ratio - 1 - difference).sum(),
        "ratio": (ratio * mask).sum(),
        "ratio_squared": (ratio.square() * mask).sum(),
        "ratio_above_2": (ratio > 2).sum(),
        "ratio_below_half": (ratio < 0.5).sum(),
    }


def score_metrics(scores: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """The sums of one or more `Actor.score` calls -> means. k1, k3: estimates of KL(engine || trainer) in nats a token.

    "ess" is (sum r)^2 / (n sum r^2) for r = trainer / engine, 1 when they agree. `empty_prefix_entropy` is NaN when no
    response to a bare problem was generated.
    """
    scores = list(scores)
    total = {name: math.fsum(score[name] for score in scores) for name in scores[0]}
    tokens = max(total["tokens"], 1.0)
    empty = total["empty_prefix_tokens"]
    return {
        "num_tokens": total["tokens"],
        "entropy": total["entropy"] / tokens,
        "empty_prefix_entropy": total["empty_prefix_entropy"] / empty if empty else math.nan,
        "empty_prefix_tokens": empty,
        "mismatch/mean_abs": total["abs_difference"] / tokens,
        "mismatch/max_abs": max(score["abs_difference_max"] for score in scores),
        "mismatch/k1": total["k1"] / tokens,
        "mismatch/k3": total["k3"] / tokens,
        "mismatch/ratio_above_2": total["ratio_above_2"] / tokens,
        "mismatch/ratio_below_half": total["ratio_below_half"] / tokens,
        "mismatch/ess": total["ratio"] ** 2 / (tokens * total["ratio_squared"]) if total["ratio_squared"] else 1.0,
    }


def _means(sums: Mapping[str, float]) -> dict[str, float]:
    """Sums over loss tokens -> means; the loss is one already, maxima stay."""
    count = max(sums["count"], 1.0)
    kept = {name: value for name, value in sums.items() if name == "loss" or name.endswith("_max")}
    means = {name: value / count for name, value in sums.items() if name not in kept and name != "count"}
    return {**kept, **means, "num_tokens": sums["count"]}


def _num_generated(sequence: TrainSequence) -> int:
    return len(sequence.token_ids) - sequence.num_context


def _constant(sequence: TrainSequence, value: float) -> np.ndarray:
    return np.full(_num_generated(sequence), value, dtype=np.float32)
