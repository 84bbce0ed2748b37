"""What Megatron builds a layer of, chosen by platform: Transformer Engine's modules on CUDA, torch's on CPU."""

from __future__ import annotations

from typing import Any

from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_ac2.config_training import Fp8Config
from megatron_ac2.model.fp8 import has_transformer_engine
from megatron_ac2.model.fp8_linear import EmulatedFp8
from megatron_ac2.model.modules import torch_block_spec
from megatron_ac2.parallel.topology import Topology
from megatron_ac2.types import UserError


def layer_spec(config: TransformerConfig, topology: Topology, fp8: Fp8Config, vp_stage: int | None) -> Any:
    """Of one chunk of the model. Raises `UserError` on CUDA without Transformer Engine."""
    if topology.on_cpu:
        emulated = EmulatedFp8(fp8, topology.pg.tp_dp_cp) if fp8.emulate else None
        return torch_block_spec(config, emulated, vp_stage)
    if not has_transformer_engine():
        raise UserError(
            "transformer_engine: not installed; training on CUDA needs it (packed sequences and sequence parallel); "
            "see requirements.txt, or hide the GPUs (CUDA_VISIBLE_DEVICES=) to run on CPU"
        )
    if config.num_moe_experts:
        return get_gpt_decoder_block_spec(config, use_transformer_engine=True, vp_stage=vp_stage)
    return get_gpt_layer_with_transformer_engine_spec(qk_layernorm=config.qk_layernorm)
