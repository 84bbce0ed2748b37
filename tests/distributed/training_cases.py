"""One job, many layouts and microbatch splits: actor and critics against the float64 reference.

usage: torchrun ... training_cases.py LAYOUTS REFERENCE_DIR FOLDER...  (REFERENCE_DIR/<name>.pt: test_training.py)
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from transformers import AutoTokenizer

from megatron_ac2.config_training import ParallelConfig
from megatron_ac2.model.build import build_model, load_hf_config
from megatron_ac2.model.chunks import gpt_models
from megatron_ac2.model.data_parallel import wrap_ddp
from megatron_ac2.model.hf_weights import export_hf_weights, load_hf_weights
from megatron_ac2.parallel.collectives import all_ranks_agree
from megatron_ac2.parallel.topology import Topology, init_topology
from megatron_ac2.training import step
from megatron_ac2.training.actor import Actor
from megatron_ac2.training.generative_critic import GenerativeCritic
from megatron_ac2.training.mismatch import score_metrics
from megatron_ac2.training.optimizer import build_optimizer
from megatron_ac2.training.value_head_critic import ValueHeadCritic
from megatron_ac2.types import TrainSequence
from tests.distributed import objective_reference as objective_case
from tests.distributed import training_reference as case
from tests.distributed.groups import run_cases
from tests.distributed.ragged_checks import check_ragged

LAYOUTS = {
    "alone": [ParallelConfig()],
    "four": [
        ParallelConfig(*layout)
        for layout in ((1, 1, False), (2, 1, False), (1, 2, False), (2, 2, False), (2, 1, True), (2, 2, True))
    ],
    "context": [
        ParallelConfig(context=2), ParallelConfig(tensor=2, sequence=True, context=2),
        ParallelConfig(pipeline=2, context=2), ParallelConfig(context=4),
    ],
    "deep": [  # of models with four layers
        ParallelConfig(pipeline=4), ParallelConfig(pipeline=2, virtual_pipeline=2),
        ParallelConfig(tensor=2, pipeline=2, sequence=True, virtual_pipeline=2),
    ],
}  # fmt: skip
Place = tuple[Topology, ParallelConfig]  # one layout's, for all benches in it
SPLITS = [(40, 1), (1000, 8)]  # (tokens a microbatch, alignment as a multiple of the least)


class GradientProbe:
    """An optimizer whose step puts the gradients where the weights were: exporting the model then exports gradients."""

    def __init__(self, model: torch.nn.Module):
        self.model = model

    def step(self) -> SimpleNamespace:
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.copy_(parameter.main_grad)
        return SimpleNamespace(ok=True, grad_norm=1.0, update_norm=1.0)


class Bench:
    """One model in one layout, reloaded before every check."""

    def __init__(
        self, place: Place, folder: Path, head: str, distributed: bool = False, outputs: int = 1, overlap: bool = False,
        extra: dict[str, Any] | None = None,
    ):  # fmt: skip
        self.topology, self.parallel = place
        self.folder = folder
        self.hf_config = load_hf_config(folder)
        self.outputs = {"head": head, "value_outputs": outputs, "extra": extra}
        module = self.fresh_model(case.HEAD_SEED)
        self.head_weights = [
            p.detach().clone() for n, p in module.named_parameters() if n.endswith("output_layer.weight")
        ]
        self.model = wrap_ddp(module, distributed, overlap)
        self.probe = GradientProbe(self.model)

    def fresh_model(self, seed: int) -> torch.nn.Module:
        return build_model(self.hf_config, self.topology, self.parallel, torch.float32, seed=seed, **self.outputs)

    def reload(self) -> None:
        for weight in self.head_weights:  # a value head is not in the folder
            gpt_models(self.model)[-1].output_layer.weight.data.copy_(weight)
        load_hf_weights(self.model, self.hf_config, self.topology, self.folder)

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: x.clone() for name, x in export_hf_weights(self.model, self.hf_config, self.topology)}

    def assert_gradients(self, expected: dict[str, torch.Tensor]) -> None:
        found = self.weights()
        assert set(found) == set(expected), set(found) ^ set(expected)
        scale = max(x.abs().max().item() for x in expected.values())
        for name, gradient in expected.items():
            difference = (found[name].double() - gradient).abs().max().item()
            limit = 2e-5 * gradient.abs().max().item() + 1e-6 * scale
            assert difference <= limit, f"gradient of {name}: off by {difference}, accepted {limit}"

    def assert_no_gradient(self) -> None:
        assert all((parameter.main_grad == 0).all() for parameter in self.model.parameters())


def assert_metrics(found: dict[str, float], expected: dict[str, float], tolerance: float = 2e-5) -> None:
    all_ranks_agree(found, "metrics")
    assert all(isinstance(value, float) for value in found.values()), found
    for name, value in expected.items():
        assert abs(found[name] - value) <= tolerance * (1 + abs(value)), f"{name}: {found[name]}, expected {value}"


def check_actor(bench: Bench, reference: dict[str, Any], split: tuple[int, int]) -> None:
    config = case.make_config()
    config.actor.max_tokens_per_microbatch, align = split[0], split[1] * step.token_alignment(bench.topology)
    actor = Actor(bench.model, bench.probe, bench.topology, config, bench.hf_config.vocab_size, align=align)
    sequences = [TrainSequence(**fields) for fields in reference["sequences"]]
    bench.reload()
    minibatch = actor.pack_minibatch(sequences)
    assert_metrics(score_metrics([actor.score(minibatch)]), reference["score"])
    metrics = actor.update(minibatch, case.CLIP_HIGH)
    assert metrics["ratio_error_first"] <= 1e-6 and metrics["stepped"] == 1 and metrics["num_tokens"] == 71
    assert_metrics(metrics, {"loss": reference["policy"]["on_policy"]["loss"]})
    bench.assert_gradients(reference["policy"]["on_policy"]["gradients"])
    for name, chosen in (("clipped", sequences), ("single", sequences[:1])):
        bench.reload()
        minibatch = actor.pack_minibatch(chosen)
        for batch in minibatch.microbatches:
            batch.fields["proximal_logprobs"] = batch.fields["behavior_logprobs"]
        minibatch.scored = True
        metrics = actor.update(minibatch, case.CLIP_HIGH)
        assert "ratio_error_first" not in metrics
        assert_metrics(metrics, {"loss": reference["policy"][name]["loss"]})
        bench.assert_gradients(reference["policy"][name]["gradients"])
    check_all_masked(bench, actor, sequences)


def check_objective(bench: Bench, reference: dict[str, Any], name: str) -> None:
    """Every part of an objective through the actor, in this layout; log-probs by sequence on every rank."""
    config, expected = objective_case.make_config(name), reference["objectives"][name]
    config.actor.max_tokens_per_microbatch = SPLITS[0][0]
    frozen = bench.fresh_model(seed=3)  # returns what the policy returns
    load_hf_weights(frozen, bench.hf_config, bench.topology, bench.folder)
    actor = Actor(
        bench.model, bench.probe, bench.topology, config, bench.hf_config.vocab_size,
        reference=frozen if config.actor.reference_kl.coefficient else None,
    )  # fmt: skip
    bench.reload()
    sequences = [TrainSequence(**fields) for fields in expected["sequences"]]
    for found, wanted in zip(actor.logprobs(sequences), expected["logprobs"], strict=True):
        np.testing.assert_allclose(found, wanted, atol=2e-5)
    minibatch = actor.pack_minibatch(sequences)
    actor.score(minibatch)
    metrics = actor.update(minibatch, config.actor.clip_high)
    assert metrics["ratio_error_first"] <= 2e-6 and metrics["stepped"] == 1
    assert_metrics(metrics, expected["metrics"])
    bench.assert_gradients(expected["gradients"])
    bench.reload()
    minibatch = actor.pack_minibatch([])
    actor.score(minibatch)
    assert_metrics(actor.update(minibatch, 0.3), {"loss": 0.0, "stepped": 0.0, "num_tokens": 0.0}, tolerance=0)
    bench.assert_no_gradient()


def check_optimizer_step(place: Place, folder: Path, reference: dict[str, Any], overlap: bool = False) -> None:
    """The real optimizer, sharded over data ranks: grad norm, clipped AdamW step and update norm against torch's."""
    bench = Bench(place, folder, "hidden", distributed=True, overlap=overlap)
    bench.reload()
    config = case.make_config()
    optimizer = build_optimizer(bench.model, case.OPTIMIZER, torch.float32)
    actor = Actor(bench.model, optimizer, bench.topology, config, bench.hf_config.vocab_size)
    sequences = [TrainSequence(**fields) for fields in reference["sequences"]]
    minibatch = actor.pack_minibatch(sequences)
    try:
        actor.update(minibatch, case.CLIP_HIGH)
    except RuntimeError as error:
        assert "Actor.score" in str(error)
    else:
        raise AssertionError("an unscored minibatch was accepted")
    if overlap:  # only after a first backward pass is communication hidden behind the next
        actor.optimizer = SimpleNamespace(step=lambda: SimpleNamespace(ok=True, grad_norm=0.0, update_norm=0.0))
        for chosen in (sequences[:1], [], sequences):  # some ranks, or all, have nothing but empty microbatches
            unused = actor.pack_minibatch(chosen)
            actor.score(unused)
            actor.update(unused, case.CLIP_HIGH)
        actor.optimizer = optimizer
    actor.score(minibatch)
    metrics = actor.update(minibatch, case.CLIP_HIGH)
    expected = reference["step"]
    assert_metrics(metrics, {**expected["norms"], "stepped": 1.0})
    for name, weight in bench.weights().items():
        assert (weight.double() - expected["weights"][name]).abs().max() <= 2e-6, name


