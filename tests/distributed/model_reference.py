"""What transformers says of a model, one sequence at a time, nothing packed; values come from a hand-made head."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from tests.distributed.tiny_families import split_experts


def write_reference(
    file: Path, folders: Sequence[Path], lengths: Sequence[Sequence[int]], masked: Sequence[int] = ()
) -> Path:
    """Of every folder, by name, its answers to microbatches of sequences of these lengths; some without loss."""
    rng = np.random.default_rng(3)
    microbatches = [[torch.from_numpy(rng.integers(0, 250, n)) for n in sizes] for sizes in lengths]
    torch.save({folder.name: answers(folder, microbatches, masked) for folder in folders}, file)
    return file


def answers(folder: Path, microbatches: list[list[torch.Tensor]], masked: Sequence[int]) -> dict[str, Any]:
    """Logits, values, and the gradient of the mean over microbatches of <logits, cotangents>."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, experts_implementation="eager")
    generator = torch.Generator().manual_seed(5)
    head = torch.randn(1, model.config.hidden_size, generator=generator) / model.config.hidden_size
    logits = [torch.cat([model(ids[None]).logits[0] for ids in sequences]) for sequences in microbatches]
    cotangents = [torch.randn(piece.shape, generator=generator) for piece in logits]
    for index in masked:
        cotangents[index].zero_()
    sum((piece * weights).sum() for piece, weights in zip(logits, cotangents, strict=True)).backward()
    with torch.no_grad():
        hidden = [torch.cat([model.model(ids[None]).last_hidden_state[0] for ids in ids_of]) for ids_of in microbatches]
    gradients = {name: parameter.grad / len(microbatches) for name, parameter in model.named_parameters()}
    return {
        "microbatches": microbatches,
        "logits": [piece.detach() for piece in logits],
        "values": [(piece @ head.T)[:, 0] for piece in hidden],
        "cotangents": cotangents,
        "gradients": split_experts(gradients),
    }
