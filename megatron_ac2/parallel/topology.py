"""The parallel layout as one frozen value: checked once, then passed in. Nothing above asks Megatron's globals.

The same processes may hold several: the first lays them out, a critic's own is laid over them besides (active.py).
"""

from __future__ import annotations

import math
import os
import socket
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

from megatron_ac2.config_training import ParallelConfig
from megatron_ac2.parallel import cpu
from megatron_ac2.parallel.active import another_layout, forget_layouts, register
from megatron_ac2.types import UserError


@dataclass(frozen=True, slots=True)
class Topology:
    """Where this process stands. `tensor`, `pipeline`, `data`, `context` are degrees; `*_rank` its place in each.

    Data ranks train on sequences of their own, context ranks share them; gradients are summed over both (pg.dp_cp).
    The ranks of a pipeline stage are cut another way for experts: `expert` x `expert_tensor` x copies.
    """

    rank: int
    world_size: int
    device: torch.device
    backend: str  # "gloo" | "nccl"
    tensor: int
    pipeline: int
    data: int
    expert: int
    expert_tensor: int
    tensor_rank: int
    pipeline_rank: int
    data_rank: int
    expert_rank: int
    expert_tensor_rank: int
    context: int
    context_rank: int
    pg: ProcessGroupCollection
    virtual_pipeline: int | None = None  # chunks of the model a rank holds; None: one, not interleaved

    @property
    def is_first_stage(self) -> bool:
        return self.pipeline_rank == 0

    @property
    def is_last_stage(self) -> bool:
        return self.pipeline_rank == self.pipeline - 1

    @property
    def microbatch_multiple(self) -> int:
        """A step's microbatches must be a multiple of it: an interleaved pipeline works in groups, one a stage."""
        return 1 if self.virtual_pipeline is None else self.pipeline

    @property
    def on_cpu(self) -> bool:
        return self.device.type == "cpu"


def init_topology(parallel: ParallelConfig, seed: int, timeout_minutes: float = 60) -> Topology:
    """Join the process group and lay Megatron's groups over it; without torchrun, a world of one.

    Call it before the first vLLM engine is built, which would make a world of its own. A second call lays the same
    processes out anew. Raises `UserError`, on every rank and before any collective, if the layout does not fit the
    number of processes.
    """
    rank, world_size, local_rank = _world()
    problems = check_world(parallel, world_size)
    if problems:
        raise UserError(problems)
    device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cpu":
        cpu.install()
    else:
        torch.cuda.set_device(device)
    timeout = timedelta(minutes=timeout_minutes)
    if not dist.is_initialized():
        backend = "gloo" if device.type == "cpu" else "nccl"
        dist.init_process_group(backend, rank=rank, world_size=world_size, timeout=timeout)
    parallel_state.destroy_model_parallel()
    forget_layouts()
    return _lay_out(parallel, seed, timeout_minutes, rank, world_size, device)


def add_topology(parallel: ParallelConfig, first: Topology, seed: int, timeout_minutes: float = 60) -> Topology:
    """Another layout over the processes of `first`, which stays the active one. A collective.

    Models in it must be built and run inside `active(topology.pg)`, as all of ours do. Raises `UserError`, on every
    rank and before any collective, if the layout does not fit the number of processes.
    """
    problems = check_world(parallel, first.world_size)
    if problems:
        raise UserError(problems)
    with another_layout():
        return _lay_out(parallel, seed, timeout_minutes, first.rank, first.world_size, first.device)


def _lay_out(
    parallel: ParallelConfig, seed: int, timeout_minutes: float, rank: int, world_size: int, device: torch.device
) -> Topology:
    """Megatron's globals must be clear; they are this layout's afterwards."""
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=parallel.tensor,
        pipeline_model_parallel_size=parallel.pipeline,
        virtual_pipeline_model_parallel_size=parallel.virtual_pipeline,
        expert_model_parallel_size=parallel.expert,
        expert_tensor_parallel_size=parallel.expert_tensor,
        context_parallel_size=parallel.context,
        distributed_timeout_minutes=timeout_minutes,
    )
    model_parallel_cuda_manual_seed(seed, force_reset_rng=True)
    topology = _read_topology(rank, world_size, device, parallel.virtual_pipeline)
    register(topology.pg)
    return topology


