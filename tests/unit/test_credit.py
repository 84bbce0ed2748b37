from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from megatron_ac2.algorithm.references import ReferenceBank
from megatron_ac2.credit import reference_candidates, train_sequences
from megatron_ac2.types import Grade
from tests.unit.loop_parts import (
    BUDGET,
    EOS,
    PROBLEMS,
    RecordingCritic,
    RecordingGrader,
    config_of,
    continuation,
    credit_of,
    ids,
    prefix,
    roll,
    text_of,
)


def test_a_chunk_end_is_valued_by_the_critic_and_never_graded() -> None:
    """Both members would be graded 0: a reward in place of a value would show."""
    rollout = roll([continuation(prefix("a", "xx"), "chunk")], ["abcde", "fghij"])
    critic, grader = RecordingCritic(lambda text: {"xx": 0.4, "xxabcde": 0.9, "xxfghij": 0.3}[text]), RecordingGrader()
    credit = credit_of(rollout, critic, grader)
    assert grader.asked == [] and not credit.grades
    assert critic.asked == [("a", "xx"), ("a", "xxabcde"), ("a", "xxfghij")]
    np.testing.assert_allclose(credit.endpoints.value, [[0.9, 0.3]])
    np.testing.assert_allclose(credit.advantages, [[0.3, -0.3]], atol=1e-6)
    assert credit.endpoints.from_critic.all()
    (target,) = credit.targets
    assert (target.problem_id, text_of(target.response_ids), target.value, target.tag, target.version) == (
        "a", "xx", 0.6, "bootstrapped", 3
    )  # fmt: skip
    assert credit.records[0].error == pytest.approx(0.2)


def test_an_end_of_sequence_is_graded_also_in_a_chunk() -> None:
    rollout = roll([continuation(prefix("a"), "chunk")], ["1$", "abcde"])
    grader = RecordingGrader()
    credit = credit_of(rollout, RecordingCritic(lambda text: 0.25), grader)
    assert grader.asked == [("a", "1")]
    np.testing.assert_allclose(credit.endpoints.value, [[1.0, 0.25]])
    assert credit.endpoints.from_critic.tolist() == [[False, True]]
    assert credit.targets[0].tag == "mixed" and credit.targets[0].value == 0.6


def test_a_cut_by_the_response_budget_is_graded() -> None:
    """The chunk's own limit and the budget's end fall together: the budget decides."""
    rollout = roll([continuation(prefix("a", "x" * (BUDGET - 3)), "chunk")], ["1bc", "de"])
    assert [chunk.stop for chunk in rollout.groups[0].chunks] == ["budget", "chunk_end"]
    full = roll([continuation(prefix("a", "xx"), "full")], ["1" * 18, "0" * 18])
    credit = credit_of(full, RecordingCritic())
    assert credit.endpoints.value.tolist() == [[1.0, 0.0]] and not credit.endpoints.from_critic.any()
    assert credit.targets[0].tag == "terminal"


@pytest.mark.parametrize(("ending", "is_graded"), [("er: 1", False), ("r: 1\n", True)])
def test_an_open_chunk_with_a_complete_answer_is_graded(ending: str, is_graded: bool) -> None:
    """ "Answer: 1" may still become 12."""
    start = "Answer: 1\n"[: -len(ending)] if is_graded else "Answ"
    rollout = roll([continuation(prefix("a", start), "chunk")], [ending, "abcde"])
    grader, critic = RecordingGrader(), RecordingCritic(lambda text: 0.5)
    credit = credit_of(rollout, critic, grader)
    assert [text for _, text in grader.asked] == (["Answer: 1\n"] if is_graded else [])
    assert credit.endpoints.value[0, 0] == (1.0 if is_graded else 0.5)
    assert len(critic.asked) == (2 if is_graded else 3)


def test_invalid_values_take_a_chunk_out_of_the_loss_and_the_target() -> None:
    rollout = roll([continuation(prefix("a", "x"), "chunk", group_size=3)], ["aaaaa", "bbbbb", "ccccc"])
    answers = {"x": None, "xaaaaa": None, "xbbbbb": 0.8, "xccccc": 0.2}
    credit = credit_of(rollout, RecordingCritic(answers.get), min_valid=2)
    assert credit.weights.tolist() == [[0, 1, 1]]
    np.testing.assert_allclose(credit.advantages, [[0, 0.3, -0.3]], atol=1e-6)
    assert credit.targets[0].value == 0.5
    assert not credit.records[0].probe_valid and credit.records[0].error == 1
    assert not credit_of(rollout, RecordingCritic(answers.get), min_valid=3).targets


