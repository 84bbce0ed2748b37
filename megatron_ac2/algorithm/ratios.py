"""Ratios of probabilities from log-probs, and per-sequence sums of token values: what losses and weights share."""

from __future__ import annotations

import torch
from torch import Tensor

# exp overflows float32 at 88.7. A ratio of e^20 is far outside of any clip, truncation or rejection bound, so this one
# changes nothing there; where a loss has no such bound, it ends the gradient in place of an overflow.
MAX_LOG_RATIO = 20.0


def wide(tensor: Tensor) -> Tensor:
    """Half precision is computed in float32; float64 stays."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def bounded_exp(log_ratio: Tensor) -> Tensor:
    """exp(min(log_ratio, MAX_LOG_RATIO)), with no gradient above the bound."""
    return log_ratio.clamp(max=MAX_LOG_RATIO).exp()


def sequence_sums(values: Tensor, sequence_ids: Tensor, num_sequences: int, mask: Tensor) -> Tensor:
    """Sums over each sequence's unmasked tokens: values [..., T] -> float64[num_sequences], detached.

    sequence_ids int64[..., T] in [0, num_sequences), any value where mask is 0; nothing is read there.
    """
    keep = mask != 0
    # In float64, because a GPU adds in no fixed order: what that changes is gone once a sum is rounded to float32.
    tokens = values.detach().double().masked_fill(~keep, 0.0)
    sums = tokens.new_zeros(max(num_sequences, 1))  # masked tokens need a place to add their zeros to
    sums.index_add_(0, _safe_ids(sequence_ids, keep).flatten(), tokens.flatten())
    return sums[:num_sequences]


def sequence_means(values: Tensor, sequence_ids: Tensor, num_sequences: int, mask: Tensor) -> Tensor:
    """As `sequence_sums`, each divided by its number of unmasked tokens, which count alike; 0 where there is none."""
    lengths = sequence_sums((mask != 0).double(), sequence_ids, num_sequences, mask)
    return sequence_sums(values, sequence_ids, num_sequences, mask) / lengths.clamp(min=1)


def to_tokens(per_sequence: Tensor, sequence_ids: Tensor, mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Each token gets its sequence's number: [num_sequences] -> [..., T], 0 where mask is 0."""
    keep = mask != 0
    if per_sequence.numel() == 0:
        return torch.zeros(mask.shape, dtype=dtype, device=mask.device)
    return per_sequence[_safe_ids(sequence_ids, keep)].masked_fill(~keep, 0.0).to(dtype)


def _safe_ids(sequence_ids: Tensor, keep: Tensor) -> Tensor:
    return sequence_ids.long().masked_fill(~keep, 0)
