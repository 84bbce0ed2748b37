"""AC2 with a mixture of experts: every rank trains its share of them, and each rank's engine has them all."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, Qwen3MoeConfig

from tests.end_to_end.runs import Launcher, steps

NUM_EXPERTS = 4


def upcycle(dense: Path, out: Path) -> Path:
    """A policy's feed-forwards, several times over and each somewhat changed, behind a router: it still answers."""
    shutil.copytree(dense, out)
    tensors, generator = load_file(dense / "model.safetensors"), torch.Generator().manual_seed(0)
    fields = AutoConfig.from_pretrained(dense).to_dict()
    for name in [name for name in tensors if ".mlp." in name]:
        matrix, (base, projection) = tensors.pop(name), name.split(".mlp.")
        for expert in range(NUM_EXPERTS):
            noise = 0.1 * matrix.std() * torch.randn(matrix.shape, generator=generator)
            tensors[f"{base}.mlp.experts.{expert}.{projection}"] = matrix + noise
        hidden = fields["hidden_size"]
        tensors[f"{base}.mlp.gate.weight"] = torch.randn(NUM_EXPERTS, hidden, generator=generator) / hidden**0.5
    for name in ("model_type", "architectures"):
        del fields[name]
    config = Qwen3MoeConfig(
        **fields, architectures=["Qwen3MoeForCausalLM"], num_experts=NUM_EXPERTS, num_experts_per_tok=2,
        moe_intermediate_size=fields["intermediate_size"], norm_topk_prob=True,
    )  # fmt: skip
    config.save_pretrained(out)
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    return out


def test_experts_shared_out_train_as_experts_on_every_rank(launcher: Launcher, start, tmp_path: Path) -> None:
    """Replaying the engine's choices too: in fp32 the trainer's own are the same. See test_engine.py for bf16."""
    model = upcycle(start[0], tmp_path / "experts")
    changes = (f"model.path={model}", "run.num_steps=3", "run.checkpoint_every=0")
    for expert, replay in ((2, "true"), (1, "false")):
        more = (f"parallel.expert={expert}", f"actor.router_replay={replay}")
        launcher.run(tmp_path / f"ep{expert}", *changes, *more).passed()
    shared, whole = (steps(tmp_path / f"ep{expert}") for expert in (2, 1))
    assert len(shared) == 3 and any(row["actor/grad_norm"] > 0 for row in shared) and shared[2]["critic/loss"] > 0
    assert all(row["mismatch/logprob_abs_max"] < 1e-4 for row in shared), [
        r["mismatch/logprob_abs_max"] for r in shared
    ]
    assert all(row["mismatch/rerouted"] == 0 for row in shared) and "mismatch/rerouted" not in whole[0]
    names = ("actor/loss", "actor/grad_norm", "actor/update_norm", "actor/entropy", "train/endpoint_value",
             "train/chunk_len", "critic/loss")  # fmt: skip
    for one, other in zip(shared, whole, strict=True):
        both = [name for name in names if name in other]
        assert {name: one[name] for name in both} == pytest.approx({name: other[name] for name in both}, abs=5e-6)
