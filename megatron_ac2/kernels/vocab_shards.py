"""A vocabulary in equal shards over tensor ranks: whose ids are where, and what the ranks tell each other of a row.

A rank describes a row's own scaled logits z by NUM_STATISTICS numbers: a reference value c near their maximum,
sum e^(z - c) and sum e^(z - c) (z - c).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

NUM_STATISTICS = 3
NO_COLUMNS = -1e30  # the reference of a rank that holds padding alone; finite, so that 0 * (it - c) is 0 and not NaN


def own_columns(width: int, group: dist.ProcessGroup | None, vocab_size: int) -> tuple[int, int]:
    """(how many of this rank's columns are real, the vocabulary id of its first)."""
    first = width * (0 if group is None else group.rank())
    return min(max(vocab_size - first, 0), width), first


def accumulator_of(values: torch.Tensor) -> torch.dtype:
    return torch.float64 if values.dtype == torch.float64 else torch.float32


def localise(ids: torch.Tensor, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(ids clamped into this rank's columns, which of them truly lie there)."""
    return ids.clamp(0, columns - 1), (ids >= 0) & (ids < columns)


def share(
    statistics: torch.Tensor, picked: torch.Tensor, group: dist.ProcessGroup | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """[N, 3], [N, K] of each rank -> [N, tp, 3], [N, K] on every rank.

    Each number has one rank that contributes it and zeros from the others: the sum is exact in any order, and
    statistics that are not summed yet need no earlier collective for the common maximum.
    """
    if group is None or group.size() == 1:
        return statistics[:, None], picked
    num_picked, own = picked.shape[1], NUM_STATISTICS * group.rank()
    numbers = picked.new_zeros(picked.shape[0], num_picked + NUM_STATISTICS * group.size())
    numbers[:, :num_picked] = picked
    numbers[:, num_picked + own : num_picked + own + NUM_STATISTICS] = statistics
    dist.all_reduce(numbers, group=group)
    return numbers[:, num_picked:].unflatten(1, (group.size(), NUM_STATISTICS)), numbers[:, :num_picked]


@dataclass(frozen=True, slots=True)
class RowSums:
    """Of every row over all ranks, [N] each. log sum e^z is kept in two parts, lest the second's digits be lost."""

    reference: torch.Tensor  # c, the largest of the ranks'
    log_mass: torch.Tensor  # log sum e^(z - c)
    mean: torch.Tensor  # sum p (z - c)

    @property
    def entropy(self) -> torch.Tensor:
        return self.log_mass - self.mean

    def logprobs(self, logits: torch.Tensor) -> torch.Tensor:
        """Scaled logits [N, ...] -> log p."""
        shape = (-1, *[1] * (logits.ndim - 1))
        return (logits - self.reference.view(shape)) - self.log_mass.view(shape)


def merged(statistics: torch.Tensor) -> torch.Tensor:
    """[N, parts, NUM_STATISTICS] of parts of the vocabulary -> [N, NUM_STATISTICS] of them together."""
    references, masses, moments = statistics.unbind(-1)
    reference = references.amax(1)
    shift = references - reference[:, None]
    scale = shift.exp()
    moment = (scale * (moments + masses * shift)).sum(1)
    return torch.stack([reference, (scale * masses).sum(1), moment], 1)


def combine(statistics: torch.Tensor) -> RowSums:
    """[N, tp, NUM_STATISTICS] -> the sums over the whole vocabulary."""
    reference, mass, moment = merged(statistics).unbind(1)
    return RowSums(reference, mass.log(), moment / mass)
