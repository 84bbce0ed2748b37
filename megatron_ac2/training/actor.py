"""The actor: score a minibatch with the weights as they are, then take one clipped policy step on it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace

import numpy as np
import torch

from megatron_ac2.algorithm.objective import aggregation_weights
from megatron_ac2.algorithm.objective_parts import PolicyObjective
from megatron_ac2.config import Config, num_recorded_logprobs
from megatron_ac2.data.packing import longest, num_sequences, pack, sequence_ids
from megatron_ac2.data.routing import routing_column
from megatron_ac2.kernels.vocab_logprobs import TokenLogprobs
from megatron_ac2.model.router_replay import RouterReplay
from megatron_ac2.parallel.collectives import reduce_scalars
from megatron_ac2.parallel.context import length_multiple
from megatron_ac2.parallel.topology import Topology
from megatron_ac2.training import step
from megatron_ac2.training.context_parallel import held_part, whole_rows
from megatron_ac2.training.mismatch import mismatch_sums
from megatron_ac2.training.policy_objective import evaluation, filtered, objective_of
from megatron_ac2.training.token_head import TokenHead, loss_rows
from megatron_ac2.types import PackedBatch, TrainSequence


@dataclass(slots=True)
class Minibatch:
    """One optimizer update's sequences, as this data-parallel rank's share of microbatches.

    A microbatch's `loss_mask` covers the generated tokens of sequences with a positive weight; fields["generated"]
    covers all generated tokens, fields["empty_prefix"] those of them that answer the bare problem. The sum of
    fields["loss_weights"] times losses, over the job, is divided by the sum of fields["units"].
    """

    microbatches: list[PackedBatch]
    num_tokens: int  # loss tokens of the whole job
    num_units: int  # what the loss is divided by: these tokens, or the sequences that hold them
    scored: bool = False


class Actor:
    """Every method is a collective over the whole job: all ranks pass the same sequences and get the same metrics.

    `model` is Megatron's DDP over this rank's shard, `vocab_size` the unpadded vocabulary; `align` (packed lengths are
    multiples of it) follows from the layout when None. `reference`: the frozen model of actor.reference_kl.
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
        reference: torch.nn.Module | None = None,
    ):
        self.model = model
        self.reference = reference
        self.head = TokenHead(model, topology, vocab_size, config.sampling.temperature, config.actor.loss_op)
        if reference is not None:
            self.reference_head = TokenHead(
                reference, topology, vocab_size, config.sampling.temperature, config.actor.loss_op
            )
        self.optimizer = optimizer
        self.topology = topology
        self.config = config.actor
        self.objective = objective_of(config.actor)
        self.response_budget = config.sampling.response_budget
        # Under top-p or top-k the engine's log-probs are those of what the filter left: so must ours be.
        self.is_filtered = config.sampling.top_p < 1 or bool(config.sampling.top_k)
        self.num_recorded = num_recorded_logprobs(config, vocab_size)
        self.replay = RouterReplay(model) if config.actor.router_replay else None
        self.pad_id = pad_id
        self.align = align or step.token_alignment(topology, config.fp8)
        self._updates_since_score = 0

    def pack_minibatch(self, sequences: Sequence[TrainSequence]) -> Minibatch:
        """Divide the minibatch over data ranks and microbatches; all ranks hold all sequences and plan alike."""
        trained = [_num_generated(sequence) for sequence in sequences if sequence.weight > 0]
        num_units = sum(trained) if self.config.aggregation == "token_mean" else len(trained)
        microbatches = self._pack_each(self._plan(sequences), sequences)
        return Minibatch(microbatches, sum(trained), num_units)

    def logprobs(self, sequences: Sequence[TrainSequence]) -> list[np.ndarray]:
        """Log-probs of the generated tokens under the weights as they are, float32[N] a sequence, on every rank."""
        mine = self._plan(sequences)
        batches = self._pack_each(mine, sequences)
        outputs = step.forward_only(self.model, batches, self._generated_logprobs, self.topology)
        ends = np.cumsum([0, *(_num_generated(sequence) for sequence in sequences)])
        flat = torch.zeros(int(ends[-1]), dtype=torch.float32, device=self.topology.device)
        for indices, output in zip(mine, outputs, strict=False):  # no outputs before the last stage
            lengths = [_num_generated(sequences[index]) for index in indices]
            for index, values in zip(indices, output.split(lengths), strict=True):
                flat[ends[index] : ends[index + 1]] = values
        return np.split(step.sum_to_all(flat, self.topology).cpu().numpy(), ends[1:-1])

    def score(self, minibatch: Minibatch) -> dict[str, float]:
        """Fill fields["proximal_logprobs"] (last stage) under the weights as they are, at the sampling temperature.

        Returns sums over the job's generated tokens for `score_metrics`, which may add up several minibatches.
        """
        if self.reference is not None:
            step.forward_only(self.reference, minibatch.microbatches, self._score_reference, self.topology)
        with self.replay.counting(self.topology.device) if self.replay else nullcontext() as counted:
            collected = step.forward_only(self.model, minibatch.microbatches, self._score_microbatch, self.topology)
        minibatch.scored = True
        self._updates_since_score = 0
        sums = step.reduce_metrics(collected, self.topology)
        if counted is not None:  # each rank its layers and its tokens
            sums |= reduce_scalars(dict(zip(("routed", "rerouted"), counted.tolist())))
        return sums

    def update(self, minibatch: Minibatch, clip_high: float) -> dict[str, float]:
        """One step on a scored minibatch: the loss, means over its loss tokens of what the objective reports, norms.

        "ratio_error_first", max |log ratio| of the first update after `score`, is 0 up to rounding if nothing has
        changed the weights in between. Without a loss token, or with a loss that is not finite, no step is taken
        ("stepped" 0). Raises RuntimeError for a minibatch that has not been scored.
        """
        if not minibatch.scored:
            raise RuntimeError("the minibatch has no proximal log-probs: call Actor.score before Actor.update")

        objective = replace(self.objective, clip_high=clip_high)

        def loss(logits: torch.Tensor, batch: PackedBatch) -> step.Loss:
            return self._policy_loss(logits, batch, objective)

        sums = step.forward_backward(self.model, minibatch.microbatches, loss, self.topology)
        found = (sums["count"], sums["tokens"])
        if found != (minibatch.num_units, minibatch.num_tokens):
            raise RuntimeError(
                f"the job trained on {found[0]:.0f} units with {found[1]:.0f} tokens, "
                f"the plan has {minibatch.num_units} with {minibatch.num_tokens}"
            )
        metrics = _means(sums) | step.apply_step(self.optimizer, sums)
        error = metrics.pop("log_ratio_error_max")
        if self._updates_since_score == 0:
            metrics["ratio_error_first"] = error
        self._updates_since_score += 1
        return metrics

    def _plan(self, sequences: Sequence[TrainSequence]) -> list[list[int]]:
        """This data rank's microbatches, as indices into `sequences`."""
        lengths = [len(sequence.token_ids) for sequence in sequences]
        return step.my_microbatches(lengths, self.topology, self.config.max_tokens_per_microbatch)

    def _pack_each(self, plan: Sequence[Sequence[int]], sequences: Sequence[TrainSequence]) -> list[PackedBatch]:
        filler = longest([sequence.token_ids for sequence in sequences])
        return [self._pack([sequences[index] for index in indices], filler) for indices in plan]

    def _pack(self, sequences: Sequence[TrainSequence], filler: np.ndarray | None) -> PackedBatch:
        fields = {
            "behavior_logprobs": [sequence.behavior_logprobs for sequence in sequences],
            "advantages": [sequence.advantages for sequence in sequences],
            "weights": [_constant(sequence, sequence.weight) for sequence in sequences],
            "empty_prefix": [_constant(sequence, sequence.empty_prefix) for sequence in sequences],
        }
        templates = {}
        if self.num_recorded:
            fields["top_ids"] = [sequence.top_ids for sequence in sequences]
            fields["top_behavior"] = [sequence.top_logprobs for sequence in sequences]
            shape = (0, self.num_recorded)
            templates = {"top_ids": np.zeros(shape, np.int32), "top_behavior": np.zeros(shape, np.float32)}
        token_ids = [sequence.token_ids for sequence in sequences]
        starts = [sequence.num_context for sequence in sequences]
        multiple = length_multiple(self.topology.context)
        batch = pack(token_ids, fields, starts, self.align, self.pad_id, templates, multiple, filler)
        batch.fields["generated"] = batch.loss_mask
        batch.loss_mask = batch.loss_mask * batch.fields.pop("weights")
        weights, num_units = aggregation_weights(
            self.config.aggregation, sequence_ids(batch), batch.loss_mask, num_sequences(batch),
            budget=self.response_budget,
        )  # fmt: skip
        units = torch.zeros_like(weights, dtype=torch.int64)
        units[0, 0] = num_units  # at one position, which one context rank holds
        batch.fields |= {"loss_weights": weights, "units": units}
        if self.replay:
            batch.routed_experts = routing_column(
                [sequence.routed_experts for sequence in sequences], batch.cu_seqlens, batch.token_ids.shape[1],
                self.replay.num_layers, self.replay.top_k,
            )  # fmt: skip
        return held_part(batch, self.topology)

    def _generated_logprobs(self, output: torch.Tensor, batch: PackedBatch) -> torch.Tensor:
        rows = loss_rows(batch.fields["generated"])
        return whole_rows(self._scores(self.head, output, batch, rows).labels, rows, batch, self.topology)

    def _score_reference(self, output: torch.Tensor, batch: PackedBatch) -> None:
        rows = loss_rows(batch.loss_mask)
        found = self._scores(self.reference_head, output, batch, rows)
        batch.fields["reference_logprobs"] = _spread(found.labels, rows, batch)

    def _score_microbatch(self, output: torch.Tensor, batch: PackedBatch) -> dict[str, torch.Tensor]:
        rows = loss_rows(batch.fields["generated"])
        found = self._scores(self.head, output, batch, rows)
        batch.fields["proximal_logprobs"] = _spread(found.labels, rows, batch)
        empty_prefix = batch.fields["empty_prefix"][0, rows]
        return {
            "entropy": found.entropy.sum(),
            "empty_prefix_entropy": (found.entropy * empty_prefix).sum(),
            "empty_prefix_tokens": empty_prefix.sum(),
            **mismatch_sums(found.labels, batch.fields["behavior_logprobs"][0, rows]),
        }

    def _scores(self, head: TokenHead, output: torch.Tensor, batch: PackedBatch, rows: torch.Tensor) -> TokenLogprobs:
        found = head.scores(output, batch, rows)
        return filtered(found, batch.fields["top_behavior"][0, rows]) if self.is_filtered else found

    def _policy_loss(self, output: torch.Tensor, batch: PackedBatch, objective: PolicyObjective) -> step.Loss:
        rows = loss_rows(batch.loss_mask)
        found = self.head.loss(
            output, batch, rows, evaluation(batch, rows, objective, self.is_filtered, self.topology.pg.cp),
            token_local=objective.is_token_local, entropy_gradient=bool(objective.entropy_bonus),
        )  # fmt: skip
        return found.loss, batch.fields["units"].sum(), found.metrics


def _spread(values: torch.Tensor, rows: torch.Tensor, batch: PackedBatch) -> torch.Tensor:
    """[R] -> [1, T], 0 elsewhere."""
    return torch.zeros_like(batch.loss_mask).index_copy_(1, rows, values[None].to(batch.loss_mask.dtype))


def _means(sums: Mapping[str, float]) -> dict[str, float]:
    """Sums over loss tokens -> means; the loss is one already, maxima stay."""
    tokens = max(sums["tokens"], 1.0)
    kept = {name: value for name, value in sums.items() if name == "loss" or name.endswith("_max")}
    means = {name: value / tokens for name, value in sums.items() if name not in (*kept, "count", "tokens")}
    return {**kept, **means, "num_tokens": sums["tokens"]}


def _num_generated(sequence: TrainSequence) -> int:
    return len(sequence.token_ids) - sequence.num_context


def _constant(sequence: TrainSequence, value: float) -> np.ndarray:
    return np.full(_num_generated(sequence), value, dtype=np.float32)
