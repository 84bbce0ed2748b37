"""What we add to vLLM's worker: take streamed weights, and say which of them it does not compute with afterwards."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

from megatron_ac2.engine.checksums import add, checksum
from megatron_ac2.engine.experts import repack_experts
from megatron_ac2.engine.placement import Placement, placements, read_parameter

Sums = dict[tuple[str, str], int]  # (engine layer, Hugging Face name) -> checksum


class WeightReceiver:
    """A vLLM `worker_extension_cls`: mixed into the worker, called through `collective_rpc`."""

    def receive_weights(self, named_tensors: Iterator[tuple[str, torch.Tensor]], verify: bool) -> list[str]:
        """Load Hugging Face tensors as they come, one layer's worth in memory at a time.

        Returns what is wrong, one line a tensor; empty if all is well. Without `verify` nothing is read back.
        """
        model = self.model_runner.get_model()
        table = placements(model) if verify else {}
        wanted: dict[str, list[tuple[str, Placement]]] = {}
        for layer_name, (_, parts) in table.items():
            for part in parts:
                wanted.setdefault(part.hf_name, []).append((layer_name, part))
        sent: Sums = {}
        with torch.no_grad():
            stream = iter(named_tensors)
            if verify:
                stream = _watch(stream, wanted, sent, self.model_config.dtype)
            self.reload_weights(weights_iterator=stream)
            for _ in stream:  # every rank must draw the whole stream, whatever vLLM skipped at its end
                pass
            _refresh_tied_head(model)
            repack_experts(model)
            return _compare(table, sent, model.config.tie_word_embeddings) if verify else []


def _refresh_tied_head(model: nn.Module) -> None:
    """vLLM 0.32 keeps a tied output layer's packed copy of the old embedding: it reloads layers that are named only."""
    head = getattr(model, "lm_head", None)
    if isinstance(head, ParallelLMHead) and model.config.tie_word_embeddings:
        head.quant_method.process_weights_after_loading(head)


def _watch(
    named_tensors: Iterator[tuple[str, torch.Tensor]],
    wanted: dict[str, list[tuple[str, Placement]]],
    sums: Sums,
    dtype: torch.dtype,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Pass tensors on, noting the checksum of the part that each engine layer of this rank should hold."""
    for name, tensor in named_tensors:
        for layer_name, part in wanted.get(name, ()):
            shard = tensor[part.rows] if tensor.dim() == 1 else tensor[part.rows, part.columns]
            sums[layer_name, name] = checksum(shard.to(dtype))
        if name not in wanted:
            sums["", name] = 0
        yield name, tensor


def _compare(table: dict[str, tuple[nn.Module, list[Placement]]], sent: Sums, tied: bool) -> list[str]:
    problems = []
    for layer_name, (layer, parts) in table.items():
        held = dict.fromkeys(range(len(parts)), 0)
        for parameter in dict.fromkeys(part.parameter for part in parts):
            for first_column, block in read_parameter(layer, parameter):
                for index, part in enumerate(parts):
                    if part.parameter == parameter:
                        held[index] = add(held[index], checksum(block[part.local_rows], first_column))
        for index, part in enumerate(parts):
            expected = sent.get((layer_name, part.hf_name))
            if expected is None:
                problems.append(f"{part.hf_name}: not sent by the trainer, needed by engine layer {layer_name}")
            elif expected != held[index]:
                problems.append(f"{part.hf_name}: engine layer {layer_name} computes with other values than were sent")
    unknown = sorted(name for layer_name, name in sent if not layer_name)
    return problems + [f"{n}: sent, but unknown to the engine" for n in unknown if not (tied and n == "lm_head.weight")]
