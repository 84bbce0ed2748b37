"""Every overlay of examples/algorithms runs through the whole loop at tiny size, and shows what it is made for."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_ac2.algorithm.ragged import split_ids
from megatron_ac2.model.checkpoint_files import latest, read_state
from tests.distributed.launch import ROOT
from tests.end_to_end.runs import Launcher, steps

ALGORITHMS = ROOT / "examples" / "algorithms"
OVERLAYS = sorted(path.stem for path in ALGORITHMS.glob("*.yaml"))
NUM_FRESH, GROUPS, MEMBERS = 4, 4, 4  # of train.yaml
AC2_GROUPS = 8  # two slots of each of the first step's problems; all four become ready after the second

Row = dict[str, Any]


@dataclass(frozen=True)
class Run:
    rows: list[Row]  # of the steps taken
    dir: Path

    @property
    def last(self) -> Row:
        return self.rows[-1]

    @property
    def state(self) -> dict[str, Any]:
        return read_state(latest(self.dir / "checkpoints") / "state.npz")["run"]

    @property
    def target_lengths(self) -> np.ndarray:
        """Tokens of the prefixes that the critic has targets for."""
        return np.array([len(ids) for ids in split_ids(self.state["targets"]["responses"])])


Runs = Callable[[str], Run]

# An engine that samples with rounded weights: what corrects for a mismatch has one to correct for.
MISMATCHED = [name for name in OVERLAYS if name.endswith(("tis", "mis", "rejection")) or name.startswith("score_")]
MISMATCHED.append("decoupled_ppo")
# What the tiny size asks for, or what makes the overlay's effect certain within three steps.
CHANGES = {name: ["engine.rounding=int8"] for name in MISMATCHED} | {
    "ac2_stale_replay": ["replay.stale_every=2", "replay.capacity=12"],
    "ac2_global_only": ["readiness.local_threshold=0"],  # under which the local gate would let nobody in
    "ac2_audit_demotion": ["readiness.demote_threshold=0.01"],
    "ac2_short_chunks": ["sampling.chunk_len=3", "sampling.cut_grid=6"],
    "ac2_fine_cuts": ["sampling.chunk_len=6", "sampling.cut_grid=3"],
    "dapo": ["sampling.overlong_cache=6"],
    # Rounding moves the mean ratio of a response by less than the overlay's 1 %.
    "geometric_rejection": ["engine.rounding=int8", "actor.importance.low=0.9999", "actor.importance.high=1.0001"],
    # Every response of the step.
    "ac2_nstep_critic": ["critic.batch_size=64"],
    "ppo_gae": ["critic.batch_size=16"],
    "brace": ["critic.batch_size=16"],
    "rfpo": ["estimator.rfpo_num_labelled=36"],
}
# The others start from the trained value head, which these cannot: the head is of another kind, or there is none.
WITHOUT_CRITIC = ("ac2_soft_value", "ac2_two_hot")


def num_steps(name: str) -> int:
    """AC2's first step knows no prefix, its second no ready problem."""
    return 3 if name.startswith("ac2") else 2


