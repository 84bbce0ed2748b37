"""One process: forward and backward of the same model in bfloat16 and in an FP8 recipe of Transformer Engine.

usage: torchrun --nproc_per_node=1 fp8_step.py RECIPE
"""

from __future__ import annotations

import sys

import numpy as np
import torch

from megatron_ac2.config_training import Fp8Config, ParallelConfig
from megatron_ac2.data.packing import pack
from megatron_ac2.model.build import build_model
from megatron_ac2.model.data_parallel import wrap_ddp
from megatron_ac2.parallel.topology import Topology, init_topology, shutdown
from megatron_ac2.training.step import forward_backward, to_device, token_alignment
from tests.gpu.test_fp8_cuda import MODEL

NUM_PASSES = 3  # delayed scales start at 1


def run(topology: Topology, fp8: Fp8Config) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of the last pass and its gradients, in one vector."""
    model = wrap_ddp(build_model(MODEL, topology, ParallelConfig(), torch.bfloat16, seed=3, fp8=fp8), False)
    sequences = [np.random.default_rng(length).integers(0, 250, length) for length in (150, 66, 41)]
    batch = pack(sequences, {}, [1] * 3, token_alignment(topology, fp8), pad_id=0)
    batch = to_device(batch, topology.device)
    seen = []

    def loss(output, batch):
        seen.append(output[0, :257, :250].detach().float())
        logprobs = output.float().log_softmax(-1).gather(-1, batch.labels[..., None])[..., 0]
        return -(logprobs * batch.loss_mask).sum(), batch.loss_mask.sum(), {}

    for _ in range(NUM_PASSES):
        forward_backward(model, [batch], loss, topology)
    return seen[-1], torch.cat([parameter.main_grad.flatten() for parameter in model.parameters()])


def main() -> None:
    recipe = sys.argv[1]
    topology = init_topology(ParallelConfig(), seed=0, timeout_minutes=5)
    exact, rounded = run(topology, Fp8Config()), run(topology, Fp8Config(recipe))
    logits, gradients = (((a - b).norm() / b.norm()).item() for a, b in zip(rounded, exact, strict=True))
    # bfloat16 against itself would be 0: the layers are the same, and what is not quantised is too.
    assert 1e-3 < logits < 0.3 and 1e-3 < gradients < 0.6, (logits, gradients)
    print("passed", recipe, f"logits {logits:.1e}, gradients {gradients:.1e}", flush=True)
    shutdown()


if __name__ == "__main__":
    main()
