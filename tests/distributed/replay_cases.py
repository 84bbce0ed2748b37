"""Router replay in every layout, through the actor, against the float64 reference; see expert_training_cases.py."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron_ac2.config_training import ParallelConfig
from megatron_ac2.parallel.topology import init_topology
from megatron_ac2.training.actor import Actor
from megatron_ac2.training.mismatch import score_metrics
from megatron_ac2.types import TrainSequence
from tests.distributed import training_reference as case
from tests.distributed.groups import leave_groups
from tests.distributed.model_cases import RECOMPUTE
from tests.distributed.training_cases import Bench


def replay_case(folder: Path, reference_file: Path, layouts: Sequence[tuple[ParallelConfig, str]]) -> None:
    """`layouts`: with what is computed anew in the backward pass, by model_cases.RECOMPUTE's names."""
    reference = torch.load(reference_file, weights_only=False)[folder.name]
    for parallel, recompute in layouts:
        topology = init_topology(parallel, seed=0, timeout_minutes=2)
        bench = Bench((topology, parallel), folder, "hidden", extra=RECOMPUTE.get(recompute))
        check_replay(bench, reference)
        leave_groups()


def check_replay(bench: Bench, reference: dict[str, Any]) -> None:
    config = case.make_config()
    config.actor.max_tokens_per_microbatch = 40  # several: a pipeline holds more than one at a time

    def actor_with(replay: bool) -> Actor:
        config.actor.router_replay = replay
        return Actor(bench.model, bench.probe, bench.topology, config, bench.hf_config.vocab_size)

    bench.reload()
    own, others = ([TrainSequence(**fields) for fields in reference[name]] for name in ("own", "others"))
    replaying, free = actor_with(True), actor_with(False)
    as_chosen = free.logprobs(others)
    for found, expected in zip(replaying.logprobs(own), as_chosen, strict=True):
        np.testing.assert_array_equal(found, expected)  # bit for bit
    assert "mismatch/rerouted" not in score_metrics([free.score(free.pack_minibatch(own))])
    assert score_metrics([replaying.score(replaying.pack_minibatch(own))])["mismatch/rerouted"] == 0
    found = replaying.logprobs(others)
    for mine, expected in zip(found, reference["logprobs"], strict=True):
        np.testing.assert_allclose(mine, expected, atol=2e-5)
    assert max(np.abs(mine - other).max() for mine, other in zip(found, as_chosen, strict=True)) > 0.05
    minibatch = replaying.pack_minibatch(others)
    assert score_metrics([replaying.score(minibatch)])["mismatch/rerouted"] == reference["rerouted"] > 0.2
    metrics = replaying.update(minibatch, case.CLIP_HIGH)
    assert metrics["ratio_error_first"] <= 1e-6 and metrics["num_tokens"] == reference["num_tokens"]
    bench.assert_gradients(reference["gradients"])
    bench.reload()
    replaying.score(replaying.pack_minibatch([]))
