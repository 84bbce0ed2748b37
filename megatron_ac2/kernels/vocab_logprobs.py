"""Log-probs and entropy of next tokens from logits over a tensor-parallel vocabulary: the naive twin of chunk_loss.py.

The contract of the seam is `token_logprobs`: forward, log-probs of 1 + k chosen tokens a position and the entropy;
backward, one coefficient for each of those numbers in, d logits out, in one pass. Rows are walked in tiles, so that
fp32 copies never exceed one tile. The backward pass keeps the logits themselves, the ids and two numbers a row, and
recomputes the softmax.

One collective a call, and none in backward: an all-reduce of 1 + k + 3 tp numbers a row, fp32 (fp64 for fp64 logits).
At tp 8 that is 100 bytes a token for k = 0 and 612 for k = 128, beside 2 V / tp = 38,000 of bf16 logits for Qwen3.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from megatron_ac2.kernels.vocab_shards import (
    NO_COLUMNS,
    NUM_STATISTICS,
    accumulator_of,
    combine,
    localise,
    own_columns,
    share,
)

OUTSIDE_LOGPROB = -1e4  # of a token that sampling had filtered out: its exp is 0, and 0 times it is 0 and not NaN
_TILE_ELEMENTS = 1 << 24  # 64 MiB of fp32: large enough to keep a GPU busy, small beside the logits


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Under p = softmax(logits / temperature) over the whole vocabulary, each differentiable."""

    labels: torch.Tensor  # [...], log p of the label
    entropy: torch.Tensor  # [...], in nats
    top: torch.Tensor | None  # [..., k], log p of the recorded tokens; None where none were given


def token_logprobs(
    logits: torch.Tensor,
    labels: torch.Tensor,
    tp_group: dist.ProcessGroup | None,
    temperature: float,
    vocab_size: int,
    top_ids: torch.Tensor | None = None,
) -> TokenLogprobs:
    """Log p of the label and of k recorded tokens, and the entropy, at each position.

    `logits` [..., V / tp] holds this tensor rank's columns; columns from `vocab_size` on are padding: probability 0,
    gradient 0. `labels` int64 [...] and `top_ids` int64 [..., k] lie in [0, vocab_size), on whichever rank; ids may
    repeat within a row, the label among them. Accumulates in fp32 (fp64 for fp64 logits) and returns that type, the
    same bits on every tensor rank. `tp_group` None means that the whole vocabulary is here. With z = logits /
    temperature and coefficients g of the log-probs of ids j, g_H of the entropy H, the gradient is
    d/dz_v = sum_j g_j [v = j] - p_v sum_j g_j - g_H p_v (log p_v + H); there is no second derivative.
    """
    rows, ids = logits.reshape(-1, logits.shape[-1]), labels.reshape(-1, 1)
    if top_ids is not None:
        ids = torch.cat([ids, top_ids.reshape(ids.shape[0], top_ids.shape[-1])], 1)
    logprobs, entropy = _PickedLogprobs.apply(rows, ids, tp_group, temperature, vocab_size)
    top = None if top_ids is None else logprobs[:, 1:].view(top_ids.shape)
    return TokenLogprobs(logprobs[:, 0].view(labels.shape), entropy.view(labels.shape), top)


def restricted_logprobs(
    label_logprobs: torch.Tensor, top_logprobs: torch.Tensor, support: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs [...] and [..., k], renormalised on the tokens that top-p or top-k had left: log p - log sum_S p.

    `top_logprobs` [..., k] are of distinct tokens over the whole vocabulary, `support` bool [..., k] says which of them
    S holds; S must lie within the k. The others get OUTSIDE_LOGPROB and gradient 0, whatever they hold. Where S is
    empty (padding), the label stays as it is. A label outside of S (no sampled token is) gets the same finite
    difference, which may then be above 0. Differentiable; half precision is computed in fp32.
    """
    accumulator = accumulator_of(top_logprobs)
    top = top_logprobs.to(accumulator).masked_fill(~support, NO_COLUMNS)
    log_mass = torch.where(support.any(-1), top.logsumexp(-1), 0.0)
    restricted = (top - log_mass[..., None]).masked_fill(~support, OUTSIDE_LOGPROB)
    return label_logprobs.to(accumulator) - log_mass, restricted


class _PickedLogprobs(torch.autograd.Function):
    """rows [N, V / tp], ids [N, K] -> logprobs [N, K], entropy [N]. With z = logits / temperature, L = log sum exp z:

    log p_j = z_j - L, H = L - sum_v p_v z_v, d log p_j / dz_v = [v = j] - p_v, dH / dz_v = -p_v (log p_v + H).
    """

    @staticmethod
    def forward(ctx, rows, ids, group, temperature, vocab_size):  # type: ignore[no-untyped-def]
        columns, first = own_columns(rows.shape[1], group, vocab_size)
        statistics, picked = _local_parts(rows, ids - first, columns, temperature)
        statistics, picked = share(statistics, picked, group)
        sums = combine(statistics)
        log_norm, entropy = sums.reference + sums.log_mass, sums.entropy
        ctx.save_for_backward(rows, ids, log_norm, entropy)
        ctx.first, ctx.columns, ctx.temperature = first, columns, temperature
        return sums.logprobs(picked), entropy

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_logprobs, grad_entropy):  # type: ignore[no-untyped-def]
        rows, ids, log_norm, entropy = ctx.saved_tensors
        columns, total = ctx.columns, grad_logprobs.sum(1)
        gradient = torch.zeros_like(rows)
        for tile in _tiles(rows) if columns else ():
            logp = _scaled(rows[tile, :columns], ctx.temperature) - log_norm[tile, None]
            factor = logp + entropy[tile, None]
            factor.mul_(-grad_entropy[tile, None]).sub_(total[tile, None])
            factor.mul_(logp.exp_())
            # The label is often among the recorded ids, which are distinct. Adding it in a step of its own leaves no
            # order of additions to chance on a GPU.
            for part in (slice(0, 1), slice(1, None)):
                local, own = localise(ids[tile, part] - ctx.first, columns)
                factor.scatter_add_(1, local, grad_logprobs[tile, part].masked_fill(~own, 0.0))
            gradient[tile, :columns] = factor.div_(ctx.temperature)
        return gradient, None, None, None, None


def _tiles(rows: torch.Tensor) -> list[slice]:
    size = max(1, _TILE_ELEMENTS // rows.shape[1])
    return [slice(start, start + size) for start in range(0, rows.shape[0], size)]


def _scaled(rows: torch.Tensor, temperature: float) -> torch.Tensor:
    return rows.to(accumulator_of(rows)) / temperature


def _local_parts(
    rows: torch.Tensor, ids: torch.Tensor, columns: int, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """([N, 3]: this rank's maximum m, sum e^(z - m), sum e^(z - m) (z - m); [N, K]: z of the ids, 0 if not here)."""
    statistics = torch.zeros(rows.shape[0], NUM_STATISTICS, dtype=accumulator_of(rows), device=rows.device)
    picked = statistics.new_zeros(ids.shape)
    if columns == 0:
        statistics[:, 0] = NO_COLUMNS
        return statistics, picked
    for tile in _tiles(rows):
        scaled = _scaled(rows[tile, :columns], temperature)
        local, own = localise(ids[tile], columns)
        picked[tile] = scaled.gather(1, local).masked_fill_(~own, 0.0)
        maximum = scaled.amax(1)
        scaled.sub_(maximum[:, None])
        weights = scaled.exp()
        mass = weights.sum(1)
        statistics[tile] = torch.stack([maximum, mass, weights.mul_(scaled).sum(1)], 1)
    return statistics, picked
