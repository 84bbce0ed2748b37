"""Run by test_smollm2.py: the greedy reply to one prompt, by one of three programs, as JSON on the last line.

usage: smollm2_cases.py transformers|megatron|vllm MODEL_DIR NUM_TOKENS ID ...
"""

from __future__ import annotations

import json
import os
import sys

import numpy as np
import torch

from megatron_ac2.config import EngineConfig
from megatron_ac2.config_training import ParallelConfig
from megatron_ac2.engine.engine import ColocatedEngine
from megatron_ac2.model.build import build_model, load_hf_config
from megatron_ac2.model.hf_weights import load_hf_weights
from megatron_ac2.parallel.topology import init_topology
from megatron_ac2.types import SampleRequest


def by_transformers(folder: str, prompt: list[int], num_tokens: int) -> list[int]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = torch.tensor([prompt])
    with torch.no_grad():
        reply = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_tokens, do_sample=False)
    return reply[0, len(prompt) :].tolist()


def by_megatron(folder: str, prompt: list[int], num_tokens: int) -> list[int]:
    """The whole sequence again for every token: the trainer has no cache."""
    topology = init_topology(ParallelConfig(), seed=0)
    hf_config = load_hf_config(folder)
    model = build_model(hf_config, topology, ParallelConfig(), torch.float32)
    load_hf_weights(model, hf_config, topology, folder)
    ids = list(prompt)
    with torch.no_grad():
        while len(ids) < len(prompt) + num_tokens and ids[len(prompt) :][-1:] != [hf_config.eos_token_id]:
            positions = torch.arange(len(ids))[None]
            logits = model(torch.tensor([ids]), positions, None)[0, -1, : hf_config.vocab_size]
            ids.append(int(logits.argmax()))
    return ids[len(prompt) :]


def by_vllm(folder: str, prompt: list[int], num_tokens: int) -> list[int]:
    topology = init_topology(ParallelConfig(), seed=0)
    config = EngineConfig(max_num_seqs=4, kv_cache_gib=0.1)
    engine = ColocatedEngine(folder, config, topology, "float32", 256, [load_hf_config(folder).eos_token_id], seed=0)
    (sample,) = engine.sample([SampleRequest(np.array(prompt, dtype=np.int32), num_tokens, 0.0, seed=0)])
    return sample.token_ids.tolist()


if __name__ == "__main__":
    program, folder, num_tokens, *prompt = sys.argv[1:]
    greedy = {"transformers": by_transformers, "megatron": by_megatron, "vllm": by_vllm}[program]
    print(json.dumps(greedy(folder, [int(token) for token in prompt], int(num_tokens))), flush=True)
    os._exit(0)  # tearing vLLM and gloo down in order is not what is tested here
