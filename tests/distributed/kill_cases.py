"""A process that checks the latest checkpoint and then saves one after another until it is killed.

usage: kill_cases.py MODEL_DIR ROOT LAST_STEP   (saves up to LAST_STEP, then ends)
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch

from megatron_ac2.config import OptimizerConfig, ParallelConfig
from megatron_ac2.model.build import build_model, load_hf_config, wrap_ddp
from megatron_ac2.model.checkpoint import load_checkpoint, save_checkpoint
from megatron_ac2.parallel.topology import init_topology, shutdown
from megatron_ac2.training.optimizer import build_optimizer


def fill(model: torch.nn.Module, step: int) -> None:
    with torch.no_grad():
        for index, parameter in enumerate(model.parameters()):
            parameter.fill_(step + index / 64)


def main() -> None:
    folder, root, last = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    parallel = ParallelConfig()
    topology = init_topology(parallel, seed=0, timeout_minutes=2)
    model = wrap_ddp(build_model(load_hf_config(folder), topology, parallel, torch.float32), distributed_optimizer=True)
    optimizer = build_optimizer(model, OptimizerConfig(distributed=True), torch.float32)
    state = load_checkpoint(root, {"m": model}, {"m": optimizer}, {})
    first = 0
    if state is not None:
        first = state["step"]
        assert np.array_equal(state["steps"], np.arange(first))
        expected = [first + index / 64 for index in range(len(list(model.parameters())))]
        assert [(p.min().item(), p.max().item()) for p in model.parameters()] == [(x, x) for x in expected]
    print("ready", first, flush=True)
    for step in range(first + 1, last + 1):
        fill(model, step)
        run_state = {"step": step, "steps": np.arange(step)}
        save_checkpoint(root, step, {"m": model}, {"m": optimizer}, run_state, keep=2, identity={})
        print("saved", step, flush=True)
    shutdown()


if __name__ == "__main__":
    main()