def check_all_masked(bench: Bench, actor: Actor, sequences: list[TrainSequence]) -> None:
    bench.reload()
    before = bench.weights()
    for masked in ([s for s in sequences if s.weight == 0], []):
        minibatch = actor.pack_minibatch(masked)
        score = score_metrics([actor.score(minibatch)])
        assert score["num_tokens"] == sum(len(s.behavior_logprobs) for s in masked)
        metrics = actor.update(minibatch, case.CLIP_HIGH)
        assert_metrics(metrics, {"loss": 0.0, "stepped": 0.0, "grad_norm": 0.0, "num_tokens": 0.0}, tolerance=0)
        bench.assert_no_gradient()
    assert all(torch.equal(x, before[name]) for name, x in bench.weights().items())


def make_value_critic(
    bench: Bench, optimizer: Any, split: tuple[int, int], head: str = "bce", snapshot: torch.nn.Module | None = None
) -> ValueHeadCritic:
    config = case.make_config()
    config.critic.head, config.critic.value_clip, config.critic.snapshot_every = head, case.VALUE_CLIP, 2
    config.critic.max_tokens_per_microbatch, align = split[0], split[1] * step.token_alignment(bench.topology)
    return ValueHeadCritic(
        bench.model, optimizer, bench.topology, config, separator_id=case.SEPARATOR_ID,
        model_max_len=case.MODEL_MAX_LEN, align=align, snapshot_model=snapshot,
    )  # fmt: skip


