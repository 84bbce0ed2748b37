"""Logits or values of a Megatron model beside transformers', of the same Hugging Face folder, on a few fixed tokens.

Equal bits of every tensor do not show that both sides compute the same with them: a wrong angle, a norm's epsilon or
an order of heads would pass. This would not.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from transformers import AutoModel, AutoModelForCausalLM, PretrainedConfig

from megatron_ac2.data.packing import pack
from megatron_ac2.model.hf_files import HfReader
from megatron_ac2.model.hf_table import VALUE_HEAD
from megatron_ac2.parallel.collectives import broadcast_object, gather_objects
from megatron_ac2.parallel.topology import Topology
from megatron_ac2.training import step
from megatron_ac2.types import UserError

LENGTHS = (11, 24, 5)
# Root mean square of the differences over that of the logits themselves: what rounding in this dtype explains.
ACCEPTED = {torch.float32: 1e-4, torch.bfloat16: 5e-2}


def check_logits(
    model: torch.nn.Module, hf_config: PretrainedConfig, topology: Topology, folder: Path, dtype: torch.dtype, head: str
) -> float:
    """The relative difference, the same on every rank. A collective. `head`: lm, or value with one in the folder.

    Rank 0 loads transformers' model from `folder` in `dtype`. Raises `UserError` on every rank for a difference that
    rounding does not explain.
    """
    rng = np.random.default_rng(0)
    sequences = [rng.integers(0, hf_config.vocab_size, length) for length in LENGTHS]
    expected = broadcast_object(_transformers(folder, dtype, head, sequences) if topology.rank == 0 else None)
    batch = pack(sequences, {}, list(LENGTHS), step.token_alignment(topology), pad_id=0)  # no token is predicted
    batch = step.to_device(batch, topology.device)
    batches = [batch] * topology.microbatch_multiple
    outputs = step.forward_only(model, batches, lambda output, _: output[0], topology)  # none before the last stage
    differences = [_difference(_whole(output, head, topology), expected) for output in outputs]
    found = max(gather_objects(max(differences, default=0.0)))
    if not found <= ACCEPTED[dtype]:
        what = "values" if head == "value" else "logits"
        raise UserError(
            f"{what}: Megatron's differ from those of transformers on {folder} by {found:.1e} of their size; accepted "
            f"in {str(dtype).removeprefix('torch.')}: {ACCEPTED[dtype]:.0e}"
        )
    return found


@torch.no_grad()
def _transformers(folder: Path, dtype: torch.dtype, head: str, sequences: list[np.ndarray]) -> torch.Tensor:
    """Logits [T, V], or values of the trunk and the head in plain torch [T, outputs]; each sequence alone."""
    rows = [torch.from_numpy(ids)[None] for ids in sequences]
    if head == "lm":
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True).eval()
        return torch.cat([model(ids).logits[0].float() for ids in rows])
    trunk = AutoModel.from_pretrained(folder, dtype=dtype, local_files_only=True).eval()
    weight = HfReader(folder).read(VALUE_HEAD).float()
    return torch.cat([trunk(ids).last_hidden_state[0].float() @ weight.t() for ids in rows])


def _whole(output: torch.Tensor, head: str, topology: Topology) -> torch.Tensor:
    """Of all tensor ranks, without the padding of tokens and vocabulary."""
    if head == "lm" and topology.tensor > 1:
        pieces = [torch.empty_like(output) for _ in range(topology.tensor)]
        dist.all_gather(pieces, output.contiguous(), group=topology.pg.tp)
        output = torch.cat(pieces, dim=-1)
    return output[: sum(LENGTHS)].float().cpu()


def _difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    difference = found[:, : expected.shape[1]] - expected
    return (difference.square().mean().sqrt() / expected.square().mean().sqrt()).item()
