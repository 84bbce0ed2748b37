"""Several cases, and topologies, one after another in the same processes."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import torch.distributed as dist
from megatron.core import parallel_state

from megatron_ac2.config_training import ParallelConfig
from megatron_ac2.parallel.active import forget_layouts, layouts
from megatron_ac2.parallel.topology import shutdown


def parallel_of(tensor: int, pipeline: int, sequence: bool, virtual: int | None = None) -> ParallelConfig:
    """A layout as the tables of the cases write it."""
    return ParallelConfig(tensor=tensor, pipeline=pipeline, sequence=sequence, virtual_pipeline=virtual)


def leave_groups() -> None:
    """End the groups of topologies that are used no more. Megatron only forgets them: each keeps threads and sockets,
    some sixty threads a topology, and a few hundred of them starve the others."""
    dist.barrier()  # nobody is still in one of their collectives
    for values in layouts():
        for group in values["_global_process_group_list"] or []:
            if group is not None:  # None stands for the whole world's
                dist.destroy_process_group(group)
    parallel_state.destroy_model_parallel()
    forget_layouts()


def run_cases(cases: Mapping[str, Callable[[], None]]) -> None:
    """All that a rank does: each case in topologies of its own, then its end; rank 0 says what passed."""
    for name, case in cases.items():
        start = time.monotonic()
        case()
        leave_groups()
        if dist.get_rank() == 0:
            print(f"passed {name} ({time.monotonic() - start:.1f} s)", flush=True)
    shutdown()
    print("done", flush=True)
