"""One torchrun launch, many layouts of experts: forward and backward against transformers, weights in and out.

Data-parallel ranks have microbatches of their own, so that expert ranks send each other different numbers of tokens.

usage: torchrun ... expert_cases.py REFERENCE.pt SCRATCH_DIR MODEL_DIR ...
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_ac2.config_training import ParallelConfig
from megatron_ac2.model.build import build_model, check_layout, load_hf_config
from megatron_ac2.model.chunks import gpt_models, joined
from megatron_ac2.model.data_parallel import wrap_ddp
from megatron_ac2.model.hf_weights import load_hf_weights
from megatron_ac2.parallel.topology import Topology, init_topology, shutdown
from tests.distributed.groups import leave_groups
from tests.distributed.model_cases import check_export, check_forward, check_gradients, check_refusal, check_save

LAYOUTS: dict[int, dict[str, dict[str, Any]]] = {
    1: {"alone": {}},
    2: {
        "ep2": {"expert": 2},
        "tp2": {"tensor": 2, "sequence": True},
        "tp2 ep2, experts whole": {"tensor": 2, "sequence": True, "expert": 2, "expert_tensor": 1},
        "pp2": {"pipeline": 2},
    },
    4: {
        "ep4": {"expert": 4},
        "tp2 ep2": {"tensor": 2, "sequence": True, "expert": 2},
        "pp2 ep2": {"pipeline": 2, "expert": 2},
        "pp2 vpp2 ep2": {"pipeline": 2, "virtual_pipeline": 2, "expert": 2},
        "tp2 pp2 ep2, experts whole": {
            "tensor": 2, "sequence": True, "pipeline": 2, "expert": 2, "expert_tensor": 1,
        },
    },
}  # fmt: skip


def share(reference: dict[str, Any], topology: Topology) -> dict[str, Any]:
    """This data rank's microbatches, and what is expected of them."""
    mine = slice(topology.data_rank, None, topology.data)
    return {name: part[mine] if isinstance(part, list) else part for name, part in reference.items()}


def run_layout(parallel: ParallelConfig, reference: dict[str, Any], folder: Path, scratch: Path) -> None:
    topology = init_topology(parallel, seed=0, timeout_minutes=2)
    hf_config = load_hf_config(folder)
    mine = share(reference, topology)
    model = wrap_ddp(build_model(hf_config, topology, parallel, torch.float32), distributed_optimizer=False)
    load_hf_weights(model, hf_config, topology, folder)
    check_forward(model, mine, topology, "logits", hf_config.vocab_size)
    check_gradients(model, hf_config, mine, topology)
    check_export(model, hf_config, topology, folder)
    check_save(joined(gpt_models(model)), hf_config, topology, parallel, folder, scratch, "lm")
    critic = build_model(hf_config, topology, parallel, torch.float32, head="value", seed=5)
    load_hf_weights(critic, hf_config, topology, folder)
    check_forward(critic, mine, topology, "values", hf_config.vocab_size)
    check_save(critic, hf_config, topology, parallel, folder, scratch, "value")
    if folder.name == "qwen3_moe":
        check_refusal(
            model, hf_config, topology, scratch / "odd_experts",
            "layers.1.mlp.experts.5.up_proj.weight: missing", "layers.0.mlp.experts.8.up_proj.weight: found",
        )  # fmt: skip
        check_refusal(model, hf_config, topology, scratch / "fused_experts", "experts fused in one tensor")


def main() -> None:
    reference_file, scratch, *folders = map(Path, sys.argv[1:])
    references = torch.load(reference_file)
    for name, fields in LAYOUTS[int(os.environ["WORLD_SIZE"])].items():
        parallel = ParallelConfig(**fields)
        for folder in folders:
            if folder.name == "qwen3_moe_last" and parallel.tensor > 1 and parallel.pipeline == 1:
                continue  # another model in layouts that make no difference to it
            if folder.name == "qwen3_moe" and parallel.virtual_pipeline:
                continue  # two layers
            assert not check_layout(load_hf_config(folder), parallel)
            run_layout(parallel, references[folder.name], folder, scratch)
            leave_groups()
            if dist.get_rank() == 0:
                print("passed", folder.name, name, flush=True)
    shutdown()
    print("done", flush=True)


if __name__ == "__main__":
    main()
