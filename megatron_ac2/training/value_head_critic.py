"""The value-head critic: a Megatron model of its own that reads a state and gives its value at any of its tokens."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import torch

from megatron_ac2.config import Config
from megatron_ac2.data.packing import longest, pack
from megatron_ac2.model.chunks import gather_parameters, named_parameters
from megatron_ac2.parallel.context import length_multiple
from megatron_ac2.parallel.topology import Topology
from megatron_ac2.training import step
from megatron_ac2.training.context_parallel import held_part, whole_values
from megatron_ac2.training.value_labels import (
    check_labels,
    head_values,
    label_fields,
    label_loss,
    places_of,
    value_metrics,
)
from megatron_ac2.types import CriticExample, CriticState, DenseExample, PackedBatch, Values


def context_problems(config: Config, model_max_len: int) -> list[str]:
    """What is wrong with critic.max_context_len for a value head whose model reads `model_max_len` tokens."""
    found = config.critic.max_context_len
    if found is None or 0 < found <= model_max_len:
        return []
    return [f"critic.max_context_len: found {found}, accepted: 1 to {model_max_len}, what its model reads, or null"]


class ValueHeadCritic:
    """Implements `types.TokenCritic`. The context is [reference, separator,] prompt, response; too long: invalid.

    `model` is Megatron's DDP over this rank's shard of a value model (model.build, head "value", with as many outputs
    as HEAD_OUTPUTS has for config.critic.head). `model_max_len` limits the context where config.critic.max_context_len
    is null. `snapshot_model`, bare or in DDP, is a second such model in the same layout, never trained: it starts as a
    copy of `model` and is renewed every config.critic.snapshot_every updates, counted by the optimizer. T-SAC's frozen
    critic in place of a target network (arXiv 2503.03660).
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
        snapshot_model: torch.nn.Module | None = None,
    ):
        self.model = model
        self.optimizer = optimizer
        self.topology = topology
        self.config = config.critic
        self.separator_id = separator_id
        self.max_context_len = self.config.max_context_len or model_max_len
        self.pad_id = pad_id
        self.align = align or step.token_alignment(topology, config.fp8)
        self.snapshot_model = snapshot_model
        if snapshot_model is not None:
            self.refresh_snapshot()

    def score(self, states: Sequence[CriticState]) -> Values:
        """V(s) of each state. A collective. A state whose context is too long, or empty, is invalid with value 0."""
        last = [np.array([len(state.response_ids)]) for state in states]
        paths = self.score_paths(states, last)
        valid = np.array([path is not None for path in paths], dtype=bool)
        return Values(np.array([0.0 if path is None else path[0] for path in paths], dtype=np.float32), valid)

    def score_paths(
        self, states: Sequence[CriticState], positions: Sequence[np.ndarray], frozen: bool = False
    ) -> list[np.ndarray | None]:
        """V after the first `positions[i]` response tokens of state i, float32 each; None where it is too long.

        A collective: one forward pass a state, on one data rank, and every rank gets all values. `frozen`: by the
        snapshot. Raises RuntimeError if there is none, ValueError for positions outside of a response.
        """
        if frozen and self.snapshot_model is None:
            raise RuntimeError("score_paths(frozen=True) needs a snapshot_model, and this critic has none")
        model = self.snapshot_model if frozen else self.model
        kept = [index for index, state in enumerate(states) if self._fits(state)]
        paths: list[np.ndarray | None] = [None] * len(states)
        if kept:
            found = self._path_values(model, [states[i] for i in kept], [np.asarray(positions[i]) for i in kept])
            for index, path in zip(kept, found, strict=True):
                paths[index] = path
        return paths

    def update(self, examples: Sequence[CriticExample]) -> dict[str, float]:
        """One optimizer step on sum_i weight_i loss(V(s_i), value_i) / sum_i weight_i. A collective.

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
        """One step on the mean loss over all labels, each weighted by its example's weight. A collective.

        The losses of a label's N targets are averaged. config.critic.head names the loss: cross-entropy of a bounded
        scalar (bce) or of a distribution over the grid (two_hot), or squared error, clipped against the old values
        where there are any (mse).
        Metrics: loss, mae, explained_variance (1 - Var(target - value) / Var(target), 0 where the targets do not vary),
        mean_value, mean_target, all against a label's mean target, num_labels, num_skipped, grad_norm, update_norm,
        stepped. No label left, or a loss that is not finite: no step ("stepped" 0). Raises ValueError for positions
        outside the response or given twice, and for targets, masks or old values that do not fit them.
        """
        examples = [example for example in examples if example.weight > 0 and len(example.positions)]
        kept = [example for example in examples if self._fits(example.state)]
        num_labels = sum(len(example.positions) for example in kept)
        counts = {"num_labels": float(num_labels), "num_skipped": float(len(examples) - len(kept))}
        microbatches = self._label_microbatches(kept)
        sums = step.forward_backward(self.model, microbatches, partial(label_loss, self.config), self.topology)
        stepped = step.apply_step(self.optimizer, sums)
        if self.snapshot_model is not None and self.num_updates % self.config.snapshot_every == 0:
            self.refresh_snapshot()
        return value_metrics(sums) | counts | stepped

    @property
    def num_updates(self) -> int:
        """Optimizer steps over the whole run: the optimizer's own count, which a checkpoint holds."""
        return self.optimizer.num_steps

    @torch.no_grad()
    def refresh_snapshot(self) -> None:
        """Make the snapshot a copy of the critic as it is now. Each rank copies its own shard."""
        if self.snapshot_model is None:
            raise RuntimeError("refresh_snapshot needs a snapshot_model, and this critic has none")
        gather_parameters(self.model)
        current = named_parameters(self.model)
        for name, parameter in named_parameters(self.snapshot_model).items():
            parameter.copy_(current[name])

    def context_ids(self, state: CriticState) -> np.ndarray:
        """What the critic reads: int32[(R + 1) + P + S]."""
        return np.concatenate(self._context_parts(state)).astype(np.int32)

    def _context_parts(self, state: CriticState) -> list[np.ndarray]:
        parts = [state.problem.prompt_ids, state.response_ids]
        if state.reference_ids is not None and self.config.use_references:
            parts = [state.reference_ids, np.array([self.separator_id]), *parts]
        return parts

    def _fits(self, state: CriticState) -> bool:
        return 0 < sum(map(len, self._context_parts(state))) <= self.max_context_len

    def _plan(self, contexts: Sequence[np.ndarray]) -> list[list[int]]:
        lengths = [len(ids) for ids in contexts]
        return step.my_microbatches(lengths, self.topology, self.config.max_tokens_per_microbatch)

    def _pack(self, contexts: Sequence[np.ndarray], filler: np.ndarray | None) -> PackedBatch:
        ends = [len(ids) for ids in contexts]  # no token is predicted
        multiple = length_multiple(self.topology.context)
        return pack(contexts, {}, ends, self.align, self.pad_id, length_multiple=multiple, filler=filler)

    def _path_values(
        self, model: torch.nn.Module, states: Sequence[CriticState], positions: Sequence[np.ndarray]
    ) -> list[np.ndarray]:
        """Values of states that all fit. Each is computed by one data rank and handed to all."""
        contexts = [self.context_ids(state) for state in states]
        places = [
            places_of(len(ids), len(state.response_ids), asked)
            for ids, state, asked in zip(contexts, states, positions, strict=True)
        ]
        bounds = np.cumsum([0, *map(len, places)])
        mine = self._plan(contexts)
        filler = longest(contexts)
        batches = [held_part(self._pack([contexts[i] for i in indices], filler), self.topology) for indices in mine]
        outputs = step.forward_only(model, batches, self._values_of, self.topology)
        values = torch.zeros(int(bounds[-1]), dtype=torch.float32, device=self.topology.device)
        for indices, batch, output in zip(mine, batches, outputs, strict=False):  # no outputs before the last stage
            for index, start in zip(indices, batch.cu_seqlens.tolist(), strict=False):
                read = torch.from_numpy(start + places[index]).to(values.device)
                values[bounds[index] : bounds[index + 1]] = output[read]
        gathered = step.sum_to_all(values, self.topology).cpu().numpy()
        return [gathered[start:end].copy() for start, end in zip(bounds[:-1], bounds[1:], strict=True)]

    def _label_microbatches(self, examples: Sequence[DenseExample]) -> list[PackedBatch]:
        """Weights are normalised to mean one over all labels, as training/step.py asks."""
        total = sum(example.weight * len(example.positions) for example in examples)
        scale = sum(len(example.positions) for example in examples) / total if total else 0.0
        contexts = [self.context_ids(example.state) for example in examples]
        places = []
        for ids, example in zip(contexts, examples, strict=True):  # on every rank alike, whoever will train on it
            check_labels(example)
            places.append(places_of(len(ids), len(example.state.response_ids), example.positions))
        batches, filler = [], longest(contexts)
        for indices in self._plan(contexts):
            batch = self._pack([contexts[index] for index in indices], filler)
            chosen, where = [examples[index] for index in indices], [places[index] for index in indices]
            batch.fields.update(label_fields(batch, chosen, where, scale))
            batches.append(held_part(batch, self.topology))
        return batches

    def _values_of(self, output: torch.Tensor, batch: PackedBatch) -> torch.Tensor:
        """Logits [1, T / context, num_outputs] -> values [T] of the whole batch."""
        return whole_values(head_values(self.config.head, output)[0], batch, self.topology)
