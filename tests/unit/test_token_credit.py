"""Advantages and targets by token, on scripted rollouts; values, ratios and results small enough to work out."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from megatron_ac2.algorithm.references import ReferenceBank
from megatron_ac2.algorithm.rfpo import Calibration
from megatron_ac2.config import Config
from megatron_ac2.credit import train_sequences
from megatron_ac2.rollout import Rollout
from megatron_ac2.token_credit import TokenCredit, assign_token_credit, nstep_examples
from megatron_ac2.types import CriticState
from tests.unit.loop_parts import PROBLEMS, RecordingCritic, config_of, continuation, credit_of, prefix, roll, text_of


class PathCritic:
    """V after n response tokens is n / 10, of the frozen critic n / 20; responses with "z" are too long to read."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, list[int]]] = []

    def score_paths(self, states: Sequence[CriticState], positions: Sequence[np.ndarray], frozen: bool = False):
        texts = [text_of(state.response_ids) for state in states]
        self.asked = [(text, list(where)) for text, where in zip(texts, positions)]
        scale = 20 if frozen else 10
        return [None if "z" in text else (where / scale).astype(np.float32) for text, where in zip(texts, positions)]


class ShiftedActor:
    """The trainer gives every token `shift` nats more than the engine did."""

    def __init__(self, shift: float):
        self.shift = shift

    def logprobs(self, sequences):
        return [sequence.behavior_logprobs + np.float32(self.shift) for sequence in sequences]


def token_credit(
    rollout: Rollout, config: Config, shift: float = 0.0, calibration: Calibration | None = None
) -> TokenCredit:
    credit = credit_of(rollout, None, config=config)
    sequences = train_sequences(rollout.groups, credit, PROBLEMS)
    return assign_token_credit(
        rollout.groups, sequences, credit, PROBLEMS, ReferenceBank(), PathCritic(), ShiftedActor(shift), config, step=0,
        calibration=calibration,
    )  # fmt: skip


def test_gae_reads_the_values_before_each_token() -> None:
    """Prefix "x", then "1" and the end: V = .1, .2, reward 1. lambda = 0: differences; the last one to the reward."""
    rollout = roll([continuation(prefix("a", "x"), "full", 1)], ["1$"])
    found = token_credit(rollout, config_of(kind="gae", gae_lambda=0.0))
    np.testing.assert_allclose(found.sequences[0].advantages, [0.1, 0.8], atol=1e-6)
    (example,) = found.examples
    assert example.positions.tolist() == [1, 2] and text_of(example.state.response_ids) == "x1"
    np.testing.assert_allclose(example.targets, [0.2, 1.0], atol=1e-6)
    np.testing.assert_allclose(example.old_values, [0.1, 0.2], atol=1e-6)
    full = token_credit(rollout, config_of(kind="gae", gae_lambda=1.0))
    np.testing.assert_allclose(full.sequences[0].advantages, [0.9, 0.8], atol=1e-6)
    np.testing.assert_allclose(full.examples[0].targets, [1.0, 1.0], atol=1e-6)


def test_brace_weighs_by_the_trainer_over_the_engine() -> None:
    """Both tokens have ratio 1/2, lambda = 1, horizon 2: s_1 first: .2 + .5 (1 - .2) = .6. Then s_0: .1 + .5 (.2 - .1)
    + .25 (1 - .2) = .35. A_0 = .6 - .1, A_1 = 1 - .2."""
    rollout = roll([continuation(prefix("a", "x"), "full", 1)], ["1$"])
    found = token_credit(rollout, config_of(kind="brace", brace_horizon=2), shift=float(np.log(0.5)))
    np.testing.assert_allclose(found.examples[0].targets, [0.35, 0.6], atol=1e-6)
    np.testing.assert_allclose(found.sequences[0].advantages, [0.5, 0.8], atol=1e-6)
    on_policy = token_credit(rollout, config_of(kind="brace"))
    np.testing.assert_allclose(on_policy.examples[0].targets, [1.0, 1.0], atol=1e-6)


def test_a_response_that_the_critic_cannot_read_is_left_out() -> None:
    rollout = roll([continuation(prefix("a"), "full", 2)], ["1$", "z$"])
    found = token_credit(rollout, config_of(kind="gae"))
    assert [sequence.weight for sequence in found.sequences] == [1.0, 0.0]
    assert [text_of(example.state.response_ids) for example in found.examples] == ["1"]


def test_rfpo_rewards_what_the_frozen_critic_calls_correct() -> None:
    """V at the end is .2 and .4, the threshold .3. A_t = r - V(s_t), and the critic is not trained."""
    calibration = Calibration(np.full(9, 100.0), np.zeros(10), 0.3)
    rollout = roll([continuation(prefix("a"), "full", 2)], ["1$", "000$"])
    found = token_credit(rollout, config_of(kind="rfpo", rfpo_label_fraction=0.0), calibration=calibration)
    np.testing.assert_allclose(found.sequences[0].advantages, [0.0, -0.1], atol=1e-6)
    np.testing.assert_allclose(found.sequences[1].advantages, [1.0, 0.9, 0.8, 0.7], atol=1e-6)
    assert found.examples == []
    labelled = token_credit(rollout, config_of(kind="rfpo", rfpo_label_fraction=1.0), calibration=calibration)
    np.testing.assert_allclose(labelled.sequences[0].advantages, [1.0, 0.9], atol=1e-6)
    np.testing.assert_allclose(labelled.sequences[1].advantages, [0.0, -0.1, -0.2, -0.3], atol=1e-6)


def test_nstep_targets_at_every_chunk_boundary_of_the_replayed_groups() -> None:
    """Chunks of 5 from the prefix "xx". Member one ends at 2 + 3 with reward 1; member two runs to 2 + 12 with reward
    0, and the frozen critic gives 7/20 and 12/20 at its boundaries. The prefix, one chunk on: mean of 1 and .35; two:
    of 1 and .6; three: of 1 and 0. Bare problems are in no book."""
    groups = [continuation(prefix("a", "xx"), "full"), continuation(prefix("b", replayed=False), "full")]
    rollout = roll(groups, ["1b$", "00000000000$", "1$", "0$"])
    config = config_of()
    config.critic.nstep_max = 3
    critic = PathCritic()
    credit = credit_of(rollout, RecordingCritic(), config=config)
    start, second = nstep_examples(rollout.groups, credit, PROBLEMS, ReferenceBank(), critic, config)
    assert critic.asked == [("xx1b", []), ("xx00000000000", [7, 12])]
    assert text_of(start.state.response_ids) == "xx" and start.positions.tolist() == [2]
    np.testing.assert_allclose(start.targets, [[0.675, 0.8, 0.5]], atol=1e-6)
    assert second.positions.tolist() == [7, 12] and second.mask.tolist() == [[True, True, False], [True, False, False]]
    np.testing.assert_allclose(second.targets[second.mask], [0.6, 0.0, 0.0], atol=1e-6)


@pytest.mark.parametrize("kind", ["gae", "brace"])
def test_no_group_no_token_credit(kind: str) -> None:
    found = token_credit(Rollout((), ()), config_of(kind=kind))
    assert found.sequences == found.examples == []
