"""Run by test_engine.py in a process of its own, once a family: engine_families.py FAMILY FOLDER.

A trained model is published from Megatron into an engine that started with other weights; then single tensors are
corrupted: biases, experts, a router.
"""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path

import torch
from tiny_qwen3 import STOP_ID, logprob_gap, make_prompt
from transformers import AutoModelForCausalLM

from megatron_ac2.config import EngineConfig
from megatron_ac2.config_training import ParallelConfig
from megatron_ac2.engine.engine import ColocatedEngine, WeightSyncError
from megatron_ac2.engine.reshard import publish
from megatron_ac2.model.build import build_model, load_hf_config
from megatron_ac2.model.hf_weights import export_hf_weights, load_hf_weights
from megatron_ac2.parallel.topology import init_topology
from megatron_ac2.types import SampleRequest
from tests.distributed import tiny_families

TEMPERATURE = 0.8
VICTIMS = {
    "qwen2": [f"self_attn.{name}" for name in ("q_proj.weight", "k_proj.bias", "v_proj.bias")],
    "qwen3_moe": [f"mlp.{name}" for name in ("gate.weight", "experts.3.up_proj.weight", "experts.5.down_proj.weight")],
}


def check(family: str, folder: Path) -> None:
    topology = init_topology(ParallelConfig(), seed=0)
    old, new = (tiny_families.write(family, folder / f"m{seed}", seed) for seed in (0, 1))
    config = EngineConfig(max_num_seqs=8, kv_cache_gib=0.05)
    engine = ColocatedEngine(str(old), config, topology, "float32", 256, [STOP_ID], seed=0)
    hf_config = load_hf_config(new)
    model = build_model(hf_config, topology, ParallelConfig(), torch.float32)
    load_hf_weights(model, hf_config, topology, new)
    assert gap(engine, old) < 1e-4 and gap(engine, new) > 0.1
    publish(model, hf_config, topology, engine, 1, verify=True)
    assert engine.version == 1 and gap(engine, new) < 1e-4
    for name in VICTIMS.get(hf_config.model_type, ("self_attn.k_proj.weight",)):
        check_corruption_is_named(engine, model, hf_config, topology, f"model.layers.1.{name}")
    publish(model, hf_config, topology, engine, 2, verify=True)
    assert gap(engine, new) < 1e-4


def gap(engine, folder: Path) -> float:
    """Largest difference between the engine's log-probs and those of transformers for the folder's model."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    requests = [SampleRequest(make_prompt(seed, 40), 24, TEMPERATURE, seed) for seed in range(4)]
    pairs = zip(requests, engine.sample(requests), strict=True)
    return max(logprob_gap(model, request.prompt_ids, sample, TEMPERATURE) for request, sample in pairs)


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
    try:
        check(sys.argv[1], Path(sys.argv[2]))
        verdict = "passed"
    except Exception:
        verdict = traceback.format_exc()
    (Path(sys.argv[2]) / "verdict.txt").write_text(verdict)
    sys.stdout.flush()
    os._exit(0)  # tearing vLLM and gloo down in order is not what is tested here
