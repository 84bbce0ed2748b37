"""From a language model's output to log-probs of tokens and losses on them: fused with the output layer, or naive.

What a model returns decides: hidden states (model/hidden_head.py) go through the fused op, which never holds the
logits of more than a tile of tokens; logits, its naive twin, are materialised.
"""

from __future__ import annotations

import torch

from megatron_ac2.kernels.chunk_loss import ChunkLoss, Head, Objective, chunk_loss, chunk_scores
from megatron_ac2.kernels.vocab_logprobs import TokenLogprobs, token_logprobs
from megatron_ac2.model.chunks import gpt_models
from megatron_ac2.model.hidden_head import HiddenModel
from megatron_ac2.parallel.topology import Topology
from megatron_ac2.types import PackedBatch


class TokenHead:
    """The output layer of one model and its vocabulary, on the ranks of its last pipeline stage.

    `rows` int64[R] are positions of a packed batch [1, T]; what they are is the caller's: those that carry loss.
    """

    def __init__(
        self, model: torch.nn.Module, topology: Topology, vocab_size: int, temperature: float, op: str = "auto"
    ):
        bare = gpt_models(model)[-1]
        self._hidden_model = bare if isinstance(bare, HiddenModel) else None
        self._tp_group = topology.pg.tp
        self._vocab_size = vocab_size
        self._temperature = temperature
        self._backend = op  # of the fused op: auto, torch or triton

    def scores(self, output: torch.Tensor, batch: PackedBatch, rows: torch.Tensor) -> TokenLogprobs:
        """Of the rows' labels, [R], and of their recorded tokens fields["top_ids"], [R, k]; without gradients."""
        if self._hidden_model is None:
            return self._naive_scores(output.detach(), batch, rows)
        top_ids = _top_ids(batch)
        return chunk_scores(output[0], self._head(), batch.labels[0], top_ids=top_ids, rows=rows, backend=self._backend)

    def loss(
        self,
        output: torch.Tensor,
        batch: PackedBatch,
        rows: torch.Tensor,
        objective: Objective,
        *,
        token_local: bool = True,
        entropy_gradient: bool = False,
    ) -> ChunkLoss:
        """The objective's loss over the rows, differentiable by `output` and the output weight (kernels/chunk_loss)."""
        if self._hidden_model is not None:
            return chunk_loss(
                output[0], self._head(), batch.labels[0], objective, top_ids=_top_ids(batch), rows=rows,
                token_local=token_local, entropy_gradient=entropy_gradient, backend=self._backend,
            )  # fmt: skip
        scores = self._naive_scores(output, batch, rows)
        loss, metrics = objective(scores, slice(0, len(rows)))
        return ChunkLoss(loss, _detached(scores), metrics)

    def _head(self) -> Head:
        weight = self._hidden_model.output_weight
        return Head(weight, self._vocab_size, self._temperature, self._tp_group)

    def _naive_scores(self, logits: torch.Tensor, batch: PackedBatch, rows: torch.Tensor) -> TokenLogprobs:
        top_ids = batch.fields.get("top_ids")
        found = token_logprobs(logits, batch.labels, self._tp_group, self._temperature, self._vocab_size, top_ids)
        top = None if found.top is None else found.top[0, rows]
        return TokenLogprobs(found.labels[0, rows], found.entropy[0, rows], top)


def negative_log_likelihood(weights: torch.Tensor) -> Objective:
    """sum_r weights_r (-log p_r) over rows [R]; metric "likely": how many have probability above one half."""

    def evaluate(scores: TokenLogprobs, part: slice) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        likely = (scores.labels.detach().exp() > 0.5).sum()
        return -(scores.labels * weights[part]).sum(), {"likely": likely}

    return evaluate


def loss_rows(mask: torch.Tensor) -> torch.Tensor:
    """Positions of a mask [1, T] that are not 0: int64[R]."""
    return mask[0].nonzero().squeeze(1)


def _top_ids(batch: PackedBatch) -> torch.Tensor | None:
    top_ids = batch.fields.get("top_ids")
    return None if top_ids is None else top_ids[0]


def _detached(scores: TokenLogprobs) -> TokenLogprobs:
    top = None if scores.top is None else scores.top.detach()
    return TokenLogprobs(scores.labels.detach(), scores.entropy.detach(), top)
