"""One job of two ranks: a critic of another size and family, in a layout of its own beside the actor's.

usage: torchrun ... two_layouts_cases.py ACTOR_DIR CRITIC_DIR SCRATCH_DIR
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

from megatron_ac2.config import Config
from megatron_ac2.config_training import ParallelConfig
from megatron_ac2.model.build import build_model, load_hf_config
from megatron_ac2.model.checkpoint import load_checkpoint, save_checkpoint
from megatron_ac2.model.data_parallel import wrap_ddp
from megatron_ac2.model.hf_weights import export_hf_weights, load_hf_weights
from megatron_ac2.parallel.active import active
from megatron_ac2.parallel.collectives import all_ranks_agree
from megatron_ac2.parallel.topology import Topology, add_topology, init_topology, shutdown
from megatron_ac2.training.actor import Actor
from megatron_ac2.training.optimizer import build_optimizer
from megatron_ac2.training.value_head_critic import ValueHeadCritic
from megatron_ac2.types import TrainSequence, UserError
from tests.distributed import training_reference as case
from tests.distributed.groups import leave_groups

DP2, TP2, TP2_SP, PP2 = (1, 1, False), (2, 1, False), (2, 1, True), (1, 2, False)
PAIRS = [(DP2, TP2_SP), (PP2, DP2), (TP2, PP2)]  # actor, critic: every axis in either place
IDENTITY = {"model": "tiny"}
ROUNDS = 3


class Pair:
    """An actor and a critic with a snapshot, each in its layout, and what their rounds gave."""

    def __init__(self, layouts: tuple, folders: tuple[Path, Path], seed: int = 0, weights: bool = True):
        actor, critic = (ParallelConfig(*layout) for layout in layouts)
        self.topology = init_topology(actor, seed=0, timeout_minutes=2)
        self.critic_topology = self.topology if critic == actor else add_topology(critic, self.topology, 0, 2)
        self.hf_configs = [load_hf_config(folder) for folder in folders]
        config = case.make_config()
        config.critic.max_context_len, config.critic.snapshot_every = None, 2
        self.actor = self._actor(config, actor, folders[0], seed, weights)
        self.critic = self._critic(config, critic, folders[1], seed, weights)
        self.models = {"actor": self.actor.model, "critic": self.critic.model, "old": self.critic.snapshot_model}
        self.optimizers = {"actor": self.actor.optimizer, "critic": self.critic.optimizer}

    def _actor(self, config: Config, parallel: ParallelConfig, folder: Path, seed: int, weights: bool) -> Actor:
        model = build_model(self.hf_configs[0], self.topology, parallel, torch.float32, "hidden", seed=seed)
        if weights:
            load_hf_weights(model, self.hf_configs[0], self.topology, folder)
        model = wrap_ddp(model, True)
        optimizer = build_optimizer(model, case.OPTIMIZER, torch.float32)
        return Actor(model, optimizer, self.topology, config, self.hf_configs[0].vocab_size)

    def _critic(
        self, config: Config, parallel: ParallelConfig, folder: Path, seed: int, weights: bool
    ) -> ValueHeadCritic:
        models = [
            build_model(self.hf_configs[1], self.critic_topology, parallel, torch.float32, "value", seed=seed)
            for _ in range(2)
        ]
        if weights:
            load_hf_weights(models[0], self.hf_configs[1], self.critic_topology, folder)
        model = wrap_ddp(models[0], True)
        optimizer = build_optimizer(model, case.OPTIMIZER, torch.float32)
        return ValueHeadCritic(
            model, optimizer, self.critic_topology, config, separator_id=case.SEPARATOR_ID,
            model_max_len=case.MODEL_MAX_LEN, snapshot_model=models[1],
        )  # fmt: skip

    def round(self, sequences: list[TrainSequence]) -> dict[str, Any]:
        """As a step of a run goes: values, the actor's update, the critic's, the actor's again."""
        found: dict[str, Any] = {"values": self.critic.score(case.make_states()).value}
        found["frozen"] = np.concatenate(self.critic.score_paths(case.make_states()[:1], [np.arange(4)], frozen=True))
        minibatches = [self.actor.pack_minibatch(part) for part in (sequences[:4], sequences[4:])]
        for index, minibatch in enumerate(minibatches):
            found |= {f"score{index}/{k}": v for k, v in self.actor.score(minibatch).items()}
        for index, minibatch in enumerate(minibatches):
            found |= {f"actor{index}/{k}": v for k, v in self.actor.update(minibatch, case.CLIP_HIGH).items()}
            if index == 0:
                found |= {f"critic/{k}": v for k, v in self.critic.update_dense(case.make_dense_examples()).items()}
        return found

    def weights(self) -> dict[str, torch.Tensor]:
        places = (("actor", 0, self.topology), ("critic", 1, self.critic_topology), ("old", 1, self.critic_topology))
        return {
            f"{role}.{name}": tensor.clone()
            for role, index, topology in places
            for name, tensor in export_hf_weights(self.models[role], self.hf_configs[index], topology)
        }


