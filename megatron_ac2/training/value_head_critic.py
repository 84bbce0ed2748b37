"""The value-head critic: a Megatron model of its own that reads a state and gives sigmoid(logit) at its last token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from megatron_ac2.algorithm.losses import value_bce_loss
from megatron_ac2.config import Config
from megatron_ac2.data.packing import pack, plan_microbatches
from megatron_ac2.parallel.topology import Topology
from megatron_ac2.training import step
from megatron_ac2.types import CriticExample, CriticState, PackedBatch, Values


@dataclass(frozen=True, slots=True)
class DenseExample:
    """Values along one response: `targets[i]` is the value once the first `positions[i]` response tokens are there."""

    state: CriticState
    positions: np.ndarray  # int[k], distinct, in [0, S]
    targets: np.ndarray  # float32[k], in [0, 1]
    weight: float = 1.0  # of each of the k labels


class ValueHeadCritic:
    """Implements `types.Critic`. The context is [reference, separator,] prompt, response; too long ones are invalid.

    `model` is Megatron's DDP over this rank's shard of a value model (model.build, head "value"). `model_max_len`
    limits the context where config.critic.max_context_len is null.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: step.Optimizer,
        topology: Topology,
        config: Config,
        *,
        separator_id: int,
        model_max_len: int,
        pad_id: int = 0,
        align: int | None = None,
    ):
        self.model = model
        self.optimizer = optimizer
        self.topology = topology
        self.config = config.critic
        self.separator_id = separator_id
        self.max_context_len = self.config.max_context_len or model_max_len
        self.pad_id = pad_id
        self.align = align or step.token_alignment(topology)

    def score(self, states: Sequence[CriticState]) -> Values:
        """V(s) of each state. A collective. A state whose context is too long, or empty, is invalid with value 0."""
        contexts = [self.context_ids(state) for state in states]
        valid = np.array([self._fits(ids) for ids in contexts], dtype=bool)
        value = np.zeros(len(states), dtype=np.float32)
        if valid.any():
            chosen = np.flatnonzero(valid)
            value[chosen] = self._last_values([contexts[index] for index in chosen])
        return Values(value, valid)

    def update(self, examples: Sequence[CriticExample]) -> dict[str, float]:
        """One optimizer step on sum_i weight_i BCE(logit_i, value_i) / sum_i weight_i. A collective.

        Too long contexts are skipped; see `update_dense` for the metrics.
        """
        dense = [
            DenseExample(
                example.state,
                np.array([len(example.state.response_ids)]),
                np.array([example.value], dtype=np.float32),
                example.weight,
            )
            for example in examples
        ]
        return self.update_dense(dense)

    def update_dense(self, examples: Sequence[DenseExample]) -> dict[str, float]:
        """One step on the mean BCE over all labels, each weighted by its example's weight. A collective.

        Metrics: loss, mae, explained_variance (1 - Var(target - value) / Var(target), 0 where the targets do not vary),
        mean_value, mean_target, num_labels, num_skipped, grad_norm, update_norm, stepped. No label left, or a loss that
        is not finite: no step ("stepped" 0). Raises ValueError for positions outside the response or given twice.
        """
        examples = [example for example in examples if example.weight > 0 and len(example.positions)]
        kept = [example for example in examples if self._fits(self.context_ids(example.state))]
        num_labels = sum(len(example.positions) for example in kept)
        counts = {"num_labels": float(num_labels), "num_skipped": float(len(examples) - len(kept))}
        microbatches = self._label_microbatches(kept)
        sums = step.forward_backward(self.model, microbatches, _label_loss, self.topology)
        return value_metrics(sums) | counts | step.apply_step(self.optimizer, sums)

    def context_ids(self, state: CriticState) -> np.ndarray:
        """What the critic reads: int32[(R + 1) + P + S]."""
        parts = [state.problem.prompt_ids, state.response_ids]
        if state.reference_ids is not None and self.config.use_references:
            parts = [state.reference_ids, np.array([self.separator_id]), *parts]
        return np.concatenate(parts).astype(np.int32)

    def _fits(self, context: np.ndarray) -> bool:
        return 0 < len(context) <= self.max_context_len

    def _plan(self, contexts: Sequence[np.ndarray]) -> list[list[int]]:
        lengths = [len(ids) for ids in contexts]
        plan = plan_microbatches(lengths, self.topology.data, self.config.max_tokens_per_microbatch)
        return plan[self.topology.data_rank]

    def _pack(self, contexts: Sequence[np.ndarray]) -> PackedBatch:
        ends = [len(ids) for ids in contexts]  # no token is predicted
        return pack(contexts, {}, ends, self.align, self.pad_id)

    def _last_values(self, contexts: Sequence[np.ndarray]) -> np.ndarray:
        """Values [N] in the order asked; each is computed by one data rank and handed to all."""
        mine = self._plan(contexts)
        batches = [step.to_device(self._pack([contexts[i] for i in indices]), self.topology.device) for indices in mine]
        outputs = step.forward_only(self.model, batches, lambda logits, _: logits[0, :, 0].sigmoid(), self.topology)
        values = torch.zeros(len(contexts), dtype=torch.float64, device=self.topology.device)
        for indices, batch, output in zip(mine, batches, outputs, strict=False):  # no outputs before the last stage
            ends = batch.cu_seqlens[1 : len(indices) + 1].long() - 1
            values[torch.tensor(indices, dtype=torch.long, device=values.device)] = output[ends].double()
        return step.sum_to_all(values, self.topology).cpu().numpy()

    def _label_microbatches(self, examples: Sequence[DenseExample]) -> list[PackedBatch]:
        """Weights are normalised to mean one over all labels, as training/step.py asks."""
        total = sum(example.weight * len(example.positions) for example in examples)
        scale = sum(len(example.positions) for example in examples) / total if total else 0.0
        contexts = [self.context_ids(example.state) for example in examples]
        batches = []
        for indices in self._plan(contexts):
            batch = self._pack([contexts[index] for index in indices])
            batch.fields.update(self._label_fields(batch, [examples[index] for index in indices], scale))
            batches.append(step.to_device(batch, self.topology.device))
        return batches

    def _label_fields(
        self, batch: PackedBatch, examples: Sequence[DenseExample], scale: float
    ) -> dict[str, torch.Tensor]:
        targets, weights = torch.zeros_like(batch.loss_mask), torch.zeros_like(batch.loss_mask)
        for example, end in zip(examples, batch.cu_seqlens[1:].tolist(), strict=False):
            response_len = len(example.state.response_ids)
            if len(np.unique(example.positions)) != len(example.positions):
                raise ValueError(f"labels of one response must be at distinct positions, found {example.positions}")
            if example.positions.min() < 0 or example.positions.max() > response_len:
                raise ValueError(f"labels must lie in [0, {response_len}], found {example.positions}")
            places = torch.as_tensor(end - 1 - response_len + example.positions, dtype=torch.long)
            targets[0, places] = torch.as_tensor(example.targets, dtype=torch.float32)
            weights[0, places] = example.weight * scale
        return {"targets": targets, "label_weights": weights}


