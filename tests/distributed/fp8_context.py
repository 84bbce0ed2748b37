"""For fp8_cases.py: emulated FP8 in two context ranks against one process, in float64.

Of Transformer Engine's recipes delayed scaling alone reduces its amaxes over context ranks (Megatron's get_fp8_context;
pytorch/module/linear.py reduces the others' over tensor ranks under sequence parallel, and no further). Any other scale
is that of what a rank holds, so that a context degree changes
- under tensorwise, all rounding;
- under blockwise and mxfp8, the blocks along the tokens, which the weight gradient contracts, unless the slices of
  every sequence are whole blocks. Their scales are powers of two: another one rounds only what is some 2^15 times
  smaller than the largest of its block in another way.
One process that rounds each rank's tokens by themselves gives the same numbers in every case.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from unittest import mock

import numpy as np
import torch
from transformers import PretrainedConfig

from megatron_ac2.config_training import Fp8Config, ParallelConfig
from megatron_ac2.data.packing import pack
from megatron_ac2.model.build import build_model
from megatron_ac2.model.data_parallel import wrap_ddp
from megatron_ac2.model.fp8 import token_multiple
from megatron_ac2.model.fp8_linear import Fp8Linear
from megatron_ac2.parallel.context import held_positions, length_multiple
from megatron_ac2.parallel.topology import Topology, init_topology
from megatron_ac2.training.context_parallel import held_part, whole_values
from megatron_ac2.training.step import Loss, forward_backward, token_alignment
from megatron_ac2.types import PackedBatch
from tests.distributed.groups import leave_groups

CONTEXT = 2
# Slices of 128 tokens; and sequences that are padded each, before their whole is.
LENGTHS = {"whole blocks": (512,), "ragged": (150, 20, 39)}
VOCAB = 250
Fill = Callable[[torch.nn.Module, Topology], None]
Found = dict[str, tuple[torch.Tensor, dict[str, torch.Tensor]]]  # by batch: logits [T, V], gradients by name


def packed(lengths: tuple[int, ...], fp8: Fp8Config, times: int) -> PackedBatch:
    """As the trainer packs them for two context ranks; `times`: padded to a multiple of so much more."""
    rng = np.random.default_rng(sum(lengths))
    ids = [rng.integers(0, VOCAB, length) for length in lengths]
    cotangents = [rng.standard_normal((length - 1, VOCAB)) / 50 for length in lengths]
    align = times * token_alignment(SimpleNamespace(tensor=1, context=CONTEXT, on_cpu=True), fp8)
    starts, multiple = [1] * len(ids), length_multiple(CONTEXT)
    return pack(ids, {"cotangents": cotangents}, starts, align, 0, length_multiple=multiple)


def run(
    hf_config: PretrainedConfig, fill: Fill, recipe: str, context: int, by_shares: bool = False, times: int = 1
) -> tuple[Found, dict[str, torch.Tensor]]:
    """Second pass over the batches, for delayed scales move; these scales, and their history."""
    parallel = ParallelConfig(context=context)
    topology = init_topology(parallel, seed=0, timeout_minutes=2)
    fp8 = Fp8Config(recipe, emulate=True, amax_history_len=4)
    model = wrap_ddp(build_model(hf_config, topology, parallel, torch.float64, seed=3, fp8=fp8), False)
    fill(model.module, topology)
    batches = {name: packed(lengths, fp8, times) for name, lengths in LENGTHS.items()}
    held = {name: held_part(batch, topology) for name, batch in batches.items()}
    assert all(part.token_ids.shape[1] % token_multiple(fp8) == 0 for part in held.values())
    with rounding_by_shares(list(batches.values()) if by_shares else []):
        for _ in range(2):
            found = {name: logits_and_gradients(model, part, topology) for name, part in held.items()}
    scales = {name: buffer.clone() for name, buffer in model.module.named_buffers() if "fp8" in name}
    leave_groups()
    return found, scales


def logits_and_gradients(
    model: torch.nn.Module, batch: PackedBatch, topology: Topology
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    logits: list[torch.Tensor] = []

    def loss(output: torch.Tensor, batch: PackedBatch) -> Loss:
        logits.append(whole_values(output[0, :, :VOCAB].detach(), batch, topology))
        return (output[..., :VOCAB] * batch.fields["cotangents"].to(output)).sum(), batch.loss_mask.sum(), {}

    forward_backward(model, [batch], loss, topology)
    return logits[0], {name: parameter.main_grad.clone() for name, parameter in model.named_parameters()}


@contextmanager
def rounding_by_shares(batches: list[PackedBatch]) -> Iterator[None]:
    """In one process: of whole batches, which differ in their lengths, each rank's tokens are rounded by themselves."""
    lengths = [batch.token_ids.shape[1] for batch in batches]
    shares = {
        length: held_positions(batch.cu_seqlens, CONTEXT, length // CONTEXT)
        for length, batch in zip(lengths, batches, strict=True)
    }
    assert len(shares) == len(batches)
    whole = Fp8Linear.round

    def round_shares(
        layer: Fp8Linear, matrix: torch.Tensor, operand: str, record: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if operand == "weight":
            return whole(layer, matrix, operand, record)
        copies = torch.empty_like(matrix), torch.empty_like(matrix)
        for share in shares[len(matrix)]:
            for copy, rounded in zip(copies, whole(layer, matrix[share], operand, record), strict=True):
                copy[share] = rounded
        return copies

    with mock.patch.object(Fp8Linear, "round", round_shares if batches else whole):
        yield


def differences(found: Found, expected: Found, name: str) -> tuple[float, float]:
    """Relative Frobenius differences of a batch: of its logits, and the largest of its gradients."""
    (logits, gradients), (other_logits, other_gradients) = found[name], expected[name]
    pairs = [(gradients[parameter], other) for parameter, other in other_gradients.items()]
    of_gradients = max(((a - b).norm() / b.norm()).item() for a, b in pairs)
    return ((logits - other_logits).norm() / other_logits.norm()).item(), of_gradients


def check_context(hf_config: PretrainedConfig, fill: Fill) -> None:
    shared, scales = run(hf_config, fill, "delayed", CONTEXT)
    alone, expected = run(hf_config, fill, "delayed", 1)
    assert max(max(differences(shared, alone, name)) for name in LENGTHS) <= 1e-6
    _, of_more_padding = run(hf_config, fill, "delayed", CONTEXT, times=2)
    assert scales and scales.keys() == expected.keys() == of_more_padding.keys()
    for name, buffer in scales.items():
        torch.testing.assert_close(buffer, expected[name], rtol=1e-6, atol=0)
        torch.testing.assert_close(of_more_padding[name], buffer, rtol=1e-6, atol=0)
    for recipe in ("tensorwise", "blockwise"):
        shared, _ = run(hf_config, fill, recipe, CONTEXT)
        alone, _ = run(hf_config, fill, recipe, 1)
        by_shares, _ = run(hf_config, fill, recipe, 1, by_shares=True)
        for name in LENGTHS:
            assert max(differences(shared, by_shares, name)) <= 1e-6, (recipe, name)
            logits, gradients = differences(shared, alone, name)
            if recipe == "tensorwise":
                assert 1e-3 < logits < 0.3 and 1e-3 < gradients < 0.5, (recipe, name, logits, gradients)
            else:
                assert logits <= 1e-6, (recipe, name, logits)
                assert gradients <= (1e-6 if name == "whole blocks" else 1e-5), (recipe, name, gradients)
