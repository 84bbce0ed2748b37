"""Ragged packed sequences through a model that returns logits: every position's logits, and the gradient they give."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.utils import get_batch_on_this_cp_rank

from megatron_ac2.data.packing import pack
from megatron_ac2.parallel.context import length_multiple
from megatron_ac2.parallel.topology import Topology
from megatron_ac2.training import step
from megatron_ac2.training.context_parallel import held_part, whole_values
from megatron_ac2.types import PackedBatch
from tests.distributed import training_reference as case

MICROBATCHES = ([1, 7, 2, 16, 5], [], [33], [1])  # lengths of their sequences


def check_ragged(bench: Any) -> None:
    """Sequences of one token, of lengths that no slice divides, and none at all, on every data rank alike."""
    rng, vocab, topology = np.random.default_rng(4), bench.hf_config.vocab_size, bench.topology
    sequences = [[rng.integers(0, vocab, n).astype(np.int32) for n in lengths] for lengths in MICROBATCHES]
    slopes = [[rng.standard_normal((n - 1, vocab)).astype(np.float32) for n in lengths] for lengths in MICROBATCHES]
    batches = [packed(ids, weights, vocab, topology) for ids, weights in zip(sequences, slopes, strict=True)]
    parts = [held_part(batch, topology) for batch in batches]
    bench.reload()
    found = step.forward_only(bench.model, parts, lambda out, part: full_logits(out, part, topology, vocab), topology)
    expected, gradients = reference(bench.folder, sequences, slopes)
    for batch, logits, of_sequences in zip(batches, found, expected, strict=topology.is_last_stage):
        for start, wanted in zip(batch.cu_seqlens.tolist(), of_sequences, strict=False):
            assert (logits[start : start + len(wanted)] - wanted).abs().max() <= 1e-5
    metrics = step.forward_backward(bench.model, parts, lambda out, part: dot(out, part, topology), topology)
    assert metrics["count"] == topology.data * sum(n - 1 for lengths in MICROBATCHES for n in lengths)
    bench.probe.step()
    bench.assert_gradients(gradients)
    check_cut(topology)


def check_cut(topology: Topology) -> None:
    """One sequence is cut as Megatron's own data loading cuts it."""
    ids = torch.arange(6 * topology.context)
    whole = pack([ids.numpy()], {}, [len(ids)], 1, 0, length_multiple=length_multiple(topology.context))
    named = {"cp_group": topology.pg.cp}
    if "is_hybrid_cp" in inspect.signature(get_batch_on_this_cp_rank).parameters:  # Megatron-Core 0.19 insists on it
        named["is_hybrid_cp"] = False
    expected = get_batch_on_this_cp_rank({"tokens": ids[None]}, **named)
    assert torch.equal(held_part(whole, topology).token_ids, expected["tokens"])


def packed(sequences: list[np.ndarray], slopes: list[np.ndarray], vocab: int, topology: Topology) -> PackedBatch:
    template = {"slopes": np.zeros((0, vocab), np.float32)}
    align, multiple = step.token_alignment(topology), length_multiple(topology.context)
    return pack(sequences, {"slopes": slopes}, [1] * len(sequences), align, 0, template, multiple)


def full_logits(output: torch.Tensor, part: PackedBatch, topology: Topology, vocab: int) -> torch.Tensor:
    """[T, vocab] of the whole batch."""
    columns = [torch.empty_like(output[0]) for _ in range(topology.tensor)]
    dist.all_gather(columns, output[0].contiguous(), group=topology.pg.tp)
    return whole_values(torch.cat(columns, -1)[:, :vocab], part, topology)


def dot(output: torch.Tensor, part: PackedBatch, topology: Topology) -> step.Loss:
    width = output.shape[-1]
    slopes = F.pad(part.fields["slopes"][0], (0, topology.tensor * width - part.fields["slopes"].shape[-1]))
    mine = slopes[:, topology.tensor_rank * width :][:, :width]
    return (output[0] * mine).sum(), part.loss_mask.sum(), {}


def reference(
    folder: Any, sequences: list[list[np.ndarray]], slopes: list[list[np.ndarray]]
) -> tuple[list[list[torch.Tensor]], dict[str, torch.Tensor]]:
    model = case.load_reference_model(folder)
    logits = [[model(torch.from_numpy(ids.astype(np.int64))[None]).logits[0] for ids in group] for group in sequences]
    pairs = [pair for group in zip(logits, slopes, strict=True) for pair in zip(*group, strict=True)]
    total = sum((found[:-1] * torch.from_numpy(weights)).sum() for found, weights in pairs)
    loss = total / sum(len(weights) for _, weights in pairs)
    return [[x.detach() for x in group] for group in logits], case.gradients_of(model, loss)