def check_value_head(bench: Bench, reference: dict[str, Any], split: tuple[int, int]) -> None:
    critic = make_value_critic(bench, bench.probe, split)
    bench.reload()
    values = critic.score(case.make_states())
    assert values.valid.tolist() == [True, True, False, True, True, True]
    np.testing.assert_allclose(values.value[values.valid], np.array(reference["values"])[values.valid], atol=1e-6)
    assert values.value[2] == 0
    assert critic.score([]).value.shape == (0,)
    all_ranks_agree(values.value.tobytes(), "values")
    check_paths(critic)
    updates = (
        ("value_update", critic.update, case.make_examples()),
        ("value_dense", critic.update_dense, case.make_dense_examples()),
    )
    for name, update, examples in updates:
        bench.reload()
        metrics = update(examples)
        assert metrics["num_skipped"] == 1 and metrics["stepped"] == 1
        assert_metrics(metrics, reference[name]["metrics"])
        bench.assert_gradients(reference[name]["gradients"])
    check_no_step(bench, critic)


def check_paths(critic: ValueHeadCritic) -> None:
    """One pass over a response says at each position what a state that ends there is worth."""
    states = case.make_states()
    positions = [np.array(asked, dtype=int) for asked in ([0, 4, 2], [17, 0], [3], [0], [], [1])]
    paths = critic.score_paths(states, positions)
    assert paths[2] is None and paths[4].shape == (0,)
    ends = [(replace(states[i], response_ids=states[i].response_ids[:p]), paths[i][j])
            for i in (0, 1, 3, 5) for j, p in enumerate(positions[i])]  # fmt: skip
    found = critic.score([state for state, _ in ends])
    np.testing.assert_allclose(found.value, [value for _, value in ends], atol=1e-6)
    assert found.valid.all() and all(path.dtype == np.float32 for path in paths if path is not None)
    for positions, frozen in (([np.array([5])], False), ([np.array([0])], True)):  # past the end; no snapshot
        try:
            critic.score_paths(states[:1], positions, frozen)
        except (ValueError, RuntimeError) as error:
            assert "snapshot_model" in str(error) if frozen else "0 to 4 response tokens" in str(error), error
        else:
            raise AssertionError(f"positions {positions}, frozen {frozen} were accepted")


