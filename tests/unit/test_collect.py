"""Dynamic sampling in rounds, and RFPO's calibration, with scripted answers of the engine."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np

from megatron_ac2.collect import calibrate, collect
from megatron_ac2.config import Config
from megatron_ac2.report import request_lengths
from megatron_ac2.rollout import GradeCache
from megatron_ac2.state import RunState
from megatron_ac2.types import Grade, Values
from tests.unit.loop_parts import BUDGET, CHUNK_LEN, DECODING, PROBLEMS, RecordingGrader, ScriptedSampler, ids, text_of


@dataclass
class Rounds:
    """A sampler that answers call after call from a list of scripts."""

    scripts: list[list[str]]
    seeds: list[list[int]] = field(default_factory=list)
    version: int = 0

    def sample(self, requests):
        self.seeds.append([request.seed for request in requests])
        return ScriptedSampler(self.scripts.pop(0)).sample(requests)


def make(scripts: list[list[str]], **sampling: object) -> tuple[SimpleNamespace, RunState, Config]:
    config = Config()
    config.sampling.routing, config.sampling.num_prefixes, config.sampling.group_size = "grpo", 2, 2
    config.sampling.response_budget, config.sampling.chunk_len = BUDGET, CHUNK_LEN
    for name, value in sampling.items():
        setattr(config.sampling, name, value)
    parts = SimpleNamespace(engine=Rounds(scripts), decoding=DECODING, turns=SimpleNamespace(visiting=nullcontext))
    return parts, RunState.fresh(config, list(PROBLEMS.values())), config


def answers(rollout) -> list[list[str]]:
    return [[text_of(chunk.token_ids) for chunk in group.chunks] for group in rollout.groups]


def test_groups_whose_rewards_are_all_equal_are_replaced_by_other_problems() -> None:
    first, second = ["1$", "0$", "1$", "1$"], ["0$", "0$", "0a$", "1a$"]
    parts, state, config = make([first, second], dynamic=True)
    grader = RecordingGrader()
    rollout = collect(parts, state, config, 0, GradeCache(grader))
    assert answers(rollout) == [["1", "0"], ["0a", "1a"]]
    assert len({group.continuation.prefix.problem_id for group in (*rollout.groups, *rollout.discarded)}) == 4
    assert len(rollout.discarded) == 2 and len(request_lengths(rollout)) == 8  # all eight count as decoding
    assert not set(parts.engine.seeds[0]) & set(parts.engine.seeds[1])
    # The second round's two equal answers to one problem are one question to the grader.
    assert len(grader.asked) == 6


def test_enough_groups_end_the_rounds_and_too_many_are_discarded() -> None:
    parts, state, config = make([["0$", "0$", "1$", "0$"], ["1$", "0$", "1$", "0$"]], dynamic=True)
    rollout = collect(parts, state, config, 0, GradeCache(RecordingGrader()))
    assert answers(rollout) == [["1", "0"], ["1", "0"]] and len(rollout.discarded) == 2
    parts, state, config = make([["1$", "0$", "1$", "0$"]], dynamic=True)
    assert len(collect(parts, state, config, 0, GradeCache(RecordingGrader())).groups) == 2


def test_the_last_round_may_leave_fewer_groups_or_none() -> None:
    parts, state, config = make([["0$"] * 4] * 3, dynamic=True, dynamic_max_rounds=3)
    rollout = collect(parts, state, config, 0, GradeCache(RecordingGrader()))
    assert rollout.groups == () and len(rollout.discarded) == 6 and parts.engine.scripts == []


def test_without_dynamic_sampling_nothing_is_graded_or_dropped() -> None:
    parts, state, config = make([["0$"] * 4])
    grader = RecordingGrader()
    rollout = collect(parts, state, config, 0, GradeCache(grader))
    assert len(rollout.groups) == 2 and grader.asked == []


def test_a_grade_is_asked_for_once() -> None:
    grader = RecordingGrader()
    cache = GradeCache(grader)
    items = [(PROBLEMS["a"], ids("1")), (PROBLEMS["b"], ids("1")), (PROBLEMS["a"], ids("1"))]
    assert [grade.reward for grade in cache(items)] == [1, 1, 1]
    assert cache(items[:1]) == [Grade(1.0)] and len(grader.asked) == 2


def test_calibration_on_labelled_rollouts_counts_their_decoding() -> None:
    """Six rollouts over four problems; the critic's value is right about all but an unreadable one."""
    texts = ["1$", "0$", "1$", "0$", "0000$", "1$"]
    parts, state, config = make([texts])
    config.estimator.rfpo_num_labelled = 6

    def score(states):
        told = np.array([0.9 if "1" in text_of(s.response_ids) else 0.2 for s in states], dtype=np.float32)
        return Values(told, np.array([len(s.response_ids) < 4 for s in states]))

    parts.critic = SimpleNamespace(score=score)
    parts.decoding_cost = SimpleNamespace(total=lambda lengths: float(sum(new for _, new in lengths)))
    calibrate(parts, state, config, GradeCache(RecordingGrader()))
    assert 0.2 <= state.calibration.threshold < 0.9
    assert state.counters.generated_tokens == 5 * 2 + 5 and state.counters.decoding_flops == 15
    restored = RunState.fresh(config, list(PROBLEMS.values()))
    restored.load_state_dict(state.state_dict())
    assert restored.calibration.threshold == state.calibration.threshold
    np.testing.assert_array_equal(restored.calibration.edges, state.calibration.edges)


def test_a_state_without_calibration_round_trips() -> None:
    _, state, config = make([])
    restored = RunState.fresh(config, list(PROBLEMS.values()))
    restored.load_state_dict(state.state_dict())
    assert restored.calibration is None
