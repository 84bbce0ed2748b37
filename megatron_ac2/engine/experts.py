"""The engine's experts: a layer's matrices in two tensors, which vLLM 0.32 packs for its kernel on CPU."""

from __future__ import annotations

import torch
from torch import nn
from vllm._custom_ops import cpu_prepack_moe_weight
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend

_AS_LOADED = (UnquantizedMoeBackend.TRITON, UnquantizedMoeBackend.BATCHED_TRITON)


def repack_experts(model: nn.Module) -> None:
    """vLLM packs experts on CPU at the first load only. A reload leaves them as they came, its kernel takes them for
    packed ones, and the engine would sample from a scrambled model."""
    for layer in model.modules():
        if isinstance(layer, RoutedExperts) and _backend(layer) is UnquantizedMoeBackend.CPU:
            layer.quant_method.moe_kernel.fused_experts.process_weights_after_loading(layer)


def read_experts(layer: RoutedExperts, parameter: str) -> torch.Tensor:
    """[experts, rows, columns] of "w13_weight" or "w2_weight" as loaded, from what the kernel computes with.

    Raises RuntimeError for a kernel whose own layout is not known here.
    """
    held, backend = getattr(layer, parameter).detach(), _backend(layer)
    if backend in _AS_LOADED:
        return held
    if backend is UnquantizedMoeBackend.CPU and not layer.quant_method.moe_kernel.fused_experts._use_zentorch:
        return _unpacked(held, layer.quant_method.moe_kernel.fused_experts.isa)
    raise RuntimeError(f"engine layer {layer.layer_name}: experts of backend {backend} cannot be read back; "
                       "set engine.verify_weights=false")  # fmt: skip


def _backend(layer: RoutedExperts) -> UnquantizedMoeBackend | None:
    """None: quantised."""
    return getattr(layer.quant_method, "unquantized_backend", None)


def _unpacked(packed: torch.Tensor, isa: str) -> torch.Tensor:
    """Packing moves numbers within an expert and changes none. Packing their places, in digits that every dtype holds
    exactly, tells where each one went."""
    num_places = packed[0].numel()
    places = torch.arange(num_places).view(1, *packed.shape[1:])
    source = torch.zeros(num_places, dtype=torch.long)
    for shift in range(0, num_places.bit_length(), 8):
        digit = ((places >> shift) & 255).to(packed.dtype)
        source += cpu_prepack_moe_weight(digit, isa).view(-1).long() << shift
    if not torch.equal(source.sort().values, places.view(-1)):
        raise RuntimeError(
            f"vLLM's packing of experts ({isa}) does more than move them; set engine.verify_weights=false"
        )
    unpacked = torch.empty_like(packed)
    unpacked.view(len(packed), -1)[:, source] = packed.reshape(len(packed), -1)
    return unpacked
