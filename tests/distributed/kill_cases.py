"""Jobs of two ranks that save one checkpoint after another in the background, each killed at a random moment.

A job loads and checks what the one before has left. Ranks are forked from this process, which has imported all they
need and holds no process group.

usage: kill_cases.py MODEL_DIR ROOT NUM_KILLS
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from megatron_ac2.config_training import OptimizerConfig, ParallelConfig
from megatron_ac2.model.build import build_model, load_hf_config
from megatron_ac2.model.checkpoint import CheckpointSaver, Kept, load_checkpoint
from megatron_ac2.model.checkpoint_files import complete_folders, is_whole
from megatron_ac2.model.data_parallel import wrap_ddp
from megatron_ac2.parallel.topology import init_topology, shutdown
from megatron_ac2.training.optimizer import build_optimizer
from tests.distributed.launch import free_port

NUM_RANKS = 2


@dataclass
class Job:
    """A job's ranks, and what its first rank says: "loaded 7", "started 8", "committed 8", ..."""

    pids: list[int]
    output: int
    said: list[tuple[str, int]] = field(default_factory=list)
    _rest: str = ""

    def read(self) -> bool:
        """Take in what is there; wait for something. False at its end."""
        text = os.read(self.output, 65536).decode()
        *lines, self._rest = (self._rest + text).split("\n")
        self.said += [(word, int(number)) for word, number in (line.split() for line in lines)]
        return bool(text)

    def wait_for(self, word: str) -> int:
        while not (found := self.last(word)):
            assert self.read(), f"the job ended before it said {word!r}: {self.said}"
        return found

    def last(self, word: str) -> int:
        return max((number for said, number in self.said if said == word), default=0)

    def end(self, kill_gap: float | None) -> list[int]:
        """Exit statuses; with a gap, after a SIGKILL to one rank, and that much later to the other."""
        if kill_gap is not None:
            for pid in self.pids:
                os.kill(pid, signal.SIGKILL)
                time.sleep(kill_gap)
        statuses = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in self.pids]
        while self.read():
            pass
        os.close(self.output)
        return statuses


def start(folder: Path, root: Path, last: int) -> Job:
    output, say = os.pipe()
    port = free_port()
    pids = []
    for rank in range(NUM_RANKS):
        pid = os.fork()
        if pid == 0:
            world = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": NUM_RANKS, "MASTER_PORT": port}
            os.environ.update({name: str(value) for name, value in world.items()}, MASTER_ADDR="127.0.0.1")
            status = 1
            try:
                save_until_killed(folder, root, last, say if rank == 0 else None)
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(status)
        pids.append(pid)
    os.close(say)
    return Job(pids, output)


def save_until_killed(folder: Path, root: Path, last: int, say: int | None) -> None:
    def tell(word: str, step: int) -> None:
        if say is not None:
            os.write(say, f"{word} {step}\n".encode())

    parallel = ParallelConfig()
    topology = init_topology(parallel, seed=0, timeout_minutes=1)
    model = wrap_ddp(build_model(load_hf_config(folder), topology, parallel, torch.float32), distributed_optimizer=True)
    optimizer = build_optimizer(model, OptimizerConfig(distributed=True), torch.float32)
    state = load_checkpoint(root, {"m": model}, {"m": optimizer}, {})
    first = 0 if state is None else state["step"]
    if state is not None:
        assert np.array_equal(state["steps"], np.arange(first))
        expected = [first + index / 64 for index in range(len(list(model.parameters())))]
        assert [(p.min().item(), p.max().item()) for p in model.parameters()] == [(x, x) for x in expected]
        assert optimizer.num_steps == first
    saver = CheckpointSaver(root, Kept(2), timeout_minutes=1)
    tell("loaded", first)
    for step in range(first + 1, last + 1):
        fill(model, step)
        optimizer.shared.states["adam"].num_steps = step
        tell("started", step)
        saver.save(step, {"m": model}, {"m": optimizer}, {"step": step, "steps": np.arange(step)}, {})
        tell("committed", step - 1)
        fill(model, -step)  # as training would: none of this may reach the checkpoint
    saver.wait()
    tell("committed", last)
    shutdown()


def fill(model: torch.nn.Module, step: int) -> None:
    with torch.no_grad():
        for index, parameter in enumerate(model.parameters()):
            parameter.fill_(step + index / 64)


def main() -> None:
    folder, root, num_kills = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    rng = random.Random(0)
    least = most = during = 0  # the next job may load a step from `least` to `most`
    for kill in range(num_kills):
        job = start(folder, root, last=10_000)
        job.wait_for("started")  # and so has loaded and checked
        loaded = job.last("loaded")
        assert least <= loaded <= most, f"kill {kill}: loaded {loaded}, accepted {least} to {most}"
        time.sleep(rng.uniform(0.0, 1.0 if kill % 4 else 0.1))  # a save takes 0.1 to 0.5 s
        rng.shuffle(job.pids)
        statuses = job.end(kill_gap=rng.choice((0.0, 0.02, 0.1)))
        assert -signal.SIGKILL in statuses and 0 not in statuses, statuses
        least, most = max(least, job.last("committed")), job.last("started")
        assert all(is_whole(path) for path in complete_folders(root).values()), f"kill {kill}"
        during += bool(list(root.glob("*.tmp")))
        left = sorted(path.name for path in root.iterdir())
        print(f"kill {kill}: loaded {loaded}, started {most}, left {left}")
    job = start(folder, root, last=most + 3)
    assert job.end(kill_gap=None) == [0] * NUM_RANKS and least <= job.last("loaded") <= most
    expected = ["latest", f"step_{most + 2:06d}", f"step_{most + 3:06d}"]
    assert sorted(path.name for path in root.iterdir()) == expected
    print(f"{num_kills} kills, {during} of them while files were written", flush=True)


if __name__ == "__main__":
    main()
