from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ac2.algorithm.readiness import ErrorRecord, Readiness, errors_by_tag
from megatron_ac2.types import UserError

BANK = frozenset({"a", "b", "c"})


def record(
    problem_id: str, error: float, value: float = 0.5, valid: bool = True, tag="terminal", audit: bool = False
) -> ErrorRecord:
    return ErrorRecord(problem_id, error, value, valid, tag, audit)


def gate(window: int = 1, **options) -> Readiness:
    return Readiness(global_threshold=0.20, local_threshold=0.18, window=window, **options)


def test_all_conditions_met() -> None:
    readiness = gate()
    assert readiness.update([record("a", 0.1), record("b", 0.17)], BANK) == ["a", "b"]
    assert readiness.ready == {"a", "b"}
    assert readiness.global_error == pytest.approx(0.135)


@pytest.mark.parametrize(("error", "expected"), [(0.29, ["a"]), (0.30, []), (0.31, [])])
def test_a_global_mean_must_be_below_the_threshold(error: float, expected: list[str]) -> None:
    # (0.10 + error) / 2 against 0.20; "b" is too far off by itself
    assert gate().update([record("a", 0.10), record("b", error)], BANK) == expected


@pytest.mark.parametrize(("error", "expected"), [(0.17, ["a"]), (0.18, []), (0.19, [])])
def test_b_own_error_must_be_below_the_threshold(error: float, expected: list[str]) -> None:
    assert gate().update([record("a", error)], BANK) == expected


def test_c_a_nonzero_value_now_or_before() -> None:
    readiness = gate()
    assert readiness.update([record("a", 0.0, value=0.0)], BANK) == []
    assert readiness.update([record("a", 0.5, value=0.5)], BANK) == []  # nonzero, but wrong
    assert readiness.update([record("a", 0.0, value=0.0)], BANK) == ["a"]  # right now, nonzero before


def test_c_an_invalid_probe_predicts_nothing() -> None:
    readiness = gate()
    readiness.update([record("a", 1.0, value=0.7, valid=False)], BANK)
    assert readiness.update([record("a", 0.0, value=0.0)], BANK) == []


def test_d_reference_must_be_older_than_this_step() -> None:
    readiness = gate()
    before, after = frozenset({"b"}), frozenset({"a", "b"})
    assert readiness.update([record("a", 0.1)], before) == []  # "a" gets its reference in this very step
    assert readiness.update([record("a", 0.1)], after) == ["a"]


def test_window_must_be_full_of_measured_steps() -> None:
    readiness = gate(window=3)
    for _ in range(2):
        assert readiness.update([record("a", 0.1)], BANK) == []
    assert readiness.update([], BANK) == []  # nothing measured: not a step of the window
    assert not readiness.gate_open
    assert readiness.update([record("a", 0.1)], BANK) == ["a"]


def test_window_forgets_and_weighs_prefixes_not_steps() -> None:
    readiness = gate(window=2)
    readiness.update([record("a", 0.9)], BANK)
    readiness.update([record("a", 0.1)] * 3, BANK)
    assert readiness.global_error == pytest.approx((0.9 + 3 * 0.1) / 4)
    assert readiness.ready == frozenset()  # 0.3; the mean of step means would be 0.5
    readiness.update([record("b", 0.25)], BANK)
    assert readiness.global_error == pytest.approx((3 * 0.1 + 0.25) / 4)
    assert readiness.gate_open


def test_invalid_probe_counts_one_whatever_its_record_says() -> None:
    readiness = gate()
    assert readiness.update([record("a", 0.0, valid=False)], BANK) == []
    assert readiness.global_error == 1.0
    assert readiness.last_error("a") == 1.0


def test_invalid_probe_cannot_make_a_problem_ready_even_under_lax_thresholds() -> None:
    readiness = Readiness(global_threshold=2.0, local_threshold=2.0, window=1)
    readiness.update([record("a", 0.9)], frozenset())  # a nonzero prediction, no reference yet
    assert readiness.update([record("a", 0.0, valid=False)], BANK) == []
    assert readiness.update([record("a", 0.9)], BANK) == ["a"]


def test_once_ready_stays_ready() -> None:
    readiness = gate()
    readiness.update([record("a", 0.1)], BANK)
    assert readiness.update([record("a", 1.0, valid=False)], frozenset()) == []
    assert readiness.ready == {"a"}
    assert readiness.update([record("a", 0.1)], BANK) == []  # not newly


