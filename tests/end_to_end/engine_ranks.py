"""Run by test_engine.py as a job of two ranks: engine_ranks.py replicas|tensor_parallel FOLDER."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from megatron_ac2.config import EngineConfig
from megatron_ac2.config_training import ParallelConfig
from megatron_ac2.engine.engine import ColocatedEngine, WeightSyncError
from megatron_ac2.engine.requests import divide_requests, pack_samples
from megatron_ac2.parallel.collectives import all_ranks_agree, barrier, broadcast_object, gather_objects
from megatron_ac2.parallel.topology import init_topology
from megatron_ac2.types import SampleRequest
from tests.end_to_end.tiny_qwen3 import STOP_ID, logprob_gap, make_model, make_prompt, named_tensors, save_model

NEW_TOKENS = (8, 40, 16, 24)


def make_requests() -> list[SampleRequest]:
    """Four prompts, four members each, interleaved."""
    return [
        SampleRequest(make_prompt(slot % 4, 40 + slot % 4), NEW_TOKENS[slot % 4], 0.8, seed=slot) for slot in range(16)
    ]


def check(layout: str, folder: Path) -> None:
    tensor_parallel = 2 if layout == "tensor_parallel" else 1
    # float32 and tied over two replicas; bfloat16 and untied over two shards
    tied, dtype, limit = (True, torch.float32, 1e-4) if tensor_parallel == 1 else (False, torch.bfloat16, 0.1)
    topology = init_topology(ParallelConfig(tensor=tensor_parallel), seed=0)
    old, new = (make_model(seed, tied, dtype) for seed in (0, 1))
    path = broadcast_object(save_model(old, folder / "m0") if topology.rank == 0 else None)
    config = EngineConfig(tensor_parallel=tensor_parallel, max_num_seqs=8, kv_cache_gib=0.05)
    local_world_size = os.environ["LOCAL_WORLD_SIZE"]
    engine = ColocatedEngine(path, config, topology, str(dtype).split(".")[1], 256, [STOP_ID], seed=0)
    assert os.environ["LOCAL_WORLD_SIZE"] == local_world_size

    def sample_and_compare(model, low: float, high: float) -> None:
        requests, ran = make_requests(), [0]
        samples = engine.sample(requests, progress=lambda done, asked: ran.__setitem__(0, asked))
        all_ranks_agree({k: v.tobytes() for k, v in pack_samples(dict(enumerate(samples))).items()}, "samples")
        gaps = [logprob_gap(model, r.prompt_ids, s, 0.8) for r, s in zip(requests, samples, strict=True)]
        assert low <= max(gaps) < high, (max(gaps), low, high)
        assert all(len(s.token_ids) == r.max_new_tokens or s.finish == "stop" for r, s in zip(requests, samples))
        shares = [len(share) for share in divide_requests(requests, 2 // tensor_parallel)]
        assert gather_objects(ran[0]) == (shares if tensor_parallel == 1 else [16, 16]) and min(shares) >= 4
        assert engine.last_call.num_prompt_tokens == sum(len(r.prompt_ids) for r in requests)
        assert engine.last_call.num_new_tokens == sum(len(s.token_ids) for s in samples)

    check_filter(engine)
    sample_and_compare(old, 0.0, limit)
    engine.load_weights(named_tensors(new), 1, verify=True)
    sample_and_compare(new, 0.0, limit)
    check_corruption_on_one_rank(engine, new, topology.rank)
    sample_and_compare(new, 0.0, limit)
    check_failure_on_one_rank(engine, topology.rank, tensor_parallel)


def check_filter(engine: ColocatedEngine) -> None:
    """In bfloat16 logits tie often: a few more log-probs than top_k show all that the filter left."""
    requests = [replace(request, top_k=5, num_top_logprobs=16) for request in make_requests()]
    samples = engine.sample(requests)
    all_ranks_agree({k: v.tobytes() for k, v in pack_samples(dict(enumerate(samples))).items()}, "filtered samples")
    for sample in samples:
        assert (np.isfinite(sample.top_logprobs).sum(1) >= 5).all()
        np.testing.assert_allclose(np.exp(sample.top_logprobs).sum(1), 1.0, atol=1e-3)
        assert (sample.top_ids == sample.token_ids[:, None]).any(1).all()


def check_corruption_on_one_rank(engine: ColocatedEngine, model, rank: int) -> None:
    """What only rank 1 sees wrong is an error on both, naming the tensor."""
    name = "model.layers.0.self_attn.v_proj.weight"
    worker = engine._llm.llm_engine.model_executor.driver_worker.worker
    reload_weights = worker.reload_weights

    def corrupt(weights_iterator):
        for found, tensor in weights_iterator:
            yield found, tensor + 1.0 if found == name else tensor

    if rank == 1:
        worker.reload_weights = lambda weights_iterator: reload_weights(weights_iterator=corrupt(weights_iterator))
    try:
        engine.load_weights(named_tensors(model), 2, verify=True)
    except WeightSyncError as error:
        assert name in str(error), error
    else:
        raise AssertionError(f"rank {rank} accepted a tensor that rank 1 holds corrupted")
    finally:
        worker.reload_weights = reload_weights
    engine.load_weights(named_tensors(model), 2, verify=True)
    assert engine.version == 2


def check_failure_on_one_rank(engine: ColocatedEngine, rank: int, tensor_parallel: int) -> None:
    """A replica that raises is an error on every rank, not a hang. (Ranks of one replica wait for each other.)"""
    if tensor_parallel > 1:
        return

    def fail(*args):
        raise ValueError("out of luck")

    if rank == 1:
        engine._generate = fail
    try:
        engine.sample(make_requests())
    except RuntimeError as error:
        assert "rank 1" in str(error) and "out of luck" in str(error)
    else:
        raise AssertionError("a failed replica went unnoticed")


if __name__ == "__main__":
    check(sys.argv[1], Path(sys.argv[2]))
    barrier()
