"""What FP8 rounding does to a model, by recipe, without a GPU: the rounding is emulated (config section `fp8`).

    python tools/fp8_error.py MODEL_DIR WORKED.jsonl [--tokens 4096]

MODEL_DIR is a Hugging Face folder, WORKED.jsonl has rows {"prompt", "response"}. One process, fp32 but for rounding.
Compared with the same model unrounded: the loss (nats a response token); the response tokens' log-probs, which is the
mismatch of an FP8 trainer with an exact engine; and a policy gradient, of responses with advantages of 1 and -1 drawn
at random. "delayed, first" is delayed scaling's first pass, under scales of 1, the others of it are the third.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import AutoTokenizer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_ac2.config_training import Fp8Config, ParallelConfig  # noqa: E402
from megatron_ac2.data.packing import pack  # noqa: E402
from megatron_ac2.data.worked import load_worked  # noqa: E402
from megatron_ac2.kernels.vocab_logprobs import token_logprobs  # noqa: E402
from megatron_ac2.model.build import build_model, load_hf_config  # noqa: E402
from megatron_ac2.model.data_parallel import wrap_ddp  # noqa: E402
from megatron_ac2.model.fp8 import RECIPES  # noqa: E402
from megatron_ac2.model.hf_weights import load_hf_weights  # noqa: E402
from megatron_ac2.parallel.topology import Topology, init_topology, shutdown  # noqa: E402
from megatron_ac2.training.step import forward_backward  # noqa: E402
from megatron_ac2.types import PackedBatch  # noqa: E402

_ALIGN = 128  # whole blocks in every recipe, so that all see the same tokens
HEADINGS = ("recipe", "format", "loss", "mean abs log-prob difference", "largest", "KL k3", "gradient's relative error")


@dataclass(frozen=True, slots=True)
class Measured:
    loss: float
    logprobs: torch.Tensor  # fp32[N], of the response tokens
    gradient: torch.Tensor  # fp32, of all parameters, of the mean of advantage x log-prob


def measure(model_dir: str, topology: Topology, batch: PackedBatch, fp8: Fp8Config, num_passes: int) -> Measured:
    """The last of `num_passes` forward and backward passes."""
    hf_config = load_hf_config(model_dir)
    model = build_model(hf_config, topology, ParallelConfig(), torch.float32, fp8=fp8)
    load_hf_weights(model, hf_config, topology, model_dir)
    ddp = wrap_ddp(model, distributed_optimizer=False)
    kept: list[torch.Tensor] = []

    def loss(output: torch.Tensor, packed: PackedBatch) -> tuple[torch.Tensor, torch.Tensor, dict]:
        found = token_logprobs(output, packed.labels, topology.pg.tp, 1.0, hf_config.vocab_size).labels
        kept.append(found.detach()[packed.loss_mask.bool()])
        return -(found * packed.fields["advantages"]).sum(), packed.loss_mask.sum(), {}

    for _ in range(num_passes):
        forward_backward(ddp, [batch], loss, topology)
    gradient = torch.cat([parameter.main_grad.flatten() for parameter in ddp.parameters()])
    return Measured(-kept[-1].mean().item(), kept[-1], gradient)


def row(name: str, form: str, found: Measured, exact: Measured) -> str:
    difference = found.logprobs - exact.logprobs
    kl = (difference.exp() - 1 - difference).mean()  # k3, of the exact model from this one
    error = (found.gradient - exact.gradient).norm() / exact.gradient.norm()
    cells = (
        name, form, f"{found.loss:.4f}", f"{difference.abs().mean():.1e}", f"{difference.abs().max():.2f}", f"{kl:.1e}",
        f"{100 * error:.1f} %",
    )  # fmt: skip
    return f"| {' | '.join(cells)} |"


def table(model_dir: str, topology: Topology, batch: PackedBatch) -> list[str]:
    exact = measure(model_dir, topology, batch, Fp8Config(), 1)
    lines = [f"| {' | '.join(HEADINGS)} |", "|---" * len(HEADINGS) + "|", row("none", "", exact, exact)]
    first = Fp8Config("delayed", emulate=True, format="hybrid")
    lines.append(row("delayed, first", "hybrid", measure(model_dir, topology, batch, first, 1), exact))
    for recipe in RECIPES:
        for form in ("hybrid", "e4m3"):
            fp8 = Fp8Config(recipe, emulate=True, format=form)
            found = measure(model_dir, topology, batch, fp8, 3 if recipe == "delayed" else 1)
            lines.append(row(recipe, form, found, exact))
    return lines


def read_batch(model_dir: str, data: str, num_tokens: int) -> PackedBatch:
    """The first rows, up to `num_tokens` tokens, in one microbatch."""
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    rows, total = [], 0
    for worked in load_worked(data, tokenizer, tokenizer.eos_token_id):
        total += len(worked.token_ids)
        if rows and total > num_tokens:
            break
        rows.append(worked)
    signs = np.random.default_rng(0).choice([-1.0, 1.0], len(rows))
    lengths = [len(worked.token_ids) - worked.prompt_len for worked in rows]
    advantages = [np.full(length, sign, np.float32) for length, sign in zip(lengths, signs, strict=True)]
    ids, starts = [worked.token_ids for worked in rows], [worked.prompt_len for worked in rows]
    return pack(ids, {"advantages": advantages}, starts, _ALIGN, tokenizer.eos_token_id)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model_dir")
    parser.add_argument("data")
    parser.add_argument("--tokens", type=int, default=4096)
    arguments = parser.parse_args()
    topology = init_topology(ParallelConfig(), seed=0)
    batch = read_batch(arguments.model_dir, arguments.data, arguments.tokens)
    print(f"{int(batch.loss_mask.sum())} response tokens\n")
    print("\n".join(table(arguments.model_dir, topology, batch)))
    shutdown()


if __name__ == "__main__":
    main()
