"""Supervised learning on the same Megatron step: the policy on worked solutions, or a value head on step labels.
A critic needs this warm-up where its model cannot read yet; it is off unless a run's `critic.path` points at it.

`python -m megatron_ac2.sft CONFIG.yaml [OVERLAY.yaml ...] [section.field=value ...]`, alone or under torchrun.
Rows of `sft.data` (JSONL): `prompt`, `response`, and for a value head `step_ends` (character offsets), `step_correct`
(0 or 1 each), `reference`. Writes a Hugging Face folder, with `training_cost.json` beside the weights for a run that
starts there to report.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PretrainedConfig

from megatron_ac2.algorithm.value_losses import value_bce_loss
from megatron_ac2.config import Config, ModelConfig
from megatron_ac2.config_checks import check_config
from megatron_ac2.config_file import load_config, split_arguments
from megatron_ac2.config_training import Fp8Config, OptimizerConfig, ParallelConfig
from megatron_ac2.config_values import value_problems
from megatron_ac2.data.packing import longest, pack
from megatron_ac2.data.worked import WorkedSolution, load_worked, step_values
from megatron_ac2.entry import run_entry_point
from megatron_ac2.inputs import folder_problems
from megatron_ac2.model.build import build_model, check_layout, config_problems, load_hf_config
from megatron_ac2.model.data_parallel import wrap_ddp
from megatron_ac2.model.hf_weights import load_hf_weights, save_hf
from megatron_ac2.model.tokenizer import load_tokenizer, vocabulary_problems
from megatron_ac2.parallel.context import length_multiple
from megatron_ac2.parallel.topology import Topology, check_world, init_topology, shutdown
from megatron_ac2.random_streams import stream
from megatron_ac2.report import COST_FILE
from megatron_ac2.training.context_parallel import held_part
from megatron_ac2.training.optimizer import build_optimizer
from megatron_ac2.training.step import Loss, apply_step, forward_backward, my_microbatches, token_alignment
from megatron_ac2.training.token_head import TokenHead, loss_rows, negative_log_likelihood
from megatron_ac2.training.value_labels import value_metrics, value_sums
from megatron_ac2.types import PackedBatch, UserError


@dataclass
class StageConfig:
    data: str = "???"
    out: str = "???"
    head: str = "lm"  # lm | value
    labels: str = "correct"  # of a value head: correct (right so far) | value (data/worked.py, step_values)
    num_steps: int = 300
    batch_size: int = 64
    warmup_steps: int = 30
    min_lr_fraction: float = 0.02
    max_tokens_per_microbatch: int = 16_384
    optimizer: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(lr=2e-3, betas=(0.9, 0.98)))
    log_every: int = 25


@dataclass
class SftRun:
    dir: str = "runs/sft"
    seed: int = 0
    timeout_minutes: float = 10.0


@dataclass
class SftConfig:
    run: SftRun = field(default_factory=SftRun)
    model: ModelConfig = field(default_factory=ModelConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    fp8: Fp8Config = field(default_factory=Fp8Config)
    sft: StageConfig = field(default_factory=StageConfig)
    megatron: dict[str, Any] = field(default_factory=dict)


def main() -> int:
    train(load_config(*split_arguments(sys.argv[1:]), SftConfig))
    return 0


def train(config: SftConfig) -> None:
    """Build the model on this job's layout, run the stage, save the folder `sft.out`."""
    hf_config = load_hf_config(config.model.path)
    if problems := stage_problems(config, hf_config, int(os.environ.get("WORLD_SIZE", "1"))):
        raise UserError(problems)
    stage, dtype = config.sft, getattr(torch, config.model.dtype)
    tokenizer = load_tokenizer(config.model.path)
    if problems := vocabulary_problems(config.model.path, hf_config.vocab_size, tokenizer):
        raise UserError(problems)
    rows = load_worked(stage.data, tokenizer, tokenizer.eos_token_id)
    if stage.head == "value" and not all(len(row.step_positions) for row in rows):
        raise UserError(f'{stage.data}: a value head needs "step_ends" and "step_correct" in every row')
    if stage.head == "value":
        if stage.labels == "value":
            values = step_values(rows)
            rows = [replace(row, step_correct=value) for row, value in zip(rows, values, strict=True)]
        rows = [row.behind_reference(tokenizer.pad_token_id) for row in rows]
    topology = init_topology(config.parallel, config.run.seed, config.run.timeout_minutes)
    head = "hidden" if stage.head == "lm" else "value"
    model = build_model(
        hf_config, topology, config.parallel, dtype, head, config.megatron, config.run.seed, fp8=config.fp8
    )
    load_hf_weights(model, hf_config, topology, config.model.path)
    ddp = wrap_ddp(model, stage.optimizer.distributed, config.parallel.overlap)
    optimizer = build_optimizer(ddp, stage.optimizer, dtype)
    loss_function = value_loss
    if stage.head == "lm":
        loss_function = partial(language_loss, TokenHead(ddp, topology, hf_config.vocab_size, temperature=1.0))
    started, tokens = time.monotonic(), 0
    for step in range(stage.num_steps):
        optimizer.set_lr(learning_rate(stage, step))
        batch = [rows[index] for index in batch_indices(len(rows), stage.batch_size, step, config.run.seed)]
        microbatches = microbatches_of(batch, config, topology, tokenizer.pad_token_id)
        metrics = forward_backward(ddp, microbatches, loss_function, topology)
        stepped = apply_step(optimizer, metrics)
        tokens += sum(len(row.token_ids) for row in batch)
        if topology.rank == 0 and (step % stage.log_every == 0 or step == stage.num_steps - 1):
            speed = tokens / (time.monotonic() - started)
            fit = (
                f"explained_variance {value_metrics(metrics)['explained_variance']:.3f} " if "error" in metrics else ""
            )
            print(
                f"sft {stage.head} step {step + 1}/{stage.num_steps} loss {metrics['loss']:.4f} {fit}"
                f"grad_norm {stepped['grad_norm']:.3f} {speed:,.0f} tokens/s",
                flush=True,
            )
    save_hf(ddp, hf_config, topology, stage.out, config.model.path)
    if topology.rank == 0:
        cost = {"steps": stage.num_steps, "tokens": tokens, "seconds": time.monotonic() - started}
        earlier = earlier_cost(config)
        cost = {name: value + earlier.get(name, 0) for name, value in cost.items()}
        (Path(stage.out) / COST_FILE).write_text(json.dumps({"head": stage.head, **cost}))
    shutdown()


