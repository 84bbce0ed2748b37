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
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_ac2.kernels.chunk_loss_backend import Backend, Tile, default_tile_bytes, new_tile
from megatron_ac2.kernels.vocab_logprobs import TokenLogprobs
from megatron_ac2.kernels.vocab_shards import RowSums, accumulator_of, combine, own_columns, share

_ROW_MULTIPLE = 32
_NARROWED_AT_ONCE = 1 << 22  # elements

# (scores of some of the loss's rows, which of them) -> (sum of their losses, metric sums; "*_max" are maxima).
Objective = Callable[[TokenLogprobs, slice], tuple[Tensor, dict[str, Tensor]]]


@dataclass(frozen=True, slots=True)
class Head:
    """From hidden states to probabilities: softmax(hidden @ weight^T / temperature) over `vocab_size` tokens.

    weight [V / tp, H]: this tensor rank's rows, rank after rank; rows from `vocab_size` on are padding: probability 0,
    gradient 0. tp_group None: all of the vocabulary is here.
    """

    weight: Tensor
    vocab_size: int
    temperature: float = 1.0
    tp_group: dist.ProcessGroup | None = None


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
    rank, and read tensors of its own that are ordered like `rows`. It is called once a tile. token_local False: once
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
    walk = _Walk(hidden.detach(), head, labels, top_ids, rows, tile_bytes, backend)
    gradients = None
    if torch.is_grad_enabled() and (hidden.requires_grad or head.weight.requires_grad):
        gradients = _Gradients(hidden, head.weight, weight_gradient_dtype, len(walk.parts))
    run = _one_walk if token_local else _two_walks
    with torch.no_grad():
        loss, scores, metrics = run(walk, objective, gradients, entropy_gradient)
    if gradients is not None:
        loss = _Attached.apply(hidden, head.weight, loss, gradients)
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
    walk = _Walk(hidden, head, labels, top_ids, rows, tile_bytes, backend)
    tile = walk.tile(gradients=False)
    return _joined([walk.score(tile, part)[0] for part in walk.parts or [slice(0, 0)]])


class _Walk:
    """The tiles of one call and what every step on them needs."""

    def __init__(
        self, hidden: Tensor, head: Head, labels: Tensor, top_ids: Tensor | None, rows: Tensor | None,
        tile_bytes: int | None, backend: Backend,
    ):  # fmt: skip
        self.hidden, self.head, self.rows, self.backend = hidden, head, rows, backend
        self.has_top = top_ids is not None
        self.columns, first = own_columns(len(head.weight), head.tp_group, head.vocab_size)
        ids = labels[:, None] if top_ids is None else torch.cat([labels[:, None], top_ids], 1)
        ids = (ids if rows is None else ids[rows]) - first
        self.ids = ids.masked_fill_((ids < 0) | (ids >= self.columns), self.columns)
        tile_bytes = default_tile_bytes(hidden.device) if tile_bytes is None else tile_bytes
        # Of the shard with its padding, which is the same on every tensor rank: so are the tiles and their messages.
        self.parts = _parts(len(ids), tile_rows(len(head.weight), hidden.dtype, tile_bytes))

    def tile(self, gradients: bool, keep_logits: bool = False) -> Tile:
        num_rows = self.parts[0].stop if self.parts else 0
        return new_tile(
            self.backend, self.head.weight.detach(), self.columns, self.head.temperature, num_rows,
            gradients=gradients, keep_logits=keep_logits and gradients,
        )  # fmt: skip

    def inputs(self, part: slice) -> Tensor:
        return self.hidden[part] if self.rows is None else self.hidden[self.rows[part]]

    def score(self, tile: Tile, part: slice) -> tuple[TokenLogprobs, RowSums]:
        statistics, logits = tile.scores(self.inputs(part), self.ids[part])
        statistics, logits = share(statistics, logits, self.head.tp_group)
        sums = combine(statistics)
        logprobs = sums.logprobs(logits)
        return TokenLogprobs(logprobs[:, 0], sums.entropy, logprobs[:, 1:] if self.has_top else None), sums


class _Gradients:
    """d loss / d hidden and d loss / d weight, filled tile by tile, and handed out once."""

    def __init__(self, hidden: Tensor, weight: Tensor, dtype: torch.dtype | None, num_tiles: int):
        dtype = dtype or (accumulator_of(weight) if num_tiles > 1 else weight.dtype)
        self.hidden = torch.zeros_like(hidden) if hidden.requires_grad else None
        self.weight = torch.zeros_like(weight, dtype=dtype) if weight.requires_grad else None

    def add(self, walk: _Walk, tile: Tile, part: slice, scores: TokenLogprobs, sums: RowSums, slopes: _Slopes) -> None:
        if slopes.are_zero:
            return
        gradient = tile.gradients(
            walk.inputs(part), walk.ids[part], slopes.logprobs, slopes.entropy, (sums.reference, sums.log_mass),
            scores.entropy, self.weight, self.hidden is not None,
        )  # fmt: skip
        if gradient is not None:
            self.hidden[part if walk.rows is None else walk.rows[part]] = gradient


