"""What a step does on the host, with real buffers, readiness and references: its plan, its memory, its order."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from megatron_ac2 import train
from megatron_ac2.config import Config
from megatron_ac2.learn import update_actor_and_critic, update_critic
from megatron_ac2.metrics import METRICS_FILE
from megatron_ac2.plan import plan_step
from megatron_ac2.state import RunState
from megatron_ac2.train import remember
from megatron_ac2.types import CriticTarget, TrainSequence, Trajectory
from tests.unit.loop_parts import (
    BUDGET,
    CHUNK_LEN,
    PROBLEMS,
    RecordingCritic,
    continuation,
    credit_of,
    ids,
    prefix,
    roll,
    text_of,
)


def make(routing: str = "ac2", **sampling) -> tuple[RunState, Config]:
    config = Config()
    config.sampling.routing, config.sampling.num_fresh, config.sampling.num_prefixes = routing, 2, 4
    config.sampling.group_size, config.sampling.cut_grid = 2, 5
    config.sampling.response_budget, config.sampling.chunk_len = BUDGET, CHUNK_LEN
    for name, value in sampling.items():
        setattr(config.sampling, name, value)
    config.readiness.window, config.replay.min_valid_for_target = 1, 1
    return RunState.fresh(config, list(PROBLEMS.values())), config


def fill_replay(state: RunState) -> None:
    state.replay.add([Trajectory(name, ids("x" * 20), 0.0, 0) for name in "ab"])


def make_ready(state: RunState, names: str) -> None:
    saved = state.readiness.state_dict()
    state.readiness.load_state_dict({**saved, "ready": list(names)})


@pytest.mark.parametrize("routing", ["ac2", "prefix_grpo"])
def test_before_any_replay_the_fresh_problems_are_trained_on_bare(routing: str) -> None:
    state, config = make(routing)
    make_ready(state, "abcd")  # even then: a bare fresh problem is in no book, and trusts no critic
    fresh, plan = plan_step(state, config, 0)
    assert len({problem.problem_id for problem in fresh}) == 2
    assert [c.prefix.problem_id for c in plan] == 2 * [problem.problem_id for problem in fresh]
    for item in plan:
        assert (len(item.prefix.response_ids), item.prefix.replayed, item.mode) == (0, False, "full")
        assert (item.max_new_tokens, item.group_size) == (BUDGET, 2)


def test_grpo_takes_bare_problems_and_no_fresh_rollouts_at_every_step() -> None:
    state, config = make("grpo")
    fill_replay(state)
    make_ready(state, "abcd")
    fresh, plan = plan_step(state, config, 5)
    assert fresh == [] and {c.prefix.problem_id for c in plan} == set("abcd")
    assert all(c.mode == "full" and len(c.prefix.response_ids) == 0 for c in plan)


def test_ac2_replays_and_routes_by_readiness() -> None:
    state, config = make()
    fill_replay(state)
    make_ready(state, "a")
    fresh, plan = plan_step(state, config, 1)
    assert len(fresh) == 2 and all(c.prefix.replayed for c in plan)
    modes = {name: sorted(c.mode for c in plan if c.prefix.problem_id == name) for name in "ab"}
    assert modes == {"a": ["audit", "chunk"], "b": ["full", "full"]}  # 1/4 of two ready slots, rounded up
    for item in plan:
        left = BUDGET - len(item.prefix.response_ids)
        assert item.max_new_tokens == (min(CHUNK_LEN, left) if item.mode == "chunk" else left)
        assert len(item.prefix.response_ids) % 5 == 0


def test_prefix_grpo_replays_but_trusts_no_critic() -> None:
    state, config = make("prefix_grpo")
    fill_replay(state)
    make_ready(state, "ab")
    fresh, plan = plan_step(state, config, 1)
    assert len(fresh) == 2 and all(c.prefix.replayed and c.mode == "full" for c in plan)


def test_a_plan_depends_on_seed_step_and_state_alone() -> None:
    def planned(step: int, seed: int = 0) -> list[tuple[str, int, str]]:
        state, config = make(num_prefixes=20)
        config.run.seed = seed
        fill_replay(state)
        make_ready(state, "ab")
        return [(c.prefix.problem_id, len(c.prefix.response_ids), c.mode) for c in plan_step(state, config, step)[1]]

    assert planned(1) == planned(1)
    assert planned(1) != planned(2) and planned(1) != planned(1, seed=1)


def test_a_problem_is_ready_only_if_its_reference_is_older_than_the_step() -> None:
    """Critic and reward agree throughout; "a" gets its reference in the very step that proves the critic right."""
    state, config = make()
    rollout = roll([continuation(prefix("a", "x"), "full")], ["0f$", "1$", "1$"], fresh="b")
    credit = credit_of(rollout, RecordingCritic(lambda text: 1.0))
    assert credit.records[0].error == 0
    remember(state, rollout, credit, config, step=1)
    assert state.readiness.ready == frozenset() and state.references.problem_ids() == {"a"}
    remember(state, rollout, credit, config, step=2)
    assert state.readiness.ready == {"a"}


def test_a_step_is_remembered_in_every_book() -> None:
    state, config = make()
    rollout = roll([continuation(prefix("a", "x"), "full")], ["0f$", "1$", "0$"], fresh="b")
    remember(state, rollout, credit_of(rollout, RecordingCritic()), config, step=1)
    assert list(state.replay.by_problem()) == ["b"]  # fresh rollouts only
    assert text_of(state.references.get("a")) == "x1"
    (target,) = state.targets.sample(10, np.random.default_rng(0))
    assert (target.problem_id, text_of(target.response_ids), target.value) == ("a", "x", 0.5)


def test_a_stale_buffer_is_filled_all_at_once_and_then_left_alone() -> None:
    """Two fresh problems a step, five steps at once: ten rollouts over four problems, at steps 0, 5, 10."""
    state, config = make()
    config.replay.kind, config.replay.stale_every, config.replay.capacity = "stale", 5, 10
    taken = [len(plan_step(state, config, step)[0]) for step in range(11)]
    assert taken == [10, 0, 0, 0, 0, 10, 0, 0, 0, 0, 10]
    fresh, plan = plan_step(state, config, 1)  # nothing replayed yet, and nothing fresh: the stream's next problems
    assert fresh == [] and len(plan) == 4 and not any(c.prefix.replayed for c in plan)


def test_an_open_global_gate_trusts_problems_that_were_never_measured() -> None:
    state, config = make()
    config.readiness.kind = "global_only"
    state = RunState.fresh(config, list(PROBLEMS.values()))
    fill_replay(state)
    assert {c.mode for c in plan_step(state, config, 1)[1]} == {"full"}
    rollout = roll([continuation(prefix("c", "x"), "full")], ["1$", "1$"])
    remember(state, rollout, credit_of(rollout, RecordingCritic(lambda text: 1.0)), config, step=1)
    assert sorted(c.mode for c in plan_step(state, config, 2)[1]) == ["audit", "chunk", "chunk", "chunk"]


def test_singletons_have_prefixes_of_their_own() -> None:
    state, config = make(group_size=3)
    config.estimator.kind = "singleton"
    fill_replay(state)
    make_ready(state, "a")
    plan = plan_step(state, config, 1)[1]
    single = [c for c in plan if c.mode == "chunk"]
    assert len(single) == 3 and {(c.group_size, c.prefix.problem_id) for c in single} == {(1, "a")}
    assert len({len(c.prefix.response_ids) for c in single}) == 3  # distinct cuts
    assert [c.group_size for c in plan if c.mode != "chunk"] == [3, 3, 3]


def test_old_targets_are_dropped_at_their_age() -> None:
    state, config = make()
    config.replay.max_target_age = 2
    state.targets.add([CriticTarget("a", ids("x"), 0.5, "terminal", version) for version in range(5)])
    rollout = roll([continuation(prefix("a", "x"), "full")], ["1$", "0$"])
    remember(state, rollout, credit_of(rollout, None), config, step=5)
    assert sorted(t.version for t in state.targets.sample(9, np.random.default_rng(0))) == [3, 4]


class LearningCritic(RecordingCritic):
    def __init__(self, *losses: float):
        self.losses, self.batches, self.rates = list(losses), [], []
        self.optimizer = SimpleNamespace(set_lr=self.rates.append)

    def update(self, examples):
        self.batches.append(list(examples))
        return {"loss": self.losses[len(self.batches) - 1], "update_norm": 3.0}


class RecordingActor:
    def __init__(self, events: list[str]):
        self.events = events

    def pack_minibatch(self, sequences):
        return [sequence.num_context for sequence in sequences]

    def score(self, minibatch):
        self.events.append(f"score {minibatch}")
        return dict.fromkeys(
            ("tokens", "entropy", "empty_prefix_entropy", "empty_prefix_tokens", "abs_difference", "abs_difference_max",
             "k1", "k3", "ratio", "ratio_squared", "ratio_above_2", "ratio_below_half"), 1.0
        )  # fmt: skip

    def update(self, minibatch, clip_high):
        self.events.append(f"update {minibatch} {clip_high:.2f}")
        return {"loss": 0.0, "grad_norm": 1.0, "update_norm": 1.0}


def test_all_is_scored_then_actor_critic_actor() -> None:
    """The entropy of 1 nat, above the target, lowers the clip before the first update."""
    state, config = make()
    state.targets.add([CriticTarget("a", ids("x"), 0.5, "terminal", 0)])
    events: list[str] = []
    critic = LearningCritic(0.7)
    original = critic.update
    critic.update = lambda examples: (events.append("critic"), original(examples))[1]
    zero = np.zeros(1, np.float32)
    sequences = [TrainSequence(ids("ab"), n, zero, zero, 1.0, True) for n in range(4)]
    metrics = update_actor_and_critic(RecordingActor(events), critic, state, sequences, config, step=0)
    assert events == ["score [0, 1]", "score [2, 3]", "update [0, 1] 0.32", "critic", "update [2, 3] 0.32"]
    assert state.entropy_clip.k == pytest.approx(0.04)
    assert metrics["critic/update_norm"] == 3 and metrics["critic/loss"] == 0.7
    assert state.critic_lr.streak == 1  # 3 / (1 + 1) is above the limit of sqrt 2


def test_a_referenced_pair_is_learnt_with_and_without_the_reference_at_half_weight() -> None:
    state, config = make()
    state.targets.add([CriticTarget(name, ids("x"), 0.5, "terminal", 0) for name in "ab"])
    state.references.add({"a": [ids("REF")]}, np.random.default_rng(0))
    critic = LearningCritic(0.1, 0.2, 0.3)
    config.critic.updates_per_step = 2
    assert update_critic(critic, state, config, step=0)["update_norm"] == pytest.approx(math.sqrt(18))
    for batch in critic.batches:
        found = {(e.state.problem.problem_id, e.state.reference_ids is not None): e.weight for e in batch}
        assert found == {("a", False): 0.5, ("a", True): 0.5, ("b", False): 1.0}
    config.critic.use_references, config.critic.updates_per_step = False, 1
    update_critic(critic, state, config, step=1)
    assert [example.weight for example in critic.batches[-1]] == [1.0, 1.0]


def test_a_reference_may_be_the_only_prompt() -> None:
    state, config = make()
    state.targets.add([CriticTarget(name, ids("x"), 0.5, "terminal", 0) for name in "ab"])
    state.references.add({"a": [ids("REF")]}, np.random.default_rng(0))
    config.critic.reference_prompts = "reference_only"
    critic = LearningCritic(0.1)
    update_critic(critic, state, config, step=0)
    found = {(e.state.problem.problem_id, e.state.reference_ids is not None): e.weight for e in critic.batches[0]}
    assert found == {("a", True): 1.0, ("b", False): 1.0}


def test_dense_examples_take_the_place_of_the_buffer() -> None:
    """Batches of at most two of three, drawn anew for each update; none at all leaves the critic alone."""
    state, config = make()
    state.targets.add([CriticTarget("a", ids("x"), 0.5, "terminal", 0)])
    critic = LearningCritic(0.1, 0.2, 0.3)
    critic.update_dense = critic.update
    config.critic.batch_size, config.critic.updates_per_step = 2, 3
    update_critic(critic, state, config, 0, ["one", "two", "three"])
    assert [len(set(batch)) for batch in critic.batches] == [2, 2, 2] and len({*map(tuple, critic.batches)}) > 1
    assert update_critic(critic, state, config, 0, []) == {}


def test_no_target_no_critic_update() -> None:
    state, config = make()
    assert update_critic(LearningCritic(), state, config, step=0) == {}


def test_a_loss_that_is_not_finite_halves_the_critics_rate_whatever_follows() -> None:
    state, config = make()
    state.targets.add([CriticTarget("a", ids("x"), 0.5, "terminal", 0)])
    config.critic.updates_per_step, config.critic.optimizer.lr = 2, 1e-3
    state.critic_lr.lr = 1e-3
    critic = LearningCritic(math.nan, 0.5)
    sequences = [TrainSequence(ids("ab"), 1, np.zeros(1, np.float32), np.zeros(1, np.float32), 1.0, True)] * 2
    metrics = update_actor_and_critic(RecordingActor([]), critic, state, sequences, config, step=0)
    assert critic.rates == [5e-4] and metrics["critic/lr"] == 5e-4


@pytest.mark.parametrize("crash_at", [1, 2, 3])
def test_a_crash_right_after_a_checkpoint_loses_no_row(
    crash_at: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A stand-in for the heavy parts; the order of step, row and checkpoint is the loop's own."""
    config = Config()
    config.run.dir, config.run.num_steps, config.run.checkpoint_every = str(tmp_path), 3, 1
    config.run.tensorboard, config.model.path, config.data.train = False, "", ""
    disk = {"next_step": 0}
    parts = SimpleNamespace(
        actor=SimpleNamespace(model=None),
        hf_config=None,
        topology=SimpleNamespace(rank=0),
        engine=None,
        validation=[],
        saver=SimpleNamespace(wait=lambda: None),
        warnings=[],
    )

    def save(parts, state) -> None:
        disk["next_step"] = state.next_step
        if state.next_step == crash_at and not disk.get("crashed"):
            disk["crashed"] = True
            raise KeyboardInterrupt

    monkeypatch.setattr(train, "build", lambda config: (parts, SimpleNamespace(next_step=0)))
    monkeypatch.setattr(train, "load_latest", lambda parts, state, _: setattr(state, "next_step", disk["next_step"]))
    monkeypatch.setattr(train, "publish_weights", lambda *args: {})
    monkeypatch.setattr(train, "train_step", lambda parts, state, config, step, timer: {"actor/loss": float(step)})
    monkeypatch.setattr(train, "save", save)
    with pytest.raises(KeyboardInterrupt):
        train.run(config)
    train.run(config)
    rows = (tmp_path / METRICS_FILE).read_text().splitlines()
    assert [f'"actor/loss": {float(step)}' in row for step, row in enumerate(rows)] == [True, True, True]
