"""How long a save keeps training waiting, with and without run.async_save, in turns in one run on the same weights.

    python tools/bench_checkpoint.py --layers 4 --hidden 512 --folder /where/checkpoints/go
    torchrun --nproc_per_node=8 tools/bench_checkpoint.py --layers 36 --hidden 2560 --intermediate 9728

A bf16 model of random weights, the distributed optimizer, two Adam states (actor and generative critic): 22 bytes a
weight. blocked: until `save` returns. total: until the checkpoint is the latest, every file on disk and hashed.
step: a forward and backward pass of --tokens tokens, alone, and while a checkpoint is being written.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import Qwen3Config

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_ac2.config_training import OptimizerConfig, ParallelConfig  # noqa: E402
from megatron_ac2.model.build import build_model  # noqa: E402
from megatron_ac2.model.checkpoint import CheckpointSaver, Kept, latest  # noqa: E402
from megatron_ac2.model.checkpoint_manifest import read_manifest  # noqa: E402
from megatron_ac2.model.data_parallel import wrap_ddp  # noqa: E402
from megatron_ac2.parallel.collectives import barrier, broadcast_object  # noqa: E402
from megatron_ac2.parallel.topology import Topology, init_topology, shutdown  # noqa: E402
from megatron_ac2.training.optimizer import SharedWeightsOptimizer  # noqa: E402
from megatron_ac2.training.step import forward_backward  # noqa: E402
from megatron_ac2.types import PackedBatch  # noqa: E402

GIB = 1 << 30


class Trainee:
    def __init__(self, arguments: argparse.Namespace, topology: Topology):
        parallel = ParallelConfig(tensor=arguments.tensor, pipeline=arguments.pipeline)
        hf_config = Qwen3Config(
            vocab_size=arguments.vocab, hidden_size=arguments.hidden, num_hidden_layers=arguments.layers,
            intermediate_size=arguments.intermediate or 3 * arguments.hidden, head_dim=64, tie_word_embeddings=True,
            num_attention_heads=arguments.hidden // 64, num_key_value_heads=arguments.hidden // 64,
            architectures=["Qwen3ForCausalLM"],
        )  # fmt: skip
        self.topology = topology
        self.model = wrap_ddp(build_model(hf_config, topology, parallel, torch.bfloat16), distributed_optimizer=True)
        roles = {"actor": OptimizerConfig(), "critic": OptimizerConfig()}
        self.optimizer = SharedWeightsOptimizer(self.model, roles, torch.bfloat16)
        ids = torch.arange(arguments.tokens, device=topology.device) % arguments.vocab
        self.batch = PackedBatch(
            token_ids=ids[None], position_ids=torch.arange(len(ids), device=topology.device)[None], labels=ids[None],
            loss_mask=torch.ones(1, len(ids), device=topology.device), max_seq_len=len(ids), fields={},
            cu_seqlens=torch.tensor([0, len(ids)], dtype=torch.int32, device=topology.device),
        )  # fmt: skip

    def step(self) -> None:
        forward_backward(self.model, [self.batch], self.loss, self.topology)
        self.optimizer.zero_grad()

    def loss(self, output: torch.Tensor, batch: PackedBatch) -> tuple[torch.Tensor, torch.Tensor, dict]:
        return output.float().square().mean(), batch.loss_mask.sum(), {}


def timed(action: Callable[[], object], topology: Topology) -> float:
    """Seconds until the slowest rank is done."""
    barrier()
    start = time.perf_counter()
    action()
    if not topology.on_cpu:
        torch.cuda.synchronize()
    barrier()
    return time.perf_counter() - start


def measure(trainee: Trainee, saver: CheckpointSaver, step: int) -> dict[str, list[float]]:
    """Blocked, total, and the steps taken meanwhile; at least one, which may end after the writing."""
    topology, steps = trainee.topology, []
    start = time.perf_counter()
    save = lambda: saver.save(step, {"actor": trainee.model}, {"actor": trainee.optimizer}, {}, {})  # noqa: E731
    blocked = timed(save, topology)
    name = f"step_{step:06d}"
    while saver.asynchronous and not broadcast_object((saver.root / name).is_dir()):
        steps.append(timed(trainee.step, topology))
    saver.wait()
    return {"blocked": [blocked], "total": [time.perf_counter() - start], "steps": steps}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("layers", 4), ("hidden", 512), ("intermediate", 0), ("vocab", 32_768), ("tokens", 512),
                          ("tensor", 1), ("pipeline", 1), ("repeats", 3)):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--folder", type=Path, default=None, help="shared by all ranks; default: a temporary one")
    return parser.parse_args()


def main() -> None:
    arguments = parse()
    topology = init_topology(ParallelConfig(tensor=arguments.tensor, pipeline=arguments.pipeline), seed=0)
    trainee = Trainee(arguments, topology)
    with tempfile.TemporaryDirectory(dir=arguments.folder) as own:
        root = Path(broadcast_object(own))
        kinds = {"blocking": False, "async": True}
        savers = {kind: CheckpointSaver(root / kind, Kept(1), asynchronous) for kind, asynchronous in kinds.items()}
        found: dict[str, dict[str, list[float]]] = {kind: {"blocked": [], "total": [], "steps": []} for kind in kinds}
        trainee.step()
        alone = [timed(trainee.step, topology) for _ in range(arguments.repeats)]
        for repeat in range(arguments.repeats + 1):  # the first one warms up
            for kind, saver in savers.items():
                for name, values in measure(trainee, saver, repeat + 1).items():
                    found[kind][name] += values if repeat else []
        num_bytes = sum(size for size, _ in read_manifest(latest(root / "async")).values())
        barrier()
    if topology.rank == 0:
        report(num_bytes, found, alone, topology)
    shutdown()


def report(num_bytes: int, found: dict[str, dict[str, list[float]]], alone: list[float], topology: Topology) -> None:
    median = statistics.median
    print(f"{num_bytes / GIB:.2f} GiB, {topology.world_size} rank(s), {topology.device.type}; medians")
    for kind, times in found.items():
        blocked, total = median(times["blocked"]), median(times["total"])
        print(f"  {kind:9s} blocked {blocked:7.2f} s  total {total:7.2f} s  {num_bytes / GIB / total:.2f} GiB/s")
    ratio = median(found["blocking"]["blocked"]) / median(found["async"]["blocked"])
    print(f"  async keeps training waiting {ratio:.1f} times shorter")
    meanwhile = found["async"]["steps"]
    print(f"  step      alone {median(alone):.2f} s  while a checkpoint is written {median(meanwhile):.2f} s")


if __name__ == "__main__":
    main()
