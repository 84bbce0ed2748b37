"""One job, many layouts of experts: forward and backward against transformers, weights in and out.

Data-parallel ranks have microbatches of their own, so that expert ranks send each other different numbers of tokens.

usage: torchrun ... expert_cases.py REFERENCE.pt SCRATCH_DIR MODEL_DIR ...
"""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megatron_ac2.config_training import ParallelConfig
from megatron_ac2.model.build import check_layout, load_hf_config
from megatron_ac2.parallel.topology import Topology, init_topology
from tests.distributed.groups import run_cases
from tests.distributed.model_cases import check_model, check_refusal

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
    model, _ = check_model(hf_config, topology, parallel, share(reference, topology), folder, scratch)
    if folder.name == "qwen3_moe":
        check_refusal(
            model, hf_config, topology, scratch / "odd_experts",
            "layers.1.mlp.experts.5.up_proj.weight: missing", "layers.0.mlp.experts.8.up_proj.weight: found",
        )  # fmt: skip
        check_refusal(model, hf_config, topology, scratch / "fused_experts", "experts fused in one tensor")


def main() -> None:
    reference_file, scratch, *folders = map(Path, sys.argv[1:])
    references = torch.load(reference_file)
    cases = {}
    for name, fields in LAYOUTS[int(os.environ["WORLD_SIZE"])].items():
        parallel = ParallelConfig(**fields)
        for folder in folders:
            if folder.name == "qwen3_moe_last" and parallel.tensor > 1 and parallel.pipeline == 1:
                continue  # another model in layouts that make no difference to it
            if folder.name == "qwen3_moe" and parallel.virtual_pipeline:
                continue  # two layers
            assert not check_layout(load_hf_config(folder), parallel)
            cases[f"{folder.name} {name}"] = partial(run_layout, parallel, references[folder.name], folder, scratch)
    run_cases(cases)


if __name__ == "__main__":
    main()