def check_heads(bench: Bench, heads: tuple[str, ...], reference: dict[str, Any], split: tuple[int, int]) -> None:
    """Every head's loss on several targets a label, masked ones and old values among them."""
    for head in heads:
        bench.reload()
        critic = make_value_critic(bench, bench.probe, split, head)
        fresh = critic.score(case.make_states())
        assert (np.abs(fresh.value[fresh.valid] - 0.5) < 0.1).all(), fresh.value
        metrics = critic.update_dense(case.make_nstep_examples())
        assert metrics["num_skipped"] == 1 and metrics["stepped"] == 1
        assert_metrics(metrics, reference["value_nstep"][head]["metrics"])
        bench.assert_gradients(reference["value_nstep"][head]["gradients"])


def check_training_and_snapshot(place: Place, folder: Path, head: str) -> None:
    """Three real steps: the loss falls; the snapshot, of other weights at first, follows at the second only."""
    bench = Bench(place, folder, "value", distributed=True, outputs=case.HEADS[head])
    bench.reload()
    optimizer = build_optimizer(bench.model, case.OPTIMIZER, torch.float32)
    critic = make_value_critic(bench, optimizer, SPLITS[1], head, snapshot=bench.fresh_model(seed=99))
    states = case.make_states()[:2]
    positions = [np.array([0, 3]), np.array([17])]

    def values(frozen: bool) -> np.ndarray:
        return np.concatenate(critic.score_paths(states, positions, frozen))

    losses, live, frozen = [], [values(False)], [values(True)]
    for _ in range(3):
        losses.append(critic.update_dense(case.make_nstep_examples())["loss"])
        live.append(values(False))
        frozen.append(values(True))
    assert critic.num_updates == 3 and losses[0] > losses[1] > losses[2], losses
    assert all((before != after).any() for before, after in zip(live, live[1:], strict=False)), live
    for step_index, copied_at in enumerate([0, 0, 2, 2]):
        np.testing.assert_array_equal(frozen[step_index], live[copied_at])


def check_no_step(bench: Bench, critic: ValueHeadCritic) -> None:
    """Nothing to train on; then a loss that is not finite: on every rank no step, and the metrics tell."""
    bench.reload()
    too_long = case.make_examples()[2:3]
    for examples in ([], too_long):
        assert_metrics(critic.update(examples), {"loss": 0.0, "stepped": 0.0, "num_labels": 0.0}, tolerance=0)
        bench.assert_no_gradient()
    if bench.topology.is_last_stage:
        gpt_models(bench.model)[-1].output_layer.weight.data.fill_(float("nan"))
    before = bench.weights()
    metrics = critic.update(case.make_examples())
    assert metrics["stepped"] == 0 and np.isnan(metrics["loss"])
    assert all(torch.equal(x, before[n]) for n, x in bench.weights().items() if n != "value_head.weight")


