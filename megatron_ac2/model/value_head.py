"""The value-head critic's model: a GPT trunk whose last stage ends in one fp32 number a token."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.transformer_config import TransformerConfig


class ValueHead(torch.nn.Linear):
    """hidden -> 1 in fp32, replicated over tensor ranks, with the call signature of Megatron's output layer.

    Starts at N(0, 1 / hidden^2): logits near 0, values near 0.5. The draw depends on `seed` alone, not on the layout.
    """

    def __init__(self, config: TransformerConfig, device: torch.device, seed: int):
        super().__init__(config.hidden_size, 1, bias=False, dtype=torch.float32, device=device)
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
        """hidden [S (/ tensor degree under sequence parallel), B, H] -> ([S, B, 1] fp32, no bias)."""
        logits = super().forward(hidden.float())
        if self.sequence_parallel:
            # Every tensor rank computes the whole loss, so the gradient is split, not reduce-scattered.
            logits = gather_from_sequence_parallel_region(logits, tensor_parallel_output_grad=False)
        return logits, None


class ValueModel(GPTModel):
    """GPTModel that returns value logits [B, S, 1] on the last stage."""

    def __init__(self, config: TransformerConfig, *args: Any, device: torch.device, head_seed: int, **kwargs: Any):
        super().__init__(config, *args, **{**kwargs, "share_embeddings_and_output_weights": False})
        if self.post_process:
            self.output_layer = ValueHead(config, device, head_seed)
