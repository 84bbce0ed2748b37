"""Plain-torch modules and the layer spec for platforms without Transformer Engine.

Megatron's own local modules refuse sequence parallel (norm) and packed sequences (attention); these two do not.
"""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_layer_specs
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from megatron_ac2.model.context_attention import shared_attention
from megatron_ac2.model.fp8_linear import EmulatedFp8, rounds_layer, with_rounding
from megatron_ac2.parallel.megatron_versions import built_class


class TorchRMSNorm(torch.nn.RMSNorm):
    """RMSNorm over the last dim. Its weight is marked so that its gradient is summed over tensor ranks under
    sequence parallel."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any):
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel


class TorchAttention(MegatronModule):
    """Causal scaled-dot-product attention over packed ("thd") or batched ("sbhd") sequences, grouped-query aware."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
    ):
        super().__init__(config=config)
        self.scale = softmax_scale or 1.0 / math.sqrt(config.kv_channels)
        self.cp_group = pg_collection.cp if config.context_parallel_size > 1 else None

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        attn_mask_type: Any = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> torch.Tensor:
        """Packed: query [T, heads, d], key and value [T, groups, d] -> [T, heads * d]. Batched: [S, B, ...] likewise.

        Under context parallel, where only packed sequences are accepted, T is what this rank holds of them.
        A position past the last of `cu_seqlens` gets zeros.
        """
        if attention_mask is not None:
            raise NotImplementedError("TorchAttention is causal; pass attention_mask=None")
        if packed_seq_params is not None:
            bounds = packed_seq_params.cu_seqlens_q
            if self.cp_group is not None:
                return shared_attention(query, key, value, bounds, self.cp_group, self._attend)
            return self._packed(query, key, value, bounds.tolist())
        if self.cp_group is not None:
            raise NotImplementedError("TorchAttention: context parallel is for packed sequences")
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        return self._causal(q, k, v).permute(2, 0, 1, 3).flatten(2)

    def _packed(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bounds: list[int]) -> torch.Tensor:
        q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (query, key, value))  # [1, heads, T, d]
        pieces = [
            self._causal(q[:, :, start:end], k[:, :, start:end], v[:, :, start:end])
            for start, end in zip(bounds[:-1], bounds[1:], strict=True)
            if end > start
        ]
        if bounds[-1] < query.shape[0]:
            pieces.append(torch.zeros_like(q[:, :, bounds[-1] :]))
        return torch.cat(pieces, dim=2)[0].transpose(0, 1).flatten(1)

    def _causal(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return self._attend(q, k, v, None)

    def _attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        """Causal without a mask."""
        grouped = q.shape[1] != k.shape[1]
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=self.scale, enable_gqa=grouped
        )


def torch_block_spec(
    config: TransformerConfig, emulated: EmulatedFp8 | None = None, vp_stage: int | None = None
) -> TransformerBlockSubmodules:
    """The block of this stage, or of its chunk `vp_stage`: Megatron's local layers with the modules above in them, and
    FP8 rounding where asked for.

    Given only a layer spec, Megatron would pick the final norm itself: the stock one.
    """
    specs = get_gpt_decoder_layer_specs(config, use_transformer_engine=False, normalization="RMSNorm")
    first = get_transformer_layer_offset(config, vp_stage)
    mine = range(first, first + get_num_layers_to_build(config, vp_stage))
    layers = [_with_torch_modules(specs[layer]) for layer in mine]
    if emulated is not None:
        rounding = [rounds_layer(emulated.fp8, layer, config.num_layers) for layer in mine]
        layers = [with_rounding(s, emulated) if rounds else s for s, rounds in zip(layers, rounding, strict=True)]
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=TorchRMSNorm)


def _with_torch_modules(spec: ModuleSpec) -> ModuleSpec:
    spec = copy.deepcopy(spec)
    layer = spec.submodules
    layer.input_layernorm = layer.pre_mlp_layernorm = TorchRMSNorm
    attention = layer.self_attention.submodules
    attention.core_attention = TorchAttention
    if attention.q_layernorm is not IdentityOp:
        attention.q_layernorm = attention.k_layernorm = TorchRMSNorm
    if (
        built_class(layer.mlp) is MoELayer
    ):  # Transformer Engine fuses no norm into a router, and the checkpoint's key shows it
        del layer.sharded_state_dict_keys_map["pre_mlp_layernorm."]
    return spec
