"""Labels of a value head: where they sit in a packed batch, what each weighs, and the loss and moments of a head."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from megatron_ac2.algorithm.value_losses import two_hot_value, value_bce_loss, value_mse_loss, value_two_hot_loss
from megatron_ac2.config_training import CriticConfig
from megatron_ac2.training import step
from megatron_ac2.types import DenseExample, PackedBatch


def places_of(context_len: int, response_len: int, positions: np.ndarray) -> np.ndarray:
    """Where in its context the values after the first `positions` tokens of a response are read: int64[k].

    Position 0 is the last token of what comes before the response. Raises ValueError for positions outside of the
    response, or where nothing comes before it.
    """
    positions = np.asarray(positions, dtype=np.int64)
    first = 0 if context_len > response_len else 1
    if len(positions) and (positions.min() < first or positions.max() > response_len):
        raise ValueError(f"values lie after {first} to {response_len} response tokens, found {positions}")
    return context_len - response_len - 1 + positions


def check_labels(example: DenseExample) -> None:
    """Raises ValueError for labels that do not fit their positions."""
    positions, targets = np.asarray(example.positions), _as_rows(example.targets)
    if len(np.unique(positions)) != len(positions):
        raise ValueError(f"labels of one response must be at distinct positions, found {positions}")
    if targets.ndim != 2 or len(targets) != len(positions):
        raise ValueError(f"{len(positions)} labels, but targets of shape {np.shape(example.targets)}")
    if example.mask is not None:
        mask = _as_rows(example.mask)
        if mask.shape != targets.shape:
            raise ValueError(f"mask: found shape {mask.shape}, that of the targets is {targets.shape}")
        if not mask.any(axis=1).all():
            raise ValueError("mask: found a label without any target; leave its position out")
    if example.old_values is not None and np.shape(example.old_values) != positions.shape:
        raise ValueError(f"{len(positions)} labels, but old_values of shape {np.shape(example.old_values)}")


def label_fields(
    batch: PackedBatch, examples: Sequence[DenseExample], places: Sequence[np.ndarray], scale: float
) -> dict[str, torch.Tensor]:
    """What `label_loss` reads of `examples`, packed in this order: `targets` and `target_weights` float32[1, T, N], N
    the most targets of a row here, and `old_values` float32[1, T], NaN where there is none. `places`: see `places_of`.

    The N weights of a labelled position add up to its example's weight times `scale`.
    """
    shape = (*batch.loss_mask.shape, max([1, *(_as_rows(example.targets).shape[1] for example in examples)]))
    targets, weights = torch.zeros(shape), torch.zeros(shape)
    old_values = torch.full(shape[:2], torch.nan)
    starts = batch.cu_seqlens.tolist()
    for example, own, start in zip(examples, places, starts, strict=False):  # the rest is padding
        rows, shares = _label_rows(example)
        targets[0, start + own, : rows.shape[1]] = torch.from_numpy(rows)
        weights[0, start + own, : rows.shape[1]] = torch.from_numpy(shares) * (example.weight * scale)
        if example.old_values is not None:
            old_values[0, start + own] = torch.as_tensor(example.old_values, dtype=torch.float32)
    return {"targets": targets, "target_weights": weights, "old_values": old_values}


def _as_rows(values: np.ndarray) -> np.ndarray:
    values = np.asarray(values)
    return values[:, None] if values.ndim == 1 else values


def _label_rows(example: DenseExample) -> tuple[np.ndarray, np.ndarray]:
    """Targets float32[k, N], 0 where masked, and each one's share of its row's weight float32[k, N]."""
    targets = _as_rows(example.targets).astype(np.float32)
    mask = np.ones(targets.shape, dtype=bool) if example.mask is None else _as_rows(example.mask).astype(bool)
    return np.where(mask, targets, np.float32(0)), (mask / mask.sum(axis=1, keepdims=True)).astype(np.float32)


def head_values(head: str, output: torch.Tensor) -> torch.Tensor:
    """Values [...] in [0, 1] of a head's logits [..., num_outputs]. head: bce | mse | two_hot."""
    return two_hot_value(output) if head == "two_hot" else output[..., 0].sigmoid()


def label_loss(config: CriticConfig, output: torch.Tensor, batch: PackedBatch) -> step.Loss:
    """Of logits [1, T, num_outputs] at the labels of `label_fields`: the losses of a position's targets are averaged.

    The metrics are the moments of the value against the mean target of its position.
    """
    targets, weights = batch.fields["targets"], batch.fields["target_weights"]
    row_weights = weights.sum(-1)
    # Before the sigmoid, whose gradient at a masked NaN would be NaN.
    output = output.masked_fill((row_weights == 0).unsqueeze(-1), 0.0)
    loss = _loss(config, output, targets, weights, batch.fields["old_values"])
    mean_targets = (weights * targets).sum(-1) / torch.where(row_weights > 0, row_weights, 1.0)
    values = head_values(config.head, output.detach())
    return loss, (row_weights > 0).sum(), value_sums(values, mean_targets, row_weights)


def _loss(
    config: CriticConfig, output: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor, old_values: torch.Tensor
) -> torch.Tensor:
    if config.head == "two_hot":
        return value_two_hot_loss(output.unsqueeze(-2), targets, weights)
    if config.head == "bce":
        return value_bce_loss(output, targets, weights)
    values = head_values(config.head, output)
    old_values = torch.where(old_values.isnan(), values.detach(), old_values)  # no old value: nothing to clip to
    return value_mse_loss(values.unsqueeze(-1), targets, weights, old_values.unsqueeze(-1), config.value_clip)


def value_sums(values: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor) -> dict[str, torch.Tensor]:
    """Weighted moments of values against targets, all of one shape, that `value_metrics` reads."""
    values, targets, weights = values.double(), targets.double(), weights.double()
    errors = targets - values
    moments = {
        "weight": torch.ones_like(values),
        "abs_error": errors.abs(),
        "error": errors,
        "error_squared": errors.square(),
        "target": targets,
        "target_squared": targets.square(),
        "value": values,
    }
    return {name: (weights * moment).sum() for name, moment in moments.items()}


def value_metrics(sums: Mapping[str, float]) -> dict[str, float]:
    weight = sums["weight"] or 1.0
    mean = {name: value / weight for name, value in sums.items()}
    variance = mean["target_squared"] - mean["target"] ** 2
    residual = mean["error_squared"] - mean["error"] ** 2
    return {
        "loss": sums["loss"],
        "mae": mean["abs_error"],
        "explained_variance": 1 - residual / variance if variance > 1e-12 else 0.0,
        "mean_value": mean["value"],
        "mean_target": mean["target"],
    }
