"""Bytes that a forward pass keeps for its backward pass, as a list of terms a layer.

The accounting of Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models" (arXiv
2205.05198, section 4), for this architecture: attention keeps no matrix of scores (flash attention: its output and one
number a head and token instead), the feed-forward is gated (SwiGLU), keys and values are fewer than queries (GQA), and
there is no dropout. Every tensor is one term; what several operators keep of one storage counts once.

Two lists, for two sets of modules. TORCH is what runs without a GPU (model/modules.py), checked by a test to the byte.
TRANSFORMER_ENGINE is what trains on one: derived from its sources (LayerNormLinear keeps its input and the norm's
output, attention keeps q, k, v, its output and the log-sum-exp), not counted on a GPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from megatron_ac2.config_training import ParallelConfig
from megatron_ac2.memory.shapes import Chunk, Widths, virtual_pipeline
from megatron_ac2.parallel.megatron_versions import routing_bytes_per_expert

Modules = Literal["torch", "transformer_engine"]
Terms = dict[str, int]  # what is kept -> bytes
_FP32 = 4


@dataclass(frozen=True, slots=True)
class Microbatch:
    """`tokens`: of one context-parallel rank. `sequence_ranks`: the tensor degree with sequence parallel, else 1."""

    tokens: int
    itemsize: int  # bytes of the model's dtype
    sequence_ranks: int
    longest: int  # tokens of its longest sequence

    @property
    def local_tokens(self) -> int:
        """Outside of attention and feed-forward."""
        return self.tokens // self.sequence_ranks


def layer_terms(
    w: Widths, batch: Microbatch, modules: Modules, options: Mapping[str, Any], sparse: bool = False
) -> Terms:
    """Of one layer. `options`: the `megatron` section, for what changes the list. `sparse`: it has experts."""
    terms = (_torch_terms if modules == "torch" else _engine_terms)(w, batch, options)
    if sparse:
        del terms["feed-forward"]
        terms |= _expert_terms(w, batch, modules, options)
    return terms


def dispatched_tokens(w: Widths, batch: Microbatch) -> int:
    """That the experts of one rank read, if all experts are chosen as often as each other."""
    return batch.local_tokens * w.chosen * w.expert_ranks


def _expert_terms(w: Widths, batch: Microbatch, modules: Modules, options: Mapping[str, Any]) -> Terms:
    """Megatron's dropless all-to-all: each chosen expert reads a copy of the token."""
    local, read, size = batch.local_tokens, dispatched_tokens(w, batch), batch.itemsize
    # Chosen experts and the order of the copies, int64; what is kept of all experts; the softmax.
    softmax = w.num_experts if w.probs_of_all else w.chosen
    router = local * (w.chosen * (8 + 8) + w.num_experts * routing_bytes_per_expert() + softmax * _FP32)
    fused = modules != "torch" and options.get("bias_activation_fusion")
    # Gate and up, their product weighed by the router; unfused also silu(gate), up + 0, the product before.
    ffn = 3 if fused else 6
    return {"router": router, "experts' inputs": read * w.hidden * size,
            "experts": read * (ffn * w.expert_ffn * size + _FP32)}  # fmt: skip


