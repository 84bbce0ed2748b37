"""The pipeline's part of Megatron's config, and what of the `megatron` section it refuses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import PretrainedConfig

from megatron_ac2.config_training import ParallelConfig


def pipeline_fields(parallel: ParallelConfig) -> dict[str, Any]:
    """Of TransformerConfig; `megatron` may neither change nor repeat them, save those that `p2p_problems` knows."""
    return {
        "pipeline_model_parallel_size": parallel.pipeline,
        "virtual_pipeline_model_parallel_size": parallel.virtual_pipeline,
        # Depth first in groups of one microbatch a stage: Topology.microbatch_multiple is for this group size.
        "microbatch_group_size_per_vp_stage": parallel.pipeline,
    }


def p2p_fields(parallel: ParallelConfig) -> dict[str, bool]:
    """How stages talk. Interleaved over two stages with batch_p2p_comm, Megatron-Core 0.16 is silently wrong: both of a
    stage's neighbours are the same rank, and what is sent forward can be received as what is sent backward."""
    interleaved = parallel.virtual_pipeline is not None
    return {"overlap_p2p_comm": interleaved, "batch_p2p_comm": not interleaved}


def p2p_problems(extra: Mapping[str, Any], parallel: ParallelConfig) -> list[str]:
    """What the `megatron` section asks for that would train on wrong gradients, or that the schedule refuses."""
    kind = "interleaved" if parallel.virtual_pipeline is not None else "non-interleaved"
    reason = {
        ("interleaved", "batch_p2p_comm"): "gradients of an interleaved pipeline would be silently wrong",
        ("interleaved", "overlap_p2p_comm"): "without it an interleaved pipeline needs batch_p2p_comm, which is wrong",
        ("non-interleaved", "overlap_p2p_comm"): "it needs an interleaved pipeline, parallel.virtual_pipeline",
    }
    return [
        f"megatron.{name}: found {extra[name]!r} with parallel.virtual_pipeline {parallel.virtual_pipeline}; "
        f"{reason[kind, name]}; accepted: {str(accepted).lower()}"
        for name, accepted in p2p_fields(parallel).items()
        if (kind, name) in reason and extra.get(name, accepted) != accepted
    ]


def stage_problems(hf_config: PretrainedConfig, parallel: ParallelConfig) -> list[str]:
    """Why the model's layers do not divide over the stages and their chunks, as messages."""
    layers, virtual = hf_config.num_hidden_layers, parallel.virtual_pipeline
    if parallel.pipeline < 1 or layers % parallel.pipeline:
        return [
            f"parallel.pipeline: found {parallel.pipeline}, model has {layers} layers; accepted: divisors of {layers}"
        ]
    per_stage = layers // parallel.pipeline
    if virtual is None or (virtual > 1 and per_stage % virtual == 0):
        return []
    return [
        f"parallel.virtual_pipeline: found {virtual}, a stage has {per_stage} of the model's {layers} layers; "
        f"accepted: divisors of {per_stage} above 1, or null"
    ]
