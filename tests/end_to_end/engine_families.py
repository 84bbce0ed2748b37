"""Run by test_engine.py as a job of one rank, once a family: engine_families.py FAMILY FOLDER.

A trained model is published from Megatron into an engine that started with other weights; then single tensors are
corrupted: biases, experts, a router.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from megatron_ac2.architecture import sparse_layers
from megatron_ac2.config import EngineConfig
from megatron_ac2.config_training import ParallelConfig
from megatron_ac2.engine.engine import ColocatedEngine, WeightSyncError
from megatron_ac2.engine.reshard import publish
from megatron_ac2.model.build import build_model, load_hf_config
from megatron_ac2.model.hf_weights import export_hf_weights, load_hf_weights
from megatron_ac2.parallel.topology import init_topology
from megatron_ac2.types import SampleRequest
from tests.distributed import tiny_families
from tests.end_to_end.tiny_qwen3 import STOP_ID, logprob_gap, make_prompt

TEMPERATURE = 0.8
VICTIMS = {
    "qwen2": [f"self_attn.{name}" for name in ("q_proj.weight", "k_proj.bias", "v_proj.bias")],
    "qwen3_moe": [f"mlp.{name}" for name in ("gate.weight", "experts.3.up_proj.weight", "experts.5.down_proj.weight")],
}


def check(family: str, folder: Path) -> None:
    topology = init_topology(ParallelConfig(), seed=0)
    old, new = (tiny_families.write(family, folder / f"m{seed}", seed) for seed in (0, 1))
    config = EngineConfig(max_num_seqs=8, kv_cache_gib=0.05)
    hf_config = load_hf_config(new)
    layers = [layer for layer, sparse in enumerate(sparse_layers(hf_config)) if sparse]
    engine = ColocatedEngine(str(old), config, topology, "float32", 256, [STOP_ID], seed=0, recorded_layers=layers)
    model = build_model(hf_config, topology, ParallelConfig(), torch.float32)
    load_hf_weights(model, hf_config, topology, new)
    assert gap(engine, old) < 1e-4 and gap(engine, new) > 0.1
    if layers:
        check_record_of_experts(engine, old)
    publish(model, hf_config, topology, engine, 1, verify=True)
    assert engine.version == 1 and gap(engine, new) < 1e-4
    for name in VICTIMS.get(hf_config.model_type, ("self_attn.k_proj.weight",)):
        check_corruption_is_named(engine, model, hf_config, topology, f"model.layers.1.{name}")
    publish(model, hf_config, topology, engine, 2, verify=True)
    assert gap(engine, new) < 1e-4
    if layers:
        check_record_of_experts(engine, new)


def gap(engine, folder: Path) -> float:
    """Largest difference between the engine's log-probs and those of transformers for the folder's model."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    requests = [SampleRequest(make_prompt(seed, 40), 24, TEMPERATURE, seed) for seed in range(4)]
    pairs = zip(requests, engine.sample(requests), strict=True)
    return max(logprob_gap(model, request.prompt_ids, sample, TEMPERATURE) for request, sample in pairs)


@torch.no_grad()
def check_record_of_experts(engine, folder: Path) -> None:
    """Those that transformers' routers choose, for every token that was fed: the prompt's, computed or found in the
    cache (70 tokens share two blocks of 32), and all new ones but the last."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    prompts = [make_prompt(seed, length) for seed, length in ((5, 70), (5, 70), (6, 9), (7, 33))]
    requests = [SampleRequest(prompt, 24, 1.0, seed, record_experts=True) for seed, prompt in enumerate(prompts)]
    for expected_cached in (64, 2 * 64 + 32):
        samples = engine.sample([*requests, SampleRequest(prompts[0], 4, 1.0, 9)])
        assert engine.last_call.num_cached_tokens >= expected_cached and samples.pop().routed_experts is None
        for request, sample in zip(requests, samples, strict=True):
            ids = torch.tensor(np.concatenate([request.prompt_ids, sample.token_ids])[None, :-1].astype(np.int64))
            logits = model(ids, output_router_logits=True).router_logits
            chosen = torch.stack([layer.topk(2).indices.sort().values for layer in logits], 1)
            assert sample.routed_experts.dtype == np.uint8
            np.testing.assert_array_equal(np.sort(sample.routed_experts), chosen.numpy())


def check_corruption_is_named(engine, model, hf_config, topology, victim: str) -> None:
    """One bit of one element flips on its way into the worker, behind the checksum's back."""
    worker = engine._llm.llm_engine.model_executor.driver_worker.worker
    reload_weights = worker.reload_weights

    def corrupting(weights_iterator):
        def corrupt():
            for name, tensor in weights_iterator:
                if name == victim:
                    tensor = tensor.clone()
                    tensor.view(-1).view(torch.int32)[tensor.numel() // 2] ^= 1
                yield name, tensor

        reload_weights(weights_iterator=corrupt())

    worker.reload_weights = corrupting
    try:
        engine.load_weights(export_hf_weights(model, hf_config, topology), 9, verify=True)
    except WeightSyncError as error:
        assert victim in str(error) and str(error).count("model.layers") == str(error).count(victim) + 1, error
    else:
        raise AssertionError(f"a corrupted {victim} was accepted")
    finally:
        worker.reload_weights = reload_weights


if __name__ == "__main__":
    check(sys.argv[1], Path(sys.argv[2]))