def _torch_terms(w: Widths, batch: Microbatch, options: Mapping[str, Any]) -> Terms:
    t, local, size = batch.tokens, batch.local_tokens, batch.itemsize
    half = size < _FP32
    norm = 2 * w.hidden * _FP32 + _FP32 + w.hidden * size  # input and normalised in fp32, 1 / rms, output
    terms = {
        "attention norm": local * norm,
        "q, k, v": t * w.fused * size,
        "rotated q and k, angles": t * ((w.query + w.key_value // 2) * size + 4 * w.head_dim * size),
        "attention output": t * (2 * w.query * size + w.num_heads * _FP32),  # by sequence, and joined
        "feed-forward norm": local * norm,
        "feed-forward": t * 5 * w.ffn * size,  # gate and up, silu(gate), up + 0, their product
    }
    if w.qk_norm:
        widened_keys = w.key_value // 2 if half else 0  # in fp32 they lie in "q, k, v"
        queries = w.query if half else _own_queries(w)
        normalised = w.query + w.key_value // 2
        terms["q and k norms"] = t * (queries + widened_keys + normalised + w.num_heads + w.num_groups) * _FP32
    return terms


def _engine_terms(w: Widths, batch: Microbatch, options: Mapping[str, Any]) -> Terms:
    t, local, size = batch.tokens, batch.local_tokens, batch.itemsize
    norm = 2 * w.hidden * size + _FP32  # input, output, 1 / rms
    angles = 0 if options.get("apply_rope_fusion") else 4 * w.head_dim * size
    # Unfused, Megatron also keeps silu(gate) and up + its offset of zero.
    ffn = 3 if options.get("bias_activation_fusion") else 5
    terms = {
        "attention norm": local * norm,
        "q, k, v": t * w.fused * size,
        "rotated q and k, angles": t * ((w.query + w.key_value // 2) * size + angles),
        "attention output": t * (w.query * size + w.num_heads * _FP32),
        "feed-forward norm": local * norm,
        "feed-forward": t * ffn * w.ffn * size,
    }
    if w.qk_norm:
        terms["q and k norms"] = t * (_own_queries(w) * size + (w.num_heads + w.num_groups) * _FP32)
    return terms


def _own_queries(w: Widths) -> int:
    """Numbers a token that Megatron copies out of "q, k, v": the queries, unless one group lies in one piece."""
    return w.query if w.num_groups > 1 else 0


def in_flight(parallel: ParallelConfig, stage: int) -> int:
    """Forward passes of a chunk whose backward pass is still to come, at most, on pipeline rank `stage`.

    1F1B: one for each stage from this to the last. Interleaved: Megatron's warm-up, 2 (p - stage - 1) + (v - 1) p, and
    one more. There are taken to be as many microbatches.
    """
    behind, interleaved = parallel.pipeline - stage - 1, virtual_pipeline(parallel)
    if interleaved == 1:
        return behind + 1
    return 2 * behind + (interleaved - 1) * parallel.pipeline + 1


def chunk_bytes(
    chunk: Chunk, w: Widths, batch: Microbatch, modules: Modules, options: Mapping[str, Any]
) -> tuple[int, int]:
    """(kept by one forward pass of the chunk's layers, more that the backward pass rebuilds at a time)."""
    terms = [layer_terms(w, batch, modules, options, sparse) for sparse in chunk.sparse]
    layers, entry = [sum(found.values()) for found in terms], batch.local_tokens * w.hidden * batch.itemsize
    granularity = options.get("recompute_granularity")
    if granularity == "full":
        count = min(int(options.get("recompute_num_layers") or 1), chunk.num_layers)
        angles = batch.longest * w.head_dim * _FP32  # of the rotation, handed to every rebuilt layer
        if options.get("recompute_method") == "block":
            return count * entry + sum(layers[count:]) + angles, max(layers[:count])
        groups = [sum(layers[start : start + count]) for start in range(0, chunk.num_layers, count)]
        return len(groups) * entry + angles, max(groups)
    dropped = [0] * chunk.num_layers
    if granularity == "selective":
        chosen = options.get("recompute_modules") or ["core_attn"]
        for index, found in enumerate(terms):
            if "core_attn" in chosen:  # its inputs stay, and the next layer keeps its output
                dropped[index] += batch.tokens * w.num_heads * _FP32
            if "mlp" in chosen:
                dropped[index] += found.get("feed-forward", 0)
    return sum(layers) - sum(dropped), max(dropped)


def unknown_recompute(options: Mapping[str, Any]) -> list[str]:
    """Modules of a selective recompute whose saving is not counted."""
    return sorted(set(options.get("recompute_modules") or ()) - {"core_attn", "mlp"})


def working_bytes(w: Widths, batch: Microbatch) -> int:
    """What one layer's backward pass holds beside: gradients of the feed-forward's widest tensors and of its input
    and output, gathered over sequence ranks. An estimate."""
    dense, sparse = batch.tokens * (3 * w.ffn + 2 * w.hidden), 0
    if w.num_experts:
        sparse = dispatched_tokens(w, batch) * (3 * w.expert_ffn + 2 * w.hidden)
    return max(dense, sparse) * batch.itemsize


def ends_terms(
    chunk: Chunk,
    w: Widths,
    batch: Microbatch,
    modules: Modules,
    vocab_rows: int,
    vocab_is_cut: bool,
    loss: str,
    tile_bytes: int,
) -> Terms:
    """Outside the layers, for one microbatch. `loss`: fused | naive | value; `vocab_rows`: of this tensor rank."""
    t, local, size = batch.tokens, batch.local_tokens, batch.itemsize
    terms: Terms = {}
    if chunk.first:
        terms["token ids"] = t * (8 + vocab_is_cut)  # and which of them this rank has
    if not chunk.last:
        return terms
    norm_size = _FP32 if modules == "torch" else size
    terms["final norm"] = local * (w.hidden * norm_size * (2 if modules == "torch" else 1) + _FP32)
    if loss == "value":
        terms["value head"] = local * w.hidden * _FP32
    elif loss == "naive":
        terms["logits and their gradient"] = t * (w.hidden + 2 * vocab_rows) * size
    else:
        terms["loss: hidden states, their gradient"] = 2 * t * w.hidden * size
        terms["loss: gradient of the output matrix"] = vocab_rows * w.hidden * _FP32
        terms["loss: a tile of logits"] = min(tile_bytes, t * (vocab_rows + 1) * size)
    return terms
