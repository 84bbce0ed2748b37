"""What a Hugging Face config says of a model's layers, for parts that do not know each other."""

from __future__ import annotations

from typing import Any


def sparse_layers(hf_config: Any) -> list[bool]:
    """For each layer, whether it has experts: every `decoder_sparse_step`-th, save those in `mlp_only_layers`."""
    num_experts = getattr(hf_config, "num_experts", None) or 0
    period = getattr(hf_config, "decoder_sparse_step", 1)
    dense = set(getattr(hf_config, "mlp_only_layers", None) or ())
    return [
        num_experts > 0 and period > 0 and (layer + 1) % period == 0 and layer not in dense
        for layer in range(hf_config.num_hidden_layers)
    ]