def test_a_failed_grader_is_reward_0_for_the_actor_and_nothing_for_the_critic() -> None:
    rollout = roll([continuation(prefix("a"), "full")], ["1$", "?$"])
    grader = RecordingGrader(lambda text: Grade(1.0) if text == "1" else Grade(1.0, valid=False))
    credit = credit_of(rollout, RecordingCritic(), grader)
    assert credit.endpoints.value.tolist() == [[1, 0]] and credit.weights.tolist() == [[1, 1]]
    assert credit.targets[0].value == 1.0


def test_fresh_rollouts_feed_replay_and_references_only() -> None:
    rollout = roll([continuation(prefix("a", "x"), "full")], ["1f$", "0f$", "1g$", "0g$"], fresh="bc")
    critic = RecordingCritic()
    credit = credit_of(rollout, critic)
    assert [(t.problem_id, text_of(t.response_ids), t.reward, t.version) for t in credit.fresh] == [
        ("b", "1f", 1.0, 3), ("c", "0f", 0.0, 3)
    ]  # fmt: skip
    assert credit.fresh[0].response_ids[-1] == EOS  # as sampled
    assert {name for name, _ in critic.asked} == {"a"}
    assert [target.problem_id for target in credit.targets] == ["a"]
    sequences = train_sequences(rollout.groups, credit, PROBLEMS)
    assert [text_of(sequence.token_ids) for sequence in sequences] == ["a?x1g", "a?x0g"]
    candidates = reference_candidates(rollout, credit, 6 / 7)
    assert {name: [text_of(r) for r in found] for name, found in candidates.items()} == {"b": ["1f"], "a": ["x1g"]}


def test_a_fresh_rollout_whose_grader_failed_is_worth_nothing() -> None:
    rollout = roll([continuation(prefix("a"), "full")], ["1$", "0$", "0$"], fresh="b")
    credit = credit_of(rollout, RecordingCritic(), RecordingGrader(lambda text: Grade(1.0, valid=False)))
    assert credit.fresh[0].reward == 0
    assert reference_candidates(rollout, credit, 6 / 7) == {}


def test_bare_fresh_prefixes_are_trained_on_but_kept_out_of_the_books() -> None:
    rollout = roll([continuation(prefix("a", replayed=False), "full")], ["1$", "0$"])
    credit = credit_of(rollout, RecordingCritic())
    assert credit.advantages.tolist() == [[0.5, -0.5]]
    assert credit.targets == () and credit.records == ()


def test_the_critic_sees_the_bank_as_it_is_and_the_policy_never() -> None:
    bank = ReferenceBank()
    bank.add({"a": [ids("REF")]}, np.random.default_rng(0))
    groups = [continuation(prefix("a", "x"), "chunk"), continuation(prefix("b", "y"), "chunk")]
    rollout = roll(groups, ["aaaaa", "bbbbb", "ccccc", "ddddd"])
    critic = RecordingCritic()
    credit = credit_of(rollout, critic, references=bank)
    known = {state.problem.problem_id: state.reference_ids for state in critic.states}
    assert text_of(known["a"]) == "REF" and known["b"] is None
    assert not any("REF" in text_of(s.token_ids) for s in train_sequences(rollout.groups, credit, PROBLEMS))


def test_an_audit_is_graded_throughout_and_valued_once_at_the_chunks_length() -> None:
    texts = ["ab$", "abcdefg1$", "abcdexyz$", "abcd$"]  # the first longer than a chunk is the second
    rollout = roll([continuation(prefix("a", "x"), "audit", group_size=4)], texts)
    critic = RecordingCritic(lambda text: {"x": 0.1, "xabcde": 0.75}[text])
    credit = credit_of(rollout, critic)
    assert critic.asked == [("a", "x"), ("a", "xabcde")]
    assert credit.audits == ((0.75, 1.0),)  # that member's own reward: the group's mean is the prefix's value
    assert credit.endpoints.value.tolist() == [[0, 1, 0, 0]] and not credit.endpoints.from_critic.any()
    assert credit.targets[0].tag == "terminal" and credit.targets[0].value == 0.2  # 0.25: a tie goes down


def test_an_unreadable_audit_is_left_out() -> None:
    rollout = roll([continuation(prefix("a"), "audit")], ["abcdefg$", "1$"])
    credit = credit_of(rollout, RecordingCritic(lambda text: 0.5 if text == "" else None))
    assert credit.audits == () and len(credit.targets) == 1


def test_without_a_critic_rewards_alone_make_the_advantages() -> None:
    rollout = roll([continuation(prefix("a", replayed=False), "full")], ["1$", "0$"])
    credit = credit_of(rollout, None)
    assert credit.advantages.tolist() == [[0.5, -0.5]] and len(credit.probes.value) == 0
    assert credit.targets == credit.records == credit.audits == ()
    with pytest.raises(ValueError, match="1 critic ends, 0 critic values"):
        credit_of(roll([continuation(prefix("a"), "chunk")], ["abcde", "1$"]), None)


