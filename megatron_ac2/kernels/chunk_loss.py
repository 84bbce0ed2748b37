"""Log-prob and entropy of next tokens over a tensor-parallel vocabulary: the one seam where a fused op goes later.

Rows are walked in tiles, so that fp32 copies never exceed one tile. The backward pass keeps the logits themselves and
three numbers a row, and recomputes the softmax. One collective a call: an all-gather of four numbers a row.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

_TILE_ELEMENTS = 1 << 24  # 64 MiB of fp32: large enough to keep a GPU busy, small beside the logits
_FLOOR = -1e30  # the maximum of no columns; finite, so that 0 * (_FLOOR - max) is 0 and not NaN


def vocab_parallel_logprobs_and_entropy(
    logits: torch.Tensor,
    labels: torch.Tensor,
    tp_group: dist.ProcessGroup | None,
    temperature: float,
    vocab_size: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Under p = softmax(logits / temperature): (log p[label] [...], entropy in nats [...]), both differentiable.

    `logits` [..., V / tp] holds this tensor rank's columns; columns from `vocab_size` on are padding: probability 0,
    gradient 0. `labels` int64 [...] lie in [0, vocab_size). Accumulates in fp32 (fp64 for fp64 logits) and returns that
    type, the same bits on every tensor rank. `tp_group` None means that the whole vocabulary is here.
    """
    rows = logits.reshape(-1, logits.shape[-1])
    logprobs, entropy = _LogprobsAndEntropy.apply(rows, labels.reshape(-1), tp_group, temperature, vocab_size)
    return logprobs.view(labels.shape), entropy.view(labels.shape)


class _LogprobsAndEntropy(torch.autograd.Function):
    """rows [N, V / tp], labels [N] -> logprobs [N], entropy [N]. With z = logits / temperature, L = log sum exp z:

    log p_y = z_y - L, H = L - sum_v p_v z_v, d log p_y / dz_v = [v = y] - p_v, dH / dz_v = -p_v (log p_v + H).
    """

    @staticmethod
    def forward(ctx, rows, labels, group, temperature, vocab_size):  # type: ignore[no-untyped-def]
        columns, first = _own_columns(rows.shape[1], group, vocab_size)
        parts = _local_parts(rows, labels - first, columns, temperature)
        log_norm, label_logit, mean_logit = _combine(_gather(parts, group))
        entropy = log_norm - mean_logit
        ctx.save_for_backward(rows, labels, log_norm, entropy)
        ctx.first, ctx.columns, ctx.temperature = first, columns, temperature
        return label_logit - log_norm, entropy

    @staticmethod
    def backward(ctx, grad_logprobs, grad_entropy):  # type: ignore[no-untyped-def]
        rows, labels, log_norm, entropy = ctx.saved_tensors
        columns = ctx.columns
        gradient = torch.zeros_like(rows)
        for tile in _tiles(rows):
            logp = _scaled(rows[tile, :columns], ctx.temperature) - log_norm[tile, None]
            label, own = _local_labels(labels[tile] - ctx.first, columns)
            # p (-g_logp - g_H (log p + H)), plus g_logp at the label
            factor = logp + entropy[tile, None]
            factor.mul_(-grad_entropy[tile, None]).sub_(grad_logprobs[tile, None])
            factor.mul_(logp.exp_())
            if columns:
                factor.scatter_add_(1, label[:, None], (grad_logprobs[tile] * own)[:, None])
            gradient[tile, :columns] = factor.div_(ctx.temperature)
        return gradient, None, None, None, None


def _own_columns(width: int, group: dist.ProcessGroup | None, vocab_size: int) -> tuple[int, int]:
    """(how many of this rank's columns are real, the vocabulary id of its first)."""
    first = width * (0 if group is None else group.rank())
    return min(max(vocab_size - first, 0), width), first


def _tiles(rows: torch.Tensor) -> list[slice]:
    size = max(1, _TILE_ELEMENTS // rows.shape[1])
    return [slice(start, start + size) for start in range(0, rows.shape[0], size)]


def _scaled(rows: torch.Tensor, temperature: float) -> torch.Tensor:
    return rows.to(_accumulator(rows)) / temperature


def _accumulator(rows: torch.Tensor) -> torch.dtype:
    return torch.float64 if rows.dtype == torch.float64 else torch.float32


def _local_labels(labels: torch.Tensor, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(labels clamped into this rank's columns, which of them truly lie there)."""
    own = (labels >= 0) & (labels < columns)
    return labels.clamp(0, max(columns - 1, 0)), own


def _local_parts(rows: torch.Tensor, labels: torch.Tensor, columns: int, temperature: float) -> torch.Tensor:
    """[4, N]: this rank's maximum m, sum e^(z - m), sum e^(z - m) (z - m), and the label's logit (0 if not here)."""
    parts = torch.zeros(4, rows.shape[0], dtype=_accumulator(rows), device=rows.device)
    if columns == 0:
        parts[0] = _FLOOR
        return parts
    for tile in _tiles(rows):
        scaled = _scaled(rows[tile, :columns], temperature)
        label, own = _local_labels(labels[tile], columns)
        parts[3, tile] = scaled.gather(1, label[:, None]).squeeze(1) * own
        maximum = scaled.amax(1)
        scaled.sub_(maximum[:, None])
        weights = scaled.exp()
        parts[0, tile] = maximum
        parts[1, tile] = weights.sum(1)
        parts[2, tile] = weights.mul_(scaled).sum(1)
    return parts


def _gather(parts: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """[tp, 4, N] on every rank. Gathering, not reducing, needs no earlier collective for the common maximum."""
    if group is None or group.size() == 1:
        return parts[None]
    gathered = [torch.empty_like(parts) for _ in range(group.size())]
    dist.all_gather(gathered, parts, group=group)
    return torch.stack(gathered)


def _combine(parts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """[tp, 4, N] -> log sum exp z, the label's z, and sum_v p_v z_v, each [N]."""
    maxima, sums, moments, label_logits = parts.unbind(1)
    maximum = maxima.amax(0)
    shift = maxima - maximum
    scale = shift.exp()
    total = (scale * sums).sum(0)
    moment = (scale * (moments + sums * shift)).sum(0)
    return maximum + total.log(), label_logits.sum(0), maximum + moment / total