def earlier_cost(config: SftConfig) -> dict[str, float]:
    """What stages of the same head had spent on the folder that this one starts from; empty if none did."""
    file = Path(config.model.path) / COST_FILE
    found = json.loads(file.read_text()) if file.is_file() else {}
    head = found.pop("head", None)
    return found if head == config.sft.head else {}


def stage_problems(config: SftConfig, hf_config: PretrainedConfig, world_size: int) -> list[str]:
    """Everything that keeps this stage from running, as messages; of what it has in common with a training run by the
    same checks."""
    problems = value_problems(config) + folder_problems("sft.out", config.sft.out)
    common = Config(model=config.model, parallel=config.parallel, fp8=config.fp8, megatron=config.megatron)
    if impossible := check_config(common):
        return list(dict.fromkeys(problems + impossible))
    problems += check_world(config.parallel, world_size) + check_layout(hf_config, config.parallel)
    problems += config_problems(hf_config, config.parallel, config.megatron, config.fp8)
    return list(dict.fromkeys(problems))


def batch_indices(num_rows: int, batch_size: int, step: int, seed: int) -> list[int]:
    """Rows of one step: an order keyed by (seed, epoch), without replacement within the epoch."""
    per_epoch = max(num_rows // batch_size, 1)
    epoch, place = divmod(step, per_epoch)
    order = stream(seed, "sft_order", epoch).permutation(num_rows)
    return order[place * batch_size : (place + 1) * batch_size].tolist()


def learning_rate(stage: StageConfig, step: int) -> float:
    """Linear warm-up, then half a cosine down to `min_lr_fraction` of the peak."""
    if step < stage.warmup_steps:
        return stage.optimizer.lr * (step + 1) / stage.warmup_steps
    done = (step - stage.warmup_steps) / max(stage.num_steps - stage.warmup_steps, 1)
    fraction = stage.min_lr_fraction + (1 - stage.min_lr_fraction) * 0.5 * (1 + math.cos(math.pi * done))
    return stage.optimizer.lr * fraction


def microbatches_of(
    batch: Sequence[WorkedSolution], config: SftConfig, topology: Topology, pad_id: int
) -> list[PackedBatch]:
    """This data rank's microbatches. A value head is labelled at step ends only, so its loss starts at the prompt."""
    packed, stage, align = [], config.sft, token_alignment(topology, config.fp8)
    filler = longest([row.token_ids for row in batch])
    for indices in my_microbatches([len(row.token_ids) for row in batch], topology, stage.max_tokens_per_microbatch):
        rows = [batch[index] for index in indices]
        fields = {} if stage.head == "lm" else {"labelled": [_labelled(row) for row in rows],
                                                "targets": [_targets(row) for row in rows]}  # fmt: skip
        batch_of = pack(
            [row.token_ids for row in rows], fields, [row.prompt_len for row in rows], align, pad_id,
            length_multiple=length_multiple(topology.context), filler=filler,
        )  # fmt: skip
        packed.append(held_part(batch_of, topology))
    return packed


def _labelled(row: WorkedSolution) -> np.ndarray:
    """1 from the end of the first step on. Entry i sits at position prompt_len - 1 + i, as all fields of a pack do."""
    return (_last_step(row) >= 0).astype(np.float32)


def _targets(row: WorkedSolution) -> np.ndarray:
    """Each token has the label of the last step that is complete there: a state may be cut within a step."""
    last = _last_step(row)
    return np.where(last >= 0, row.step_correct[np.maximum(last, 0)], 0.0).astype(np.float32)


def _last_step(row: WorkedSolution) -> np.ndarray:
    """int64[N]: the last complete step at positions prompt_len - 1, ..., or -1 before the first."""
    positions = np.arange(row.prompt_len - 1, len(row.token_ids) - 1)
    return np.searchsorted(row.step_positions, positions, side="right") - 1


def language_loss(head: TokenHead, output: torch.Tensor, batch: PackedBatch) -> Loss:
    """Negative log-likelihood of the response tokens, summed."""
    rows = loss_rows(batch.loss_mask)
    found = head.loss(output, batch, rows, negative_log_likelihood(batch.loss_mask[0, rows]))
    return found.loss, batch.loss_mask.sum(), {}


def value_loss(logits: torch.Tensor, batch: PackedBatch) -> Loss:
    """Binary cross-entropy at the labelled positions, summed; logits [1, T, 1]."""
    labelled, targets = batch.fields["labelled"], batch.fields["targets"]
    total = value_bce_loss(logits.squeeze(-1), targets, labelled)
    return total, labelled.sum(), value_sums(logits.detach().squeeze(-1).sigmoid(), targets, labelled)


if __name__ == "__main__":
    run_entry_point(main)
