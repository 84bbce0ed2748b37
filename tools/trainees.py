"""What bench_trainer.py measures: the same steps on the same sequences, by our trainer and by transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, LlamaConfig

from megatron_ac2.config_training import OptimizerConfig, ParallelConfig
from megatron_ac2.data.packing import pack, plan_microbatches
from megatron_ac2.model.build import build_model, load_hf_config
from megatron_ac2.model.data_parallel import wrap_ddp
from megatron_ac2.model.hf_weights import load_hf_weights
from megatron_ac2.parallel.topology import init_topology
from megatron_ac2.training import step
from megatron_ac2.training.optimizer import build_optimizer
from megatron_ac2.training.token_head import TokenHead, loss_rows, negative_log_likelihood

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
VOCAB = 49_152
# hidden, layers, feed-forward, heads, key-value heads; the embedding is tied
SIZES = {"17M": (256, 6, 768, 4, 2), "60M": (512, 12, 1536, 8, 4), "135M": (576, 30, 1536, 9, 3)}
_CLIP = 1.0


def hf_config(size: str) -> LlamaConfig:
    hidden, layers, ffn, heads, groups = SIZES[size]
    return LlamaConfig(
        vocab_size=VOCAB, hidden_size=hidden, num_hidden_layers=layers, intermediate_size=ffn,
        num_attention_heads=heads, num_key_value_heads=groups, head_dim=hidden // heads, tie_word_embeddings=True,
        max_position_embeddings=8192, rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
    )  # fmt: skip


def sequences(num_tokens: int) -> list[np.ndarray]:
    """Ragged, as an engine's chunks are: lengths between a sixteenth and a quarter of a step's tokens."""
    rng, found, left = np.random.default_rng(0), [], num_tokens
    while left > 0:
        length = min(left, int(rng.integers(num_tokens // 16, num_tokens // 4)))
        length = length if left - length >= num_tokens // 16 else left
        found.append(rng.integers(0, VOCAB, length))
        left -= length
    return found


class Ours:
    def __init__(self, folder: Path, dtype: torch.dtype, parallel: ParallelConfig, tokens: int):
        self.topology = init_topology(parallel, seed=0)
        config = load_hf_config(folder)
        self.model = wrap_ddp(build_model(config, self.topology, parallel, dtype, "hidden"), distributed_optimizer=True)
        load_hf_weights(self.model, config, self.topology, folder)
        self.head = TokenHead(self.model, self.topology, VOCAB, temperature=1.0)
        self.optimizer = build_optimizer(self.model, OptimizerConfig(lr=1e-5, grad_clip=_CLIP), dtype)
        own = share(sequences(tokens), self.topology.data_rank, self.topology.data)
        self.batch = pack(own, {}, [1] * len(own), step.token_alignment(self.topology), pad_id=0)

    def step(self) -> float:
        metrics = step.forward_backward(self.model, [self.batch], self.loss, self.topology)
        step.apply_step(self.optimizer, metrics)
        return metrics["loss"]

    def loss(self, output: torch.Tensor, batch: Any) -> step.Loss:
        rows = loss_rows(batch.loss_mask)
        found = self.head.loss(output, batch, rows, negative_log_likelihood(torch.ones(len(rows))))
        return found.loss, torch.tensor(len(rows)), {}


class HuggingFace:
    def __init__(self, folder: Path, dtype: torch.dtype, packed: bool, ranks: int, tokens: int):
        if ranks > 1:
            dist.init_process_group("gloo")
        rank = dist.get_rank() if ranks > 1 else 0
        self.ranks, everything = ranks, sequences(tokens)
        self.bare = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa")
        self.bare.train()
        self.model = torch.nn.parallel.DistributedDataParallel(self.bare) if ranks > 1 else self.bare
        self.optimizer = torch.optim.AdamW(self.bare.parameters(), lr=1e-5, weight_decay=0.0, fused=True)
        own = share(everything, rank, ranks)
        self.inputs = packed_inputs(own) if packed else padded_inputs(own)
        self.num_items = sum(len(ids) - 1 for ids in everything)

    def step(self) -> float:
        self.optimizer.zero_grad(set_to_none=True)
        # DDP averages over ranks what this loss has divided by the tokens of all of them.
        items = self.num_items / self.ranks
        loss = self.model(**self.inputs, use_cache=False, num_items_in_batch=items).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.bare.parameters(), _CLIP)
        self.optimizer.step()
        total = loss.detach().float()
        if self.ranks > 1:
            dist.all_reduce(total)
        return total.item() / self.ranks


def share(everything: list[np.ndarray], rank: int, ranks: int) -> list[np.ndarray]:
    plan = plan_microbatches([len(ids) for ids in everything], ranks, 1 << 30)
    return [everything[index] for index in plan[rank][0]]


def padded_inputs(own: list[np.ndarray]) -> dict[str, torch.Tensor]:
    longest = max(map(len, own))
    ids, mask = torch.zeros(len(own), longest, dtype=torch.long), torch.zeros(len(own), longest, dtype=torch.long)
    for row, sequence in enumerate(own):
        ids[row, : len(sequence)] = torch.from_numpy(sequence)
        mask[row, : len(sequence)] = 1
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def packed_inputs(own: list[np.ndarray]) -> dict[str, torch.Tensor]:
    ids = torch.from_numpy(np.concatenate(own))[None]
    positions = torch.cat([torch.arange(len(sequence)) for sequence in own])[None]
    return {"input_ids": ids, "position_ids": positions, "labels": ids.masked_fill(positions == 0, -100)}


def build_trainee(case: str, folder: Path, dtype: torch.dtype, tokens: int) -> Ours | HuggingFace:
    words = case.split()
    if words[0] == "hf":
        return HuggingFace(folder, dtype, words[1] == "packed", 2 if words[-1] == "dp2" else 1, tokens)
    return Ours(folder, dtype, ParallelConfig(tensor=2 if words[-1] == "tp2" else 1), tokens)
