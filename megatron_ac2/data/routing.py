"""The engine's choices of experts, laid beside packed tokens. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

FREE = -1  # of a token whose choice is not known: the trainer's router chooses


def routing_column(
    choices: Sequence[np.ndarray | None], starts: torch.Tensor, num_tokens: int, num_layers: int, top_k: int
) -> torch.Tensor:
    """int16[1, T, layers, k]: at each token's own position the experts chosen for it, which are distinct; else FREE.

    `choices[i]`, uint8 or uint16[n, layers, k], belongs to the first n tokens of sequence i, which begins at
    `starts[i]` of num_tokens positions (a packed batch's cu_seqlens, which may go on for padding). None: none is known.
    Raises ValueError for other shapes, or choices of more tokens than a sequence has.
    """
    column = np.full((num_tokens, num_layers, top_k), FREE, dtype=np.int16)
    bounds = starts.tolist()
    for i, chosen in enumerate(choices):
        if chosen is None:
            continue
        if chosen.shape[1:] != (num_layers, top_k) or len(chosen) > bounds[i + 1] - bounds[i]:
            raise ValueError(
                f"routing_column: choices of shape {chosen.shape} for sequence {i} of {bounds[i + 1] - bounds[i]} "
                f"tokens, {num_layers} layers with {top_k} experts a token"
            )
        column[bounds[i] : bounds[i] + len(chosen)] = chosen
    return torch.from_numpy(column).unsqueeze(0)