def test_prefix_tokens_are_context_and_a_chunks_tokens_share_its_advantage() -> None:
    groups = [continuation(prefix("a", "xyz"), "chunk"), continuation(prefix("b"), "full")]
    rollout = roll(groups, ["aaaaa", "1$", "1$", "0$"])
    credit = credit_of(rollout, RecordingCritic(lambda text: None if "aaaaa" in text else 0.5))
    first, second, third, fourth = train_sequences(rollout.groups, credit, PROBLEMS)
    assert (text_of(first.token_ids), first.num_context, first.weight) == ("a?xyzaaaaa", 5, 0.0)
    assert len(first.behavior_logprobs) == len(first.token_ids) - first.num_context == 5
    assert (second.num_context, second.weight) == (5, 1.0) and second.token_ids[-1] == EOS
    assert second.behavior_logprobs.tolist() == [-1, -2]
    assert [s.advantages.tolist() for s in (first, third, fourth)] == [[0] * 5, [0.5] * 2, [-0.5] * 2]
    assert [s.empty_prefix for s in (first, second, third, fourth)] == [False, False, True, True]
    assert first.token_ids.dtype == np.int32


def test_a_singleton_is_compared_with_the_value_of_its_own_prefix() -> None:
    """One chunk of a ready problem beside a full group of two: v - V(s), and the target of V(s) is v alone."""
    groups = [continuation(prefix("a", "x"), "chunk", 1), continuation(prefix("b"), "full"),
              continuation(prefix("a", "y"), "chunk", 1)]  # fmt: skip
    rollout = roll(groups, ["abcde", "1$", "0$", "fghij"])
    values = {"x": 0.4, "xabcde": 0.9, "": 0.5, "y": None, "yfghij": 0.7}
    credit = credit_of(rollout, RecordingCritic(values.get), config=config_of(min_valid=2, kind="singleton"))
    np.testing.assert_allclose(credit.advantages, [[0.5, 0.0], [0.5, -0.5], [0.0, 0.0]], atol=1e-6)
    assert credit.weights.tolist() == [[1, 0], [1, 1], [0, 0]]  # without V(s) there is nothing to compare with
    assert credit.endpoints.present.tolist() == [[True, False], [True, True], [True, False]]
    assert [target.value for target in credit.targets] == [0.9, 0.5, 0.7]
    assert [target.tag for target in credit.targets] == ["bootstrapped", "terminal", "bootstrapped"]
    assert [len(s.advantages) for s in train_sequences(rollout.groups, credit, PROBLEMS)] == [5, 2, 2, 5]


def test_rloo_and_grpo_read_the_group_their_own_way() -> None:
    rollout = roll([continuation(prefix("a", replayed=False), "full", 4)], ["1$", "0$", "0$", "0$"])
    leave_one_out = credit_of(rollout, None, config=config_of(baseline="leave_one_out"))
    np.testing.assert_allclose(leave_one_out.advantages, [[1, -1 / 3, -1 / 3, -1 / 3]], atol=1e-6)
    normalised = credit_of(rollout, None, config=config_of(divide_by_std=True))
    std = np.std([1, 0, 0, 0], ddof=1)
    np.testing.assert_allclose(normalised.advantages, [[0.75 / std, *[-0.25 / std] * 3]], rtol=1e-4)


def test_an_overlong_answer_loses_reward_in_the_loss_alone() -> None:
    """Budget 20, the last 10 tokens cost up to 1: 15 tokens cost a half; the recorded reward stays 1."""
    rollout = roll([continuation(prefix("a", replayed=False), "full")], ["1" * 14 + "$", "1$"])
    config = config_of()
    config.sampling.overlong_cache = 10
    credit = credit_of(rollout, None, config=config)
    np.testing.assert_allclose(credit.advantages, [[-0.25, 0.25]], atol=1e-6)
    assert credit.endpoints.value.tolist() == [[1, 1]]


def test_recorded_tokens_travel_with_their_chunk() -> None:
    rollout = roll([continuation(prefix("a"), "full", 1)], ["1$"])
    chunk = rollout.groups[0].chunks[0]
    recorded = replace(
        chunk, top_ids=np.arange(6).reshape(2, 3), top_logprobs=np.zeros((2, 3), np.float32),
        routed_experts=np.zeros((3, 1, 2), np.uint8),
    )  # fmt: skip
    groups = (replace(rollout.groups[0], chunks=(recorded,)),)
    (sequence,) = train_sequences(groups, credit_of(rollout, None), PROBLEMS)
    for name in ("top_ids", "top_logprobs", "routed_experts"):
        assert getattr(sequence, name) is getattr(recorded, name)