def _label_loss(output: torch.Tensor, batch: PackedBatch) -> step.Loss:
    logits, targets, weights = output[..., 0], batch.fields["targets"], batch.fields["label_weights"]
    loss = value_bce_loss(logits, targets, weights)
    values = logits.detach().sigmoid()
    return loss, (weights > 0).sum(), value_sums(values, targets, weights)


def value_sums(values: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor) -> dict[str, torch.Tensor]:
    """Weighted moments of values against targets, all of one shape, that `value_metrics` reads."""
    values, targets, weights = values.double(), targets.double(), weights.double()
    errors = targets - values
    moments = {
        "weight": torch.ones_like(values),
        "abs_error": errors.abs(),
        "error": errors,
        "error_squared": errors.square(),
        "target": targets,
        "target_squared": targets.square(),
        "value": values,
    }
    return {name: (weights * moment).sum() for name, moment in moments.items()}


def value_metrics(sums: Mapping[str, float]) -> dict[str, float]:
    weight = sums["weight"] or 1.0
    mean = {name: value / weight for name, value in sums.items()}
    variance = mean["target_squared"] - mean["target"] ** 2
    residual = mean["error_squared"] - mean["error"] ** 2
    return {
        "loss": sums["loss"],
        "mae": mean["abs_error"],
        "explained_variance": 1 - residual / variance if variance > 1e-12 else 0.0,
        "mean_value": mean["value"],
        "mean_target": mean["target"],
    }