def test_a_problem_in_several_slots_is_judged_by_their_mean() -> None:
    readiness = gate()
    assert readiness.update([record("a", 0.0), record("a", 0.3), record("b", 0.0), record("b", 0.4)], BANK) == ["a"]
    assert readiness.last_error("a") == pytest.approx(0.15)
    assert readiness.last_error("b") == pytest.approx(0.2)


def test_before_the_first_record() -> None:
    readiness = gate()
    assert math.isnan(readiness.global_error) and not readiness.gate_open
    assert readiness.last_error("a") is None


def test_errors_by_tag() -> None:
    records = [record("a", 0.2), record("b", 0.4), record("c", 0.1, tag="bootstrapped"), record("d", 0.0, valid=False)]
    assert errors_by_tag(records) == {"bootstrapped": 0.1, "terminal": pytest.approx((0.2 + 0.4 + 1.0) / 3)}
    assert errors_by_tag([]) == {}


def test_resumed_run_decides_as_the_uninterrupted_one() -> None:
    steps = [
        [record("a", 0.3), record("b", 0.0, value=0.0)],
        [record("a", 0.1), record("b", 0.1), record("c", 0.5)],
        [record("c", 0.1), record("a", 0.0)],
        [record("b", 0.0, value=0.0), record("c", 0.9, valid=False)],
        [record("b", 0.1)],
    ]
    for cut in range(len(steps)):
        whole, first, second = gate(window=2), gate(window=2), gate(window=2)
        for step in steps[:cut]:
            whole.update(step, BANK)
            first.update(step, BANK)
        second.load_state_dict(first.state_dict())
        for step in steps[cut:]:
            assert whole.update(step, BANK) == second.update(step, BANK)
        assert whole.ready == second.ready
        assert repr(whole.state_dict()) == repr(second.state_dict())


def test_state_is_plain_and_detached() -> None:
    readiness = gate(window=2)
    readiness.update([record("a", 0.1)], BANK)
    saved = readiness.state_dict()
    readiness.update([record("b", 0.1)], BANK)
    assert len(saved["steps"]) == 1 and list(saved["last_error"]) == ["a"]
    json.dumps({name: part for name, part in saved.items() if name != "steps"})
    shorter = gate(window=1)
    shorter.load_state_dict(readiness.state_dict())
    assert shorter.gate_open and shorter.global_error == pytest.approx(0.1)


def test_terminal_only_is_blind_to_other_targets() -> None:
    readiness, local = gate(window=2, kind="terminal_only"), gate(window=2)
    steps = [
        [record("a", 0.0, tag="bootstrapped"), record("b", 0.3)],
        [record("a", 0.0, tag="bootstrapped"), record("c", 0.0, value=0.0)],  # (0.3 + 0) / 2: the gate opens
    ]
    for step in steps:
        newly = readiness.update(step, BANK)
        local.update(step, BANK)
    assert newly == [] and local.ready == {"a"}
    assert readiness.global_error == pytest.approx(0.15) and local.global_error == pytest.approx(0.075)
    assert readiness.last_error("a") is None
    # a step without a terminal record is none: the window still holds 0.3 and 0
    assert readiness.update([record("a", 1.0, tag="mixed"), record("a", 1.0, tag="bootstrapped")], BANK) == []
    assert readiness.global_error == pytest.approx(0.15)
    assert readiness.update([record("a", 0.1), record("c", 0.9, tag="mixed")], BANK) == ["a"]


def test_terminal_only_takes_a_nonzero_prediction_from_terminal_records_only() -> None:
    readiness = gate(kind="terminal_only")
    readiness.update([record("a", 0.0, value=0.5, tag="mixed")], BANK)
    assert readiness.update([record("a", 0.0, value=0.0)], BANK) == []


def test_global_only_opens_for_every_problem_and_for_good() -> None:
    readiness = gate(window=2, kind="global_only")
    readiness.update([record("a", 0.9)], frozenset())
    assert readiness.ready_among(["a", "new"]) == frozenset() and not readiness.all_ready
    # (0.9 + 3 * 0) / 4 = 0.225, then 3 * 0 and 0.2: open. Own error, prediction and reference do not matter
    assert readiness.update([record("b", 0.0, value=0.0)] * 3, frozenset()) == []
    assert readiness.update([record("c", 0.2, valid=True)], frozenset()) == ["a", "b", "c"]
    assert readiness.all_ready and readiness.ready_among(["a", "new"]) == {"a", "new"}
    assert readiness.update([record("d", 1.0)] * 9, frozenset()) == ["d"]
    assert not readiness.gate_open and readiness.ready_among(["e"]) == {"e"}


