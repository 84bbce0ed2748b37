"""A record of routed experts in vLLM's worker, where vLLM keeps none: see routed_experts.py."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.fused_moe.routed_experts_capturer import bind_routed_experts_capturer

from megatron_ac2.engine.vllm_worker import WeightReceiver


class RecordingReceiver(WeightReceiver):
    """A vLLM `worker_extension_cls`."""

    def record_experts(self) -> None:
        """From now on, keep what the routers choose. Raises RuntimeError for a cache of several kinds of blocks."""
        groups = self.model_runner.kv_cache_config.kv_cache_groups
        if len(groups) != 1:
            raise RuntimeError(f"routed experts cannot be recorded beside {len(groups)} kinds of KV cache blocks")
        block_size = groups[0].kv_cache_spec.block_size
        num_slots = self.model_runner.kv_cache_config.num_blocks * block_size
        self.routed_experts = SlotRecord(
            num_slots, block_size, self.model_config.get_total_num_hidden_layers(),
            self.model_config.get_num_experts_per_tok(), self.model_config.get_num_experts(),
        )  # fmt: skip
        bind_routed_experts_capturer(self.model_runner.get_model(), self.routed_experts)

    def recorded_experts(self, request_id: str, num_tokens: int) -> np.ndarray:
        """[num_tokens, all layers, k] of the first tokens of a request. The runner forgets a finished one at its next
        step, and its blocks may then be another's."""
        return self.routed_experts.read(self.model_runner.requests[request_id].block_ids[0], num_tokens)


class SlotRecord:
    """A choice for each slot of the KV cache, beside the keys and values of the same token: it is found, kept and
    overwritten as they are, so that requests share a cached prompt's. Layers without experts stay 0."""

    def __init__(self, num_slots: int, block_size: int, num_layers: int, top_k: int, num_experts: int):
        self._block_size = block_size
        dtype = np.uint8 if num_experts <= 256 else np.uint16
        self._choices = np.zeros((num_slots, num_layers, top_k), dtype=dtype)

    def capture(self, layer_id: int, topk_ids: torch.Tensor) -> None:
        """What vLLM's routers call, with the experts [T, k] of the tokens of this forward pass."""
        slots = next(iter(get_forward_context().slot_mapping.values()), None)
        if slots is not None:  # a warm-up writes no cache
            places = slots[: len(topk_ids)].numpy()
            self._choices[places[places >= 0], layer_id] = topk_ids.numpy()[: len(places)][places >= 0]

    def read(self, block_ids: Sequence[int], num_tokens: int) -> np.ndarray:
        """Of a request's first tokens, which lie in these blocks in turn; a copy."""
        positions = np.arange(num_tokens)
        blocks = np.asarray(block_ids)[positions // self._block_size]
        return self._choices[blocks * self._block_size + positions % self._block_size]
