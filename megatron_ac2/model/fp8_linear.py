"""Linear layers that round as an FP8 recipe would, on any device: an emulation, which computes in fp32 and is slow.

What Transformer Engine runs in FP8 is rounded here: the attention's and the feed-forward's matrices, their inputs and
their outputs' gradients; not embedding, output layer, router, norms or attention itself. Gradients are those of the
rounded network, with the rounding itself taken as the identity (straight-through). As in Transformer Engine:

- tensorwise: the scale is that of the tensor a rank holds. A sharded one (weights; inputs of row-parallel and gradients
  of column-parallel layers) has a scale a shard, so that a tensor degree changes the rounding. What sequence parallel
  gathers is rounded as a whole: its amax is reduced over tensor ranks. Over context ranks none is: each rounds its own
  tokens, so that a context degree changes the rounding as well.
- delayed: a scale from the amaxes of earlier training passes, the largest over tensor, data and context ranks. It
  starts at 1, and a pass without gradients neither records nor moves it. Recorded a microbatch, weights too
  (Transformer Engine rounds those once a step). An empty microbatch, which neither can tell from others, repeats a real
  sequence (data.packing.longest): no larger amax than that one's, though under `most_recent` perhaps in place of a
  larger one. History and scales are buffers, and so part of a checkpoint.
- blockwise, mxfp8: a scale a block. Shards of whole blocks round as the whole matrix does; where a context degree cuts
  sequences within blocks of tokens, the weight gradient's blocks are others, which tells in the smallest numbers alone.
"""

from __future__ import annotations

import copy
import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.spec_utils import ModuleSpec

from megatron_ac2.config_training import Fp8Config
from megatron_ac2.model.fp8 import backward_format
from megatron_ac2.model.fp8_rounding import Operand, largest, largest_magnitude, round_operand, round_scaled
from megatron_ac2.parallel.megatron_versions import parts_of, with_parts

_OPERANDS: tuple[Operand, ...] = ("input", "weight", "gradient")


@dataclass(frozen=True, slots=True)
class EmulatedFp8:
    """A recipe, and the ranks that share a delayed scale."""

    fp8: Fp8Config
    amax_group: dist.ProcessGroup | None

    def dtype(self, operand: Operand) -> torch.dtype:
        in_e5m2 = operand == "gradient" and backward_format(self.fp8) == "hybrid"
        return torch.float8_e5m2 if in_e5m2 else torch.float8_e4m3fn


class DelayedScales(torch.nn.Module):
    """One layer's scales under `delayed`, by operand, and the amaxes they come from: 0 where none is recorded yet."""

    def __init__(self, settings: EmulatedFp8):
        super().__init__()
        self.settings = settings
        self.register_buffer("scale", torch.ones(len(_OPERANDS)))
        self.register_buffer("amax_history", torch.zeros(len(_OPERANDS), settings.fp8.amax_history_len))

    def round(self, matrix: torch.Tensor, operand: Operand, record: bool) -> torch.Tensor:
        """Under the scale so far. With `record`, a collective of the amax group, the scale is then moved."""
        index, dtype = _OPERANDS.index(operand), self.settings.dtype(operand)
        rounded = round_scaled(matrix, self.scale[index], dtype)
        if record:
            self._record(index, largest_magnitude(matrix).float(), largest(dtype) / 2.0**self.settings.fp8.margin)
        return rounded

    def _record(self, index: int, amax: torch.Tensor, target: float) -> None:
        if self.settings.amax_group is not None:
            dist.all_reduce(amax, op=dist.ReduceOp.MAX, group=self.settings.amax_group)
        if amax == 0:  # an all-masked microbatch has gradients of 0, which say nothing
            return
        history = self.amax_history[index]
        history.copy_(torch.cat([history[1:], amax[None]]))
        chosen = amax if self.settings.fp8.amax_algorithm == "most_recent" else history.max()
        if chosen.isfinite():
            self.scale[index] = (torch.full_like(chosen, target) / chosen).clamp(max=torch.finfo(torch.float32).max)