def assert_close(found: dict[str, Any], expected: dict[str, Any], what: str, exact: bool = False) -> None:
    assert found.keys() == expected.keys(), found.keys() ^ expected.keys()
    for name, value in expected.items():
        # The step's own rounding, relative to the largest: log ratios of a first update are rounding and nothing else.
        tolerance = dict(rtol=0, atol=0) if exact else dict(rtol=5e-5, atol=5e-6)
        np.testing.assert_allclose(found[name], value, **tolerance, err_msg=f"{what}: {name}")


def run_pair(layouts: tuple, folders: tuple[Path, Path], sequences: list[TrainSequence], root: Path) -> tuple:
    pair = Pair(layouts, folders)
    assert_globals(pair.topology)
    trace = []
    for index in range(ROUNDS):
        if index == ROUNDS - 1:
            save_checkpoint(root, index, pair.models, pair.optimizers, {"round": index}, 1, IDENTITY)
        trace.append(pair.round(sequences))
        all_ranks_agree({k: np.asarray(v).tobytes() for k, v in trace[-1].items()}, f"round {index} of {layouts}")
    assert_globals(pair.topology)
    return pair, trace, pair.weights()


def resume(
    layouts: tuple, folders: tuple[Path, Path], sequences: list[TrainSequence], root: Path, expected: tuple, exact: bool
) -> None:
    pair = Pair(layouts, folders, seed=23, weights=False)
    assert load_checkpoint(root, pair.models, pair.optimizers, IDENTITY) == {"round": ROUNDS - 1}
    assert_close(pair.round(sequences), expected[1][-1], f"resumed in {layouts}", exact)
    assert_close(pair.weights(), expected[2], f"resumed in {layouts}", exact)
    leave_groups()


def assert_globals(topology: Topology) -> None:
    """Megatron's own are the actor's, whatever ran in the critic's layout meanwhile."""
    assert parallel_state.get_tensor_model_parallel_world_size() == topology.tensor
    assert parallel_state.get_pipeline_model_parallel_world_size() == topology.pipeline
    assert parallel_state.get_data_parallel_group() is topology.pg.dp


def switching_case(layouts: tuple, folders: tuple[Path, Path]) -> None:
    """Groups, ranks and random states belong to a layout; an error inside leaves none of the other's behind."""
    pair = Pair(layouts, folders)
    mine, theirs = pair.topology, pair.critic_topology
    before = get_cuda_rng_tracker().get_states()
    try:
        with active(theirs.pg):
            assert_globals(theirs)
            with active(mine.pg):
                assert_globals(mine)
            assert_globals(theirs)
            with get_cuda_rng_tracker().fork():
                torch.rand(3)
            drawn = get_cuda_rng_tracker().get_states()
            raise KeyError("inside")
    except KeyError:
        assert_globals(mine)
    name = "model-parallel-rng"
    assert all(torch.equal(x, before[key]) for key, x in get_cuda_rng_tracker().get_states().items())
    with active(theirs.pg):
        assert torch.equal(get_cuda_rng_tracker().get_states()[name], drawn[name])
    assert not torch.equal(drawn[name], before[name])
    try:
        add_topology(ParallelConfig(tensor=3), mine, seed=0)
    except UserError as error:
        assert "= 3 with 2 process(es)" in str(error)
    else:
        raise AssertionError("three tensor ranks on two processes were accepted")
    assert_globals(mine)
    leave_groups()


def main() -> None:
    actor, critic, scratch = map(Path, sys.argv[1:])
    folders = (actor, critic)
    sequences = case.make_sequences(case.load_reference_model(actor))
    start = time.monotonic()
    expected = run_pair((DP2, DP2), folders, sequences, scratch / "one")
    leave_groups()
    for layouts in PAIRS:
        root = scratch / str(PAIRS.index(layouts))
        pair, *found = run_pair(layouts, folders, sequences, root)
        for index, (round_, wanted) in enumerate(zip(found[0], expected[1], strict=True)):
            assert_close(round_, wanted, f"round {index} of {layouts}")
        assert_close(found[1], expected[2], f"weights of {layouts}")
        leave_groups()
        if layouts in PAIRS[:2]:
            resume(layouts, folders, sequences, root, (pair, *found), exact=True)
        if dist.get_rank() == 0:
            print(f"passed {layouts} ({time.monotonic() - start:.1f} s)", flush=True)
    resume((DP2, DP2), folders, sequences, scratch / "0", expected, exact=False)
    resume((PP2, TP2), folders, sequences, scratch / "one", expected, exact=False)
    switching_case((DP2, TP2), folders)
    shutdown()
    print("done", flush=True)


if __name__ == "__main__":
    assert os.environ["WORLD_SIZE"] == "2"
    main()
