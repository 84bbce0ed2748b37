"""The fused policy loss: hidden states in, loss and gradients out; logits never exist beyond a tile of tokens.

For a tile: logits against this rank's shard of the output weight; log-probs and entropy, shared between tensor ranks;
the objective, on these skinny numbers; its derivatives by them are coefficients of d loss / d logits, which become
d(hidden) and d(weight) while the tile's exp(logits) is still there. Forward and backward are one walk over the tokens;
`loss.backward()` only multiplies by the gradient that arrives. Whatever a loss does to log-probs and entropies (clip,
importance weights, score centering, KL, renormalisation on a filtered support) is the objective's own and thus exact.

Memory beside d(hidden) and d(weight): one tile, whatever T. One collective a tile and none in backward: an
all-reduce of 1 + k + 3 tp numbers a token, fp32 (fp64 for fp64): at tp 2, 28 bytes a token for k = 0.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_ac2.kernels.chunk_loss_backend import Backend
from megatron_ac2.kernels.chunk_loss_gradients import Attached, Gradients, Slopes
from megatron_ac2.kernels.chunk_loss_walk import Head, Walk
from megatron_ac2.kernels.vocab_logprobs import TokenLogprobs

# (scores of some of the loss's rows, which of them) -> (sum of their losses, metric sums; "*_max" are maxima).
Objective = Callable[[TokenLogprobs, slice], tuple[Tensor, dict[str, Tensor]]]


@dataclass(frozen=True, slots=True)
class ChunkLoss:
    loss: Tensor  # [], differentiable by hidden and weight
    scores: TokenLogprobs  # of the rows, detached
    metrics: dict[str, Tensor]


def chunk_loss(
    hidden: Tensor,
    head: Head,
    labels: Tensor,
    objective: Objective,
    *,
    top_ids: Tensor | None = None,
    rows: Tensor | None = None,
    token_local: bool = True,
    entropy_gradient: bool = False,
    weight_gradient_dtype: torch.dtype | None = None,
    tile_bytes: int | None = None,
    backend: Backend = "auto",
) -> ChunkLoss:
    """The objective's loss over tokens, with its gradients; the logits are never materialised.

    hidden [T, H]: of all tokens on each tensor rank (gathered over sequence parallel). labels int64[T], top_ids
    int64[T, k]: in [0, vocab_size), on whichever rank; ids may repeat. rows int64[R]: the positions that carry loss,
    distinct; the others cost nothing and their hidden states get gradient exactly 0. None: all.

    objective(scores, part): `scores` are leaves, of rows[part]; it must be plain torch, give the same on every tensor
    rank, and read tensors of its own that are ordered like `rows`. It is called once a tile. Rows to which it gives no
    slope (clipped, advantage 0, masked) cost the forward product alone. token_local False: it is called once
    for all rows, for losses that look at whole sequences; the logits are then computed twice. entropy_gradient: the
    loss depends on scores.entropy; costs a second exp. Nothing of an objective that reads scores.top but gives it no
    gradient is lost.

    d(hidden) is this rank's part: its sum over tensor ranks is the gradient, and whatever made `hidden` full takes it
    (Megatron's copy to, or gather from, the tensor-parallel region). d(weight) is of this rank's rows. It is
    accumulated in weight_gradient_dtype: None means fp32 where several tiles add to a half-precision weight's, else
    the weight's. Half precision: rows are accumulated in fp32, and scores, loss and metrics are fp32.
    tile_bytes: None means what suits the device. backend: of the tiles, see chunk_loss_backend.py.
    Raises ValueError for an entropy gradient without `entropy_gradient`.
    """
    walk = Walk(hidden.detach(), head, labels, top_ids, rows, tile_bytes, backend)
    gradients = None
    if torch.is_grad_enabled() and (hidden.requires_grad or head.weight.requires_grad):
        gradients = Gradients(hidden, head.weight, weight_gradient_dtype, len(walk.parts))
    run = _one_walk if token_local else _two_walks
    with torch.no_grad():
        loss, scores, metrics = run(walk, objective, gradients, entropy_gradient)
    if gradients is not None:
        loss = Attached.apply(hidden, head.weight, loss, gradients.finish())
    return ChunkLoss(loss, scores, metrics)


@torch.no_grad()
def chunk_scores(
    hidden: Tensor,
    head: Head,
    labels: Tensor,
    *,
    top_ids: Tensor | None = None,
    rows: Tensor | None = None,
    tile_bytes: int | None = None,
    backend: Backend = "auto",
) -> TokenLogprobs:
    """The forward half of `chunk_loss`, the same numbers: log-probs and entropies of the rows, without gradients."""
    walk = Walk(hidden, head, labels, top_ids, rows, tile_bytes, backend)
    tile = walk.tile(gradients=False)
    return _joined([walk.score(tile, part)[0] for part in walk.parts or [slice(0, 0)]])


def _one_walk(walk: Walk, objective: Objective, gradients: Gradients | None, entropy_gradient: bool):  # type: ignore[no-untyped-def]
    tile = walk.tile(gradients is not None, entropy_gradient)
    losses, found, metrics = [], [], {}
    for part in walk.parts or [slice(0, 0)]:
        scores, sums = walk.score(tile, part)
        loss, signals, slopes = _evaluate(objective, scores, part, entropy_gradient)
        live = slopes.live(part) if gradients is not None else None
        if live is not None:
            if isinstance(live.kept, Tensor):
                tile.keep(live.kept)
            gradients.add(walk, tile, live, scores, sums, slopes)
        losses.append(loss)
        found.append(scores)
        _add_metrics(metrics, signals)
    return torch.stack(losses).sum(), _joined(found), metrics


def _two_walks(walk: Walk, objective: Objective, gradients: Gradients | None, entropy_gradient: bool):  # type: ignore[no-untyped-def]
    tile = walk.tile(gradients=False)
    found, sums = zip(*(walk.score(tile, part) for part in walk.parts or [slice(0, 0)]), strict=True)
    scores = _joined(found)
    loss, metrics, slopes = _evaluate(objective, scores, slice(0, len(scores.labels)), entropy_gradient)
    if gradients is not None:
        del tile
        tile = walk.tile(True, entropy_gradient)
        for part, own_scores, own_sums in zip(walk.parts, found, sums, strict=False):
            live = slopes[part].live(part)
            if live is not None:
                tile.refill(walk.inputs(live.where), (own_sums.reference + own_sums.log_mass)[live.kept])
                gradients.add(walk, tile, live, own_scores, own_sums, slopes[part])
    return loss, scores, metrics


def _evaluate(
    objective: Objective, scores: TokenLogprobs, part: slice, entropy_gradient: bool
) -> tuple[Tensor, dict[str, Tensor], Slopes]:
    """The objective's loss [] and metrics, detached, and its derivatives by the scores."""
    leaves = [x.detach().clone().requires_grad_() for x in (scores.labels, scores.entropy, scores.top) if x is not None]
    with torch.enable_grad():
        loss, metrics = objective(TokenLogprobs(*leaves, *[None] * (3 - len(leaves))), part)
        found = [None] * len(leaves)
        if loss.requires_grad:
            found = torch.autograd.grad(loss, leaves, allow_unused=True)
    slopes = [torch.zeros_like(leaf) if slope is None else slope for leaf, slope in zip(leaves, found, strict=True)]
    if not entropy_gradient and bool(slopes[1].any()):
        raise ValueError("the objective has a gradient by the entropy: pass entropy_gradient=True")
    logprobs = torch.cat([slopes[0][:, None], *slopes[2:]], 1)
    return loss.detach(), {name: value.detach() for name, value in metrics.items()}, Slopes(logprobs, slopes[1])


def _joined(found: list[TokenLogprobs] | tuple[TokenLogprobs, ...]) -> TokenLogprobs:
    top = None if found[0].top is None else torch.cat([scores.top for scores in found])
    return TokenLogprobs(torch.cat([x.labels for x in found]), torch.cat([x.entropy for x in found]), top)


def _add_metrics(total: dict[str, Tensor], found: dict[str, Tensor]) -> None:
    for name, value in found.items():
        if name not in total:
            total[name] = value
        else:
            total[name] = torch.maximum(total[name], value) if name.endswith("_max") else total[name] + value
