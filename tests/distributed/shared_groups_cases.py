"""One job of 4 ranks: models with fewer key-value heads than tensor ranks, against transformers; their
weights in and out; a checkpoint of 4 tensor ranks in one process, and back.

usage: torchrun ... shared_groups_cases.py REFERENCE.pt SCRATCH_DIR ONE_GROUP_DIR TWO_GROUPS_DIR
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_ac2.config_training import ParallelConfig
from megatron_ac2.model.build import build_model, load_hf_config
from megatron_ac2.model.checkpoint_tensors import copy_to_host, load_model, write_tensors
from megatron_ac2.model.hf_weights import load_hf_weights
from megatron_ac2.parallel.topology import init_topology
from tests.distributed.groups import leave_groups, run_cases
from tests.distributed.model_cases import check_export, run_layout


def reshard(folder: Path, scratch: Path, written: int, read: int) -> None:
    """The weights that `written` tensor ranks save are the folder's when `read` tensor ranks load them."""
    hf_config = load_hf_config(folder)
    checkpoint = scratch / f"{folder.name}_{written}_{read}"
    for tensor in (written, read):
        parallel = ParallelConfig(tensor)
        topology = init_topology(parallel, seed=0, timeout_minutes=2)
        model = build_model(hf_config, topology, parallel, torch.float32, seed=tensor)
        if tensor == written:
            load_hf_weights(model, hf_config, topology, folder)
            if dist.get_rank() == 0:
                checkpoint.mkdir()
            dist.barrier()
            write_tensors(copy_to_host({"actor": model}, {}), checkpoint, None)
        else:
            load_model("actor", model, checkpoint)
            check_export(model, hf_config, topology, folder)
        leave_groups()


def main() -> None:
    reference_file, scratch, one_group, two_groups = map(Path, sys.argv[1:])
    reference = torch.load(reference_file)
    layouts = ((one_group, (2, 2, False)), (one_group, (4, 1, True)), (two_groups, (4, 1, False)))
    run_cases({
        **{f"{path.name} {layout}": partial(run_layout, layout, reference, path, scratch) for path, layout in layouts},
        "resharded 4 to 1": partial(reshard, two_groups, scratch, written=4, read=1),
        "resharded 1 to 4": partial(reshard, one_group, scratch, written=1, read=4),
    })  # fmt: skip


if __name__ == "__main__":
    main()
