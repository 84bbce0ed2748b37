"""Tiny random Qwen3 models and what Transformers says of them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from transformers import Qwen3ForCausalLM

from megatron_ac2.types import Sample
from tests.distributed import tiny_families

VOCAB_SIZE = 203
STOP_ID = 1


def make_model(seed: int, tied: bool = True, dtype: torch.dtype = torch.float32) -> Qwen3ForCausalLM:
    config = tiny_families.qwen3(
        tied,
        vocab_size=VOCAB_SIZE,
        num_hidden_layers=2,
        max_position_embeddings=1024,
        initializer_range=0.15,
        rope_parameters=None,
        eos_token_id=2,  # not the stop token of the tests: the folder must not decide where a sample ends
        pad_token_id=0,
    )
    return tiny_families.make_model(config, seed, noise=0).to(dtype).eval()


def save_model(model: Qwen3ForCausalLM, path: Path) -> str:
    model.save_pretrained(path)
    return str(path)


def named_tensors(model: Qwen3ForCausalLM):
    """As the exporter yields them: a tied head is left out."""
    for name, tensor in model.state_dict().items():
        if not (model.config.tie_word_embeddings and name == "lm_head.weight"):
            yield name, tensor


@torch.no_grad()
def next_token_logprobs(model: Qwen3ForCausalLM, prompt: np.ndarray, sample: Sample, temperature: float) -> np.ndarray:
    """float32[N, V]: log-softmax(logits / T) at each position of the sample."""
    ids = torch.tensor(np.concatenate([prompt, sample.token_ids]).astype(np.int64))[None]
    logits = model(ids).logits[0].float()
    return torch.log_softmax(logits[len(prompt) - 1 : -1] / temperature, dim=-1).numpy()


def logprob_gap(model: Qwen3ForCausalLM, prompt: np.ndarray, sample: Sample, temperature: float) -> float:
    """Largest difference between the sample's log-probs and the model's."""
    rows = next_token_logprobs(model, prompt, sample, temperature)
    return float(np.abs(rows[np.arange(len(rows)), sample.token_ids] - sample.logprobs).max())


def make_prompt(seed: int, length: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(3, VOCAB_SIZE, length).astype(np.int32)
