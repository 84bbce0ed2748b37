"""The value-head critic's model: a GPT trunk whose last stage ends in one or a few fp32 numbers a token."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_ac2.algorithm.value_prompt import GRID

# What critic.head needs of the model: one logit of a bounded scalar, or one for each value of the grid.
HEAD_OUTPUTS = {"bce": 1, "mse": 1, "two_hot": len(GRID)}


class ValueHead(torch.nn.Linear):
    """hidden -> num_outputs in fp32, replicated over tensor ranks, called like Megatron's output layer.

    Starts at N(0, 1 / hidden^2): logits near 0, so that a sigmoid of one, or the mean over the grid under the softmax
    of eleven, is near 0.5. The draw depends on `seed` and the shape alone, not on the layout.
    """

    def __init__(self, config: TransformerConfig, device: torch.device, seed: int, num_outputs: int = 1):
        super().__init__(config.hidden_size, num_outputs, bias=False, dtype=torch.float32, device=device)
        self.config = config
        self.sequence_parallel = config.sequence_parallel
        self.weight.sequence_parallel = config.sequence_parallel  # its gradient is summed over tensor ranks
        self.reset(seed)

    def reset(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        fresh = torch.randn(self.weight.shape, generator=generator) / self.weight.shape[1]
        with torch.no_grad():
            self.weight.copy_(fresh)

    def forward(
        self, hidden: torch.Tensor, weight: torch.Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[torch.Tensor, None]:
        """hidden [S (/ tensor degree under sequence parallel), B, H] -> ([S, B, num_outputs] fp32, no bias)."""
        logits = super().forward(hidden.float())
        if self.sequence_parallel:
            # Every tensor rank computes the whole loss, so the gradient is split, not reduce-scattered.
            logits = gather_from_sequence_parallel_region(logits, tensor_parallel_output_grad=False)
        return logits, None


class ValueModel(GPTModel):
    """GPTModel that returns value logits [B, S, num_outputs] on the last stage."""

    def __init__(
        self,
        config: TransformerConfig,
        *args: Any,
        device: torch.device,
        head_seed: int,
        num_outputs: int = 1,
        **kwargs: Any,
    ):
        super().__init__(config, *args, **{**kwargs, "share_embeddings_and_output_weights": False})
        if self.post_process:
            self.output_layer = ValueHead(config, device, head_seed, num_outputs)