def check_world(parallel: ParallelConfig, world_size: int) -> list[str]:
    """What keeps `parallel` from being laid over `world_size` processes, as messages."""
    degrees = {"tensor": parallel.tensor, "pipeline": parallel.pipeline, "context": parallel.context}
    of_experts = {"expert": parallel.expert, "expert_tensor": parallel.expert_tensor}
    problems = [
        f"parallel.{name}: found {degree}, must be >= 1"
        for name, degree in {**degrees, **of_experts}.items()
        if degree is not None and degree < 1
    ]
    if problems:
        return problems
    replica = math.prod(degrees.values())
    if world_size % replica:
        problems.append(
            f"{' x '.join(f'parallel.{name}' for name in degrees)}: found "
            f"{' x '.join(map(str, degrees.values()))} = {replica} with {world_size} process(es); "
            "the number of processes must be a multiple of it"
        )
    expert_tensor = parallel.tensor if parallel.expert_tensor is None else parallel.expert_tensor
    expert_parallel = parallel.expert * expert_tensor * parallel.pipeline
    if expert_parallel != parallel.tensor * parallel.pipeline and world_size % expert_parallel:
        problems.append(
            f"parallel.expert x parallel.expert_tensor x parallel.pipeline: found {parallel.expert} x {expert_tensor} "
            f"x {parallel.pipeline} = {expert_parallel} with {world_size} process(es); the number of processes must be "
            "a multiple of it"
        )
    if parallel.sequence and parallel.tensor == 1:
        problems.append("parallel.sequence: found true with parallel.tensor 1; sequence parallel needs tensor > 1")
    if parallel.virtual_pipeline is not None and (parallel.virtual_pipeline < 2 or parallel.pipeline == 1):
        problems.append(
            f"parallel.virtual_pipeline: found {parallel.virtual_pipeline} with parallel.pipeline {parallel.pipeline}; "
            "an interleaved pipeline needs two or more of both; accepted otherwise: null"
        )
    return problems


def shutdown() -> None:
    """Leave the groups, of all layouts; without it a process may abort at exit. Idempotent."""
    parallel_state.destroy_model_parallel()
    forget_layouts()
    if dist.is_initialized():
        dist.destroy_process_group()


def _world() -> tuple[int, int, int]:
    """(rank, world size, local rank) as torchrun sets them, or a world of one."""
    if "RANK" not in os.environ:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
        os.environ.update(alone, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    needed = ("WORLD_SIZE", "LOCAL_RANK")
    missing = [f"{name}: not set, though RANK is; start with torchrun" for name in needed if name not in os.environ]
    if missing:
        raise UserError(missing)
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_RANK"])


def _read_topology(rank: int, world_size: int, device: torch.device, virtual_pipeline: int | None) -> Topology:
    return Topology(
        rank=rank,
        world_size=world_size,
        device=device,
        backend=dist.get_backend(),
        tensor=parallel_state.get_tensor_model_parallel_world_size(),
        pipeline=parallel_state.get_pipeline_model_parallel_world_size(),
        data=parallel_state.get_data_parallel_world_size(),
        expert=parallel_state.get_expert_model_parallel_world_size(),
        expert_tensor=parallel_state.get_expert_tensor_parallel_world_size(),
        tensor_rank=parallel_state.get_tensor_model_parallel_rank(),
        pipeline_rank=parallel_state.get_pipeline_model_parallel_rank(),
        data_rank=parallel_state.get_data_parallel_rank(),
        expert_rank=parallel_state.get_expert_model_parallel_rank(),
        expert_tensor_rank=parallel_state.get_expert_tensor_parallel_rank(),
        context=parallel_state.get_context_parallel_world_size(),
        context_rank=parallel_state.get_context_parallel_rank(),
        pg=ProcessGroupCollection.use_mpu_process_groups(),
        virtual_pipeline=virtual_pipeline,
    )