def check_generative(bench: Bench, reference: dict[str, Any], split: tuple[int, int]) -> None:
    config = case.make_config()
    config.critic.max_context_len = None
    config.critic.max_tokens_per_microbatch, align = 20 * split[0], split[1] * step.token_alignment(bench.topology)
    critic = GenerativeCritic(
        bench.model, bench.probe, None, AutoTokenizer.from_pretrained(bench.folder), bench.topology, config,
        bench.hf_config.vocab_size, model_max_len=case.MODEL_MAX_LEN, align=align,
    )  # fmt: skip
    bench.reload()
    metrics = critic.update(case.make_examples())
    assert_metrics(metrics, {"loss": reference["generative"]["loss"], "stepped": 1.0})
    bench.assert_gradients(reference["generative"]["gradients"])
    bench.reload()
    assert_metrics(critic.update([]), {"loss": 0.0, "stepped": 0.0, "num_pairs": 0.0}, tolerance=0)
    bench.assert_no_gradient()


def check_refusals(bench: Bench) -> None:
    try:
        step.forward_only(bench.model, [], lambda output, batch: None, bench.topology)
    except ValueError as error:
        assert "no microbatch" in str(error)
    else:
        raise AssertionError("no microbatches were accepted")
    if bench.topology.microbatch_multiple > 1:
        try:
            step.forward_only(bench.model, [None] * 3, lambda output, batch: None, bench.topology)
        except ValueError as error:
            assert "3 microbatches: this pipeline takes multiples of 2" in str(error)
        else:
            raise AssertionError("three microbatches were accepted")


def run_layout(parallel: ParallelConfig, folder: Path, reference: dict[str, Any]) -> None:
    place = init_topology(parallel, seed=0, timeout_minutes=2), parallel
    checks: list[tuple[str, Callable[..., None]]] = [("hidden", check_actor), ("hidden", check_generative)]
    tied, deep = load_hf_config(folder).tie_word_embeddings, folder.name.startswith("deep")
    if not tied:  # the value head replaces the output layer, so that a tied trunk is no other case
        checks.append(("value", check_value_head))
        check_heads(Bench(place, folder, "value", outputs=case.HEADS["two_hot"]), ("two_hot",), reference, SPLITS[0])
        if not deep:
            check_heads(Bench(place, folder, "value"), ("bce", "mse"), reference, SPLITS[0])
        for head in ("two_hot",) if deep else ("mse", "two_hot"):
            check_training_and_snapshot(place, folder, head)
    benches = {head: Bench(place, folder, head) for head in dict.fromkeys(head for head, _ in checks)}
    check_refusals(benches["hidden"])
    for name in () if tied or deep else objective_case.OBJECTIVES:
        check_objective(benches["hidden"], reference, name)
    if not tied:  # the naive twin of the fused loss
        naive = Bench(place, folder, "lm")
        check_ragged(naive)
        for name in () if deep else ("centred", "gspo"):
            check_objective(naive, reference, name)
        if not deep:
            check_actor(naive, reference, SPLITS[0])
            check_generative(naive, reference, SPLITS[0])
    for split in SPLITS[:1] if tied or deep else SPLITS:
        for head, check in checks:
            check(benches[head], reference, split)
    check_optimizer_step(place, folder, reference, overlap=deep)


def main() -> None:
    references, *folders = map(Path, sys.argv[2:])
    wanted = {folder: torch.load(references / f"{folder.name}.pt", weights_only=False) for folder in folders}
    run_cases({
        f"{folder.name} {parallel}": partial(run_layout, parallel, folder, wanted[folder])
        for parallel in LAYOUTS[sys.argv[1]]
        for folder in folders
    })  # fmt: skip


if __name__ == "__main__":
    main()