def test_local_readiness_says_nothing_of_unknown_problems() -> None:
    readiness = gate()
    readiness.update([record("a", 0.1), record("b", 0.19)], BANK)
    assert readiness.ready_among(["a", "b", "new"]) == {"a"} and not readiness.all_ready


def test_an_audit_may_take_readiness_away() -> None:
    readiness = gate(demote_threshold=0.3)
    readiness.update([record("a", 0.1), record("b", 0.1), record("c", 0.1)], BANK)
    step = [
        record("a", 0.3, audit=True),  # reaches the threshold
        record("b", 0.9),  # no audit: its target is the critic's own
        record("c", 0.29, audit=True),
        record("d", 0.9, audit=True),  # was not ready
    ]
    assert readiness.update(step, BANK) == []
    assert readiness.demoted == ["a"] and readiness.ready == {"b", "c"}
    # back by the normal rule, at a later step
    assert readiness.update([record("a", 0.1, audit=True)], BANK) == ["a"] and readiness.demoted == []
    readiness.update([record("a", 0.0, valid=False, audit=True)], BANK)  # an invalid probe is as wrong as can be
    assert readiness.demoted == ["a"]
    readiness.update([], BANK)
    assert readiness.demoted == []


def test_a_demoted_problem_is_not_ready_again_in_the_same_step() -> None:
    readiness = gate(demote_threshold=0.3)
    readiness.update([record("a", 0.1)], BANK)
    step = [record("a", 0.3, audit=True)] + [record("a", 0.0)] * 2  # the mean, 0.1, would make it ready
    assert readiness.update(step, BANK) == [] and readiness.demoted == ["a"]
    assert readiness.update([record("a", 0.1)], BANK) == ["a"]


def test_without_a_threshold_nothing_is_demoted() -> None:
    readiness = gate()
    readiness.update([record("a", 0.1)], BANK)
    readiness.update([record("a", 1.0, audit=True)], BANK)
    assert readiness.ready == {"a"} and readiness.demoted == []


def test_bad_options_are_refused() -> None:
    with pytest.raises(UserError, match="readiness.kind: found 'never', accepted: local, global_only, terminal_only"):
        gate(kind="never")
    with pytest.raises(UserError, match="readiness.demote_threshold: found 0.3, .* global_only: null"):
        gate(kind="global_only", demote_threshold=0.3)


records_of_a_step = st.lists(
    st.builds(
        record,
        st.sampled_from("abcd"),
        st.sampled_from([0.0, 0.1, 0.17, 0.3, 0.9]),
        st.sampled_from([0.0, 0.5]),
        st.booleans(),
        st.sampled_from(["terminal", "mixed", "bootstrapped"]),
        st.booleans(),
    ),
    max_size=4,
)
options_of_a_gate = st.sampled_from(
    [{"kind": "local"}, {"kind": "terminal_only"}, {"kind": "global_only"}]
    + [{"kind": kind, "demote_threshold": 0.3} for kind in ("local", "terminal_only")]
)


@given(st.lists(records_of_a_step, max_size=8), options_of_a_gate, st.integers(1, 3), st.integers(0, 8))
def test_the_ready_set_changes_as_update_says_also_after_a_resume(steps, options, window, cut) -> None:
    readiness = gate(window, **options)
    for number, step in enumerate(steps):
        if number == cut:
            saved = json.loads(json.dumps({**readiness.state_dict(), "steps": []})) | {
                "steps": readiness.state_dict()["steps"]
            }
            readiness = gate(window, **options)
            readiness.load_state_dict(saved)
        before, opened = readiness.ready, readiness.all_ready
        twin = gate(window, **options)
        twin.load_state_dict(readiness.state_dict())
        newly = readiness.update(step, BANK)
        assert newly == twin.update(step, BANK) and repr(twin.state_dict()) == repr(readiness.state_dict())
        assert not before & set(newly) and set(readiness.demoted) <= before
        assert readiness.ready == (before - set(readiness.demoted)) | set(newly)
        assert readiness.all_ready >= opened
        assert readiness.ready_among("abcdz") == (set("abcdz") if readiness.all_ready else readiness.ready)
        if "demote_threshold" not in options:
            assert readiness.ready >= before and not readiness.demoted
        if options["kind"] != "global_only":
            assert readiness.ready <= BANK
