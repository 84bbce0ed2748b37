"""A language model that hands out hidden states in place of logits, for a loss that computes them tile by tile."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.transformer_config import TransformerConfig


class HiddenOutput(ColumnParallelLinear):
    """Megatron's output layer without its matrix product: the same parameters, but its input comes out.

    Every tensor rank gets the hidden states of all tokens. Each then computes the gradient that its columns give them:
    the backward pass sums these over the tensor ranks, as the layer itself would.
    """

    def forward(
        self, hidden: torch.Tensor, weight: torch.Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[torch.Tensor, None]:
        """hidden [S (/ tensor degree under sequence parallel), B, H] -> ([S, B, H], no bias)."""
        if self.sequence_parallel:
            return gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=True), None
        return copy_to_tensor_model_parallel_region(hidden), None


class HiddenModel(GPTModel):
    """GPTModel that returns hidden states [B, S, H] on the last stage; `output_weight` makes logits of them."""

    def __init__(self, config: TransformerConfig, *args: Any, **kwargs: Any):
        super().__init__(config, *args, **kwargs)
        if self.post_process:
            self.output_layer.__class__ = HiddenOutput  # with the parameters, names and shards that it has

    @property
    def output_weight(self) -> torch.nn.Parameter:
        """[V / tensor degree, H], on the last stage."""
        if self.share_embeddings_and_output_weights:
            return self.shared_embedding_or_output_weight()
        return self.output_layer.weight