class _RoundedProduct(torch.autograd.Function):
    """input [..., in] x weight [out, in] -> [..., out], all three products of rounded operands, in fp32 at least."""

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, weight: torch.Tensor, layer: Fp8Linear, record: bool) -> torch.Tensor:
        matrix = inputs.flatten(0, -2)
        forward_inputs, wgrad_inputs = layer.round(matrix, "input", record)
        forward_weight, dgrad_weight = layer.round(weight, "weight", record)
        ctx.save_for_backward(wgrad_inputs, dgrad_weight)
        ctx.layer, ctx.dtypes = layer, (inputs.dtype, weight.dtype)
        return (forward_inputs @ forward_weight.T).to(inputs.dtype).unflatten(0, inputs.shape[:-1])

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None, None]:
        wgrad_inputs, dgrad_weight = ctx.saved_tensors
        along_columns, along_rows = ctx.layer.round(gradient.flatten(0, -2), "gradient", True)
        input_gradient = (along_columns @ dgrad_weight).to(ctx.dtypes[0]).unflatten(0, gradient.shape[:-1])
        return input_gradient, (along_rows.T @ wgrad_inputs).to(ctx.dtypes[1]), None, None


class Fp8Linear(torch.nn.Module):
    """What the two parallel layers below share; the collectives around the product stay Megatron's."""

    def __init__(self, *args: Any, emulated: EmulatedFp8, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.emulated = emulated
        if emulated.fp8.recipe == "delayed":
            self.fp8 = DelayedScales(emulated).to(self.weight.device)

    def round(self, matrix: torch.Tensor, operand: Operand, record: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Copies of `matrix` for its two products; see fp8_rounding.BLOCKS."""
        if self.emulated.fp8.recipe == "delayed":
            rounded = self.fp8.round(matrix, operand, record)
            return rounded, rounded
        return round_operand(matrix, operand, self.emulated.fp8.recipe, self.emulated.dtype(operand))

    def _forward_impl(
        self,
        input: torch.Tensor,
        weight: torch.Tensor,
        *,
        bias: torch.Tensor | None,
        allreduce_dgrad: bool,
        sequence_parallel: bool,
        tp_group: dist.ProcessGroup | None,
        **_: Any,
    ) -> torch.Tensor:
        """Stands in for Megatron's product; the arguments left out are of fused CUDA kernels and deferred products."""
        if sequence_parallel:
            input = gather_from_sequence_parallel_region(input, tensor_parallel_output_grad=True, group=tp_group)
        elif allreduce_dgrad:
            input = copy_to_tensor_model_parallel_region(input, group=tp_group)
        output = _RoundedProduct.apply(input, weight, self, torch.is_grad_enabled())
        return output if bias is None else output + bias


class Fp8ColumnParallelLinear(Fp8Linear, ColumnParallelLinear):
    """Column-parallel, rounded."""


class Fp8RowParallelLinear(Fp8Linear, RowParallelLinear):
    """Row-parallel, rounded."""


_ROUNDED = {ColumnParallelLinear: Fp8ColumnParallelLinear, RowParallelLinear: Fp8RowParallelLinear}


def rounds_layer(fp8: Fp8Config, layer: int, num_layers: int) -> bool:
    """Whether the model's layer `layer`, from 0, is one of those that the recipe quantises."""
    return fp8.keep_first_layers <= layer < num_layers - fp8.keep_last_layers


def with_rounding(spec: Any, emulated: EmulatedFp8) -> Any:
    """A layer's spec with every parallel linear layer in it, however deep, replaced by the one that rounds."""
    if isinstance(spec, type) and spec in _ROUNDED:
        return ModuleSpec(module=_ROUNDED[spec], params={"emulated": emulated})
    parts = parts_of(spec)
    if parts is None:
        return spec
    parts = copy.copy(parts)
    for field in dataclasses.fields(parts):
        setattr(parts, field.name, with_rounding(getattr(parts, field.name), emulated))
    return with_parts(spec, parts)