@pytest.fixture(scope="module")
def run(launcher: Launcher, reader: Path, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Name of an overlay -> its run on one rank, made once. The next overlay's begins meanwhile: most will be asked for
    in order, and one rank leaves a core idle."""
    started: dict[str, tuple[int, Path]] = {}
    made: dict[str, Run] = {}

    def start(name: str) -> None:
        run_dir = tmp_path_factory.mktemp(name) / "run"
        changes = [f"run.num_steps={num_steps(name)}", "data.validation=null", *CHANGES.get(name, [])]
        changes += [f"sampling.num_prefixes={AC2_GROUPS}"] * name.startswith("ac2")
        changes += [launcher.critic] * (name not in WITHOUT_CRITIC)
        changes += [f"model.path={reader}"] * (name == "ac2_soft_value")
        started[name] = launcher.start(run_dir, str(ALGORITHMS / f"{name}.yaml"), *changes, num_ranks=1), run_dir

    def run_once(name: str) -> Run:
        for wanted in OVERLAYS[OVERLAYS.index(name) :][:2]:
            if wanted not in started:
                start(wanted)
        if name not in made:
            job, run_dir = started[name]
            launcher.server.wait(job).passed()
            made[name] = Run(steps(run_dir), run_dir)
        return made[name]

    return run_once


@pytest.mark.parametrize("name", OVERLAYS)
def test_an_overlay_runs_and_its_numbers_are_sound(name: str, run: Runs) -> None:
    rows = run(name).rows
    assert len(rows) == num_steps(name)
    for row in rows:
        assert math.isfinite(row["actor/loss"]) and math.isfinite(row["actor/grad_norm"])
        assert row["actor/ratio_error_first"] < 1e-6 and 0 < row["mismatch/ess"] <= 1 + 1e-9
        assert (row["mismatch/logprob_abs_max"] > 1e-3) == (name in MISMATCHED)
        assert math.isfinite(row.get("critic/loss", 0.0))
        assert ("critic/invalid_probe" in row) == name.startswith(("ac2", *COMPANIONS))
        assert (row["train/reward"] is None) == (not takes_fresh_rollouts(name, row))


COMPANIONS = (*MISMATCHED, "reference_kl", "asympo", "filtered_sampling")  # which run on top of AC2 here


def takes_fresh_rollouts(name: str, row: Row) -> bool:
    if name == "ac2_stale_replay":
        return row["step"] % 2 == 0
    return name.startswith(("ac2", "prefix_grpo", *COMPANIONS))


def test_ac2_trusts_its_critic_on_ready_problems(run: Runs) -> None:
    last = run("ac2").last
    assert last["readiness/ready_fraction"] == 0.5  # 4 of the 8 problems that the buffer holds by now
    assert last["readiness/audits"] == 1 and last["train/groups"] == AC2_GROUPS
    assert last["share/chunk_end"] > 0 and last["critic/endpoint_share"] > 0


def test_singletons_stand_in_the_place_of_chunk_groups(run: Runs) -> None:
    """Of four ready slots one is an audit; the other three become four groups of one chunk each."""
    assert run("ac2_singleton").last["train/groups"] == AC2_GROUPS - 3 + 3 * MEMBERS


def test_without_audits_every_ready_slot_gets_a_chunk(run: Runs) -> None:
    last = run("ac2_no_audits").last
    assert last["readiness/audits"] == 0 and last["readiness/ready_fraction"] > 0 and last["share/chunk_end"] > 0
    assert last["critic/audit_mae"] is None


def test_stale_replay_is_filled_at_once_and_replaced_whole(run: Runs) -> None:
    versions = run("ac2_stale_replay").state["replay"]["versions"].tolist()
    assert versions == [2] * 2 * NUM_FRESH  # two steps' worth, sampled at steps 0 and 2


def test_correct_only_replay_stores_no_wrong_rollout(run: Runs) -> None:
    found = run("ac2_correct_only")
    rewards = found.state["replay"]["rewards"]
    num_correct = sum(round(row["train/reward"] * NUM_FRESH) for row in found.rows)
    assert len(rewards) == num_correct < NUM_FRESH * len(found.rows) and (rewards >= 6 / 7).all()


def test_the_global_gate_alone_makes_every_problem_ready(run: Runs) -> None:
    assert run("ac2_global_only").last["readiness/ready_fraction"] == 1


def test_a_terminal_gate_does_not_see_errors_against_bootstrapped_targets(run: Runs) -> None:
    blind, seeing = run("ac2_terminal_gate").last, run("ac2").last
    assert "critic/error_bootstrapped" in blind or "critic/error_mixed" in blind
    assert blind["readiness/global_error"] == pytest.approx(blind["critic/error_terminal"])
    assert seeing["readiness/global_error"] != pytest.approx(seeing["critic/error_terminal"])


def test_a_failed_audit_demotes_its_problem(run: Runs) -> None:
    assert run("ac2_audit_demotion").last["readiness/demoted"] >= 1
    assert run("ac2").last["readiness/demoted"] == 0


def test_chunk_length_and_cut_grid_are_apart(run: Runs) -> None:
    short, fine = run("ac2_short_chunks"), run("ac2_fine_cuts")
    assert short.last["share/chunk_end"] > 0 and fine.last["share/chunk_end"] > 0
    assert short.last["train/chunk_len"] < run("ac2").last["train/chunk_len"]
    assert not (short.target_lengths % 6).any() and not (fine.target_lengths % 3).any()
    assert (fine.target_lengths % 6).any()


def test_a_soft_value_is_off_the_grid(run: Runs) -> None:
    found = run("ac2_soft_value")
    assert found.last["critic/invalid_probe"] < 1
    errors = np.array([*found.state["readiness"]["last_error"].values()])  # |V - z| with z on the grid
    assert (np.abs(10 * errors - np.round(10 * errors)) > 1e-4).any()


def test_references_are_prompts_of_their_own(run: Runs) -> None:
    """Eight targets at the second step; every problem has a reference, for any rollout of the first becomes one."""
    labels = {name: run(name).rows[1]["critic/num_labels"]
              for name in ("ac2", "ac2_no_references", "ac2_reference_only_prompts")}  # fmt: skip
    assert labels == {"ac2": 16, "ac2_no_references": 8, "ac2_reference_only_prompts": 8}
    losses = [run(name).rows[1]["critic/loss"] for name in labels]
    assert len(set(losses)) == 3


def test_a_two_hot_head_starts_from_the_uniform_distribution(run: Runs) -> None:
    """Over eleven values: ln 11 = 2.40; a bounded scalar would start below ln 2 = 0.69."""
    assert run("ac2_two_hot").rows[1]["critic/loss"] == pytest.approx(math.log(11), abs=0.5)


def test_nstep_targets_are_as_many_as_chunk_boundaries(run: Runs) -> None:
    """A prefix a group and every boundary inside its members: more than the buffer's 8 pairs under two prompts."""
    assert run("ac2_nstep_critic").rows[1]["critic/num_labels"] > 16


def test_prefix_grpo_replays_prefixes_and_has_no_critic(run: Runs) -> None:
    assert all(row["share/chunk_end"] == 0 and "critic/loss" not in row for row in run("prefix_grpo").rows)
    assert run("prefix_grpo").rows[1]["train/chunk_len"] < run("prefix_grpo").rows[0]["train/chunk_len"]


def test_baselines_differ_by_their_advantages_on_the_same_first_rollouts(run: Runs) -> None:
    """Rewards are 0 or 1. Leave-one-out in a group of 4 is 4/3 of value minus mean, a deviation at most 1 / sqrt(3)."""
    plain, by_std, rloo = (run(name).rows[0]["train/advantage_abs"] for name in ("dr_grpo", "grpo", "rloo"))
    assert plain > 0 and rloo == pytest.approx(4 / 3 * plain, rel=1e-5) and by_std >= 1.73 * plain


def test_a_reference_model_is_left_behind(run: Runs) -> None:
    """Means over a step's two minibatches: the very first is still the reference itself."""
    for name in ("grpo", "reference_kl"):
        first, second = (row["actor/reference_kl"] for row in run(name).rows)
        assert 0 < first < second


def test_dapo_discards_groups_that_teach_nothing(run: Runs) -> None:
    rows = run("dapo").rows
    assert sum(row["train/discarded_groups"] for row in rows) > 0
    assert all((row["train/groups"] + row["train/discarded_groups"]) % GROUPS == 0 for row in rows)


def test_clips_are_the_algorithms_own(run: Runs) -> None:
    bounds = {"grpo": 0.2, "dapo": 0.28, "gspo": 4e-4, "cispo": 4.0, "ppo_gae": 0.2, "ac2": 0.28}
    for name, bound in bounds.items():
        row = run(name).rows[0]
        if name != "ac2":
            assert row["actor/clip_high"] == bound and "actor/dual_clip" not in row
        assert 0 <= row["actor/clip_fraction_high"] <= 1 and row["actor/ratio"] == pytest.approx(1, abs=0.05)
    for name in ("rloo", "asympo", "score_centering"):
        assert not {"actor/ratio", "actor/clip_fraction_low", "actor/clip_fraction_high"} & run(name).rows[0].keys()


@pytest.mark.parametrize("name", MISMATCHED)
def test_weights_for_the_engine_s_mismatch(name: str, run: Runs) -> None:
    for row in run(name).rows:
        kinds = {key for key in row if key.startswith("actor/importance_")}
        if name in ("score_centering", "score_centering_clip"):
            assert not kinds
            continue
        extra = {"tis": "truncated", "mis": "rejected", "ion": "rejected"}.get(name[-3:])
        assert kinds == {"actor/importance_weight"} | ({f"actor/importance_{extra}"} if extra else set())
        weight = row["actor/importance_weight"]
        assert 0 <= weight <= 2 and weight != 1
        if name == "geometric_rejection":
            assert row["actor/importance_rejected"] > 0 and weight == pytest.approx(
                1 - row["actor/importance_rejected"], abs=1e-6
            )


@pytest.mark.parametrize("name", [name for name in OVERLAYS if name.startswith("score_centering")])
def test_score_centering_sees_most_of_the_distribution(name: str, run: Runs) -> None:
    for row in run(name).rows:
        assert 0.9 < row["actor/head_mass_q"] <= 1 + 1e-5 and 0.9 < row["actor/head_mass_p"] <= 1 + 1e-5
    assert ("actor/clip_fraction_high" in run(name).last) == (name == "score_centering_clip")


def test_asympo_reports_where_its_floor_stood(run: Runs) -> None:
    assert all(0 <= row["actor/nll_floored"] <= 1 for row in run("asympo").rows)


@pytest.mark.parametrize("name", ["ppo_gae", "brace"])
def test_a_token_level_critic_learns_at_every_token_from_the_first_step(name: str, run: Runs) -> None:
    for row in run(name).rows:
        assert row["critic/num_labels"] == GROUPS * MEMBERS * row["train/chunk_len"]
        assert row["critic/stepped"] == 1 and row["critic/loss"] >= 0


def test_rfpo_calibrates_a_frozen_critic_once(run: Runs) -> None:
    found = run("rfpo")
    assert all("critic/loss" not in row for row in found.rows)
    calibration = found.state["calibration"]
    assert calibration["edges"].shape == (9,) and math.isfinite(calibration["threshold"])
    # Its 36 labelled rollouts were decoded too, before the first step's own.
    own = GROUPS * MEMBERS * found.rows[0]["train/chunk_len"]
    assert found.rows[0]["perf/generated_tokens"] >= own + 36


def test_the_trainer_renormalises_over_what_the_filter_left(run: Runs) -> None:
    """top-p leaves few tokens where the policy is sure; without it the engine's log-probs would be lower."""
    filtered, plain = run("filtered_sampling").rows[0], run("ac2").rows[0]
    assert filtered["mismatch/logprob_abs_max"] < 1e-3 and filtered["actor/entropy"] != plain["actor/entropy"]