@dataclass(frozen=True, slots=True)
class _Slopes:
    """d loss / d scores."""

    logprobs: Tensor  # [n, 1 + k]
    entropy: Tensor  # [n]

    @property
    def are_zero(self) -> bool:
        return not bool(self.logprobs.any() | self.entropy.any())

    def __getitem__(self, part: slice) -> _Slopes:
        return _Slopes(self.logprobs[part], self.entropy[part])


def _one_walk(walk: _Walk, objective: Objective, gradients: _Gradients | None, entropy_gradient: bool):  # type: ignore[no-untyped-def]
    tile = walk.tile(gradients is not None, entropy_gradient)
    losses, found, metrics = [], [], {}
    for part in walk.parts or [slice(0, 0)]:
        scores, sums = walk.score(tile, part)
        loss, signals, slopes = _evaluate(objective, scores, part, entropy_gradient)
        if gradients is not None:
            gradients.add(walk, tile, part, scores, sums, slopes)
        losses.append(loss)
        found.append(scores)
        _add_metrics(metrics, signals)
    return torch.stack(losses).sum(), _joined(found), metrics


def _two_walks(walk: _Walk, objective: Objective, gradients: _Gradients | None, entropy_gradient: bool):  # type: ignore[no-untyped-def]
    tile = walk.tile(gradients=False)
    found, sums = zip(*(walk.score(tile, part) for part in walk.parts or [slice(0, 0)]), strict=True)
    scores = _joined(found)
    loss, metrics, slopes = _evaluate(objective, scores, slice(0, len(scores.labels)), entropy_gradient)
    if gradients is not None:
        del tile
        tile = walk.tile(True, entropy_gradient)
        for part, own_scores, own_sums in zip(walk.parts, found, sums, strict=False):
            if not slopes[part].are_zero:
                tile.refill(walk.inputs(part), own_sums.reference + own_sums.log_mass)
                gradients.add(walk, tile, part, own_scores, own_sums, slopes[part])
    return loss, scores, metrics


def _evaluate(
    objective: Objective, scores: TokenLogprobs, part: slice, entropy_gradient: bool
) -> tuple[Tensor, dict[str, Tensor], _Slopes]:
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
    return loss.detach(), {name: value.detach() for name, value in metrics.items()}, _Slopes(logprobs, slopes[1])


class _Attached(torch.autograd.Function):
    """The loss that was computed, with the gradients that were. They are handed out once, lest they be held twice."""

    @staticmethod
    def forward(ctx, hidden, weight, loss, gradients):  # type: ignore[no-untyped-def]
        ctx.gradients, ctx.dtypes = gradients, (hidden.dtype, weight.dtype)
        return loss.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx, scale):  # type: ignore[no-untyped-def]
        if ctx.gradients is None:
            raise RuntimeError("the gradients of a chunk loss are gone after one backward pass: call chunk_loss again")
        found, ctx.gradients = (ctx.gradients.hidden, ctx.gradients.weight), None
        return *(_scaled(x, scale, dtype) for x, dtype in zip(found, ctx.dtypes, strict=True)), None, None


def _scaled(gradient: Tensor | None, scale: Tensor, dtype: torch.dtype) -> Tensor | None:
    """gradient * scale in `dtype`, in the gradient's own memory: there is none for a second d(weight)."""
    if gradient is None:
        return None
    if gradient.dtype == dtype or gradient.element_size() < dtype.itemsize:
        # Looking at a number stalls a GPU, and spares a CPU a pass over [V, H].
        is_one = scale.device.type == "cpu" and scale.item() == 1
        return (gradient if is_one else gradient.mul_(scale)).to(dtype)
    wide = gradient.view(-1)
    narrow = wide.view(dtype)[: wide.numel()]
    for start in range(0, wide.numel(), _NARROWED_AT_ONCE):
        part = slice(start, start + _NARROWED_AT_ONCE)
        narrow[part] = (wide[part] * scale).to(dtype)  # later elements of `wide` lie behind all of this
    return narrow.view(gradient.shape)


def tile_rows(columns: int, dtype: torch.dtype, tile_bytes: int) -> int:
    """The most tokens whose logits, in `dtype`, are a tile of `tile_bytes`: a multiple of _ROW_MULTIPLE if it can."""
    most = max(1, tile_bytes // ((columns + 1) * dtype.itemsize))
    return most - most % _ROW_MULTIPLE if most > _ROW_MULTIPLE else most


def _parts(num_rows: int, most: int) -> list[slice]:
    """Slices of about equal size, at most `most`, multiples of _ROW_MULTIPLE where that allows it."""
    count = -(-num_rows // most)
    size = -(-num_rows // max(count, 1))
    size = min(most, -(-size // _ROW_MULTIPLE) * _ROW_MULTIPLE)
    return [slice(start, min(start + size, num_rows)) for start in range(0, num_rows, max(size, 1))]


def _joined(found: list[TokenLogprobs] | tuple[TokenLogprobs, ...]) -> TokenLogprobs:
    top = None if found[0].top is None else torch.cat([scores.top for scores in found])
    return TokenLogprobs(torch.cat([x.labels for x in found]), torch.cat([x.entropy for x in found]), top)


def _add_metrics(total: dict[str, Tensor], found: dict[str, Tensor]) -> None:
    for name, value in found.items():
        if name not in total:
            total[name] = value
        else:
            total[name] = torch.maximum(total[name], value) if name.endswith("_max") else total[name] + value
