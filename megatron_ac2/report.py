"""The numbers of a step that every run reports (docs/ALGORITHM.md §6), under the names of metrics.METRICS."""

from __future__ import annotations

import json
from collections.abc import Sequence, Set
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from megatron_ac2.algorithm.calibration import (
    bias,
    expected_calibration_error,
    explained_variance,
    mean_absolute_error,
    reliability,
)
from megatron_ac2.algorithm.readiness import errors_by_tag
from megatron_ac2.config import Config
from megatron_ac2.credit import Credit
from megatron_ac2.metrics import invalid_rate, share
from megatron_ac2.perf import DecodingCost, PhaseTimer, memory_metrics
from megatron_ac2.rollout import Rollout
from megatron_ac2.state import Counters, RunState
from megatron_ac2.types import TrainSequence

if TYPE_CHECKING:  # the supervised stage reads COST_FILE here, and needs no engine
    from megatron_ac2.parts import Parts

COST_FILE = "training_cost.json"


def step_metrics(
    rollout: Rollout,
    credit: Credit,
    state: RunState,
    ready_before: Set[str],
    parts: Parts,
    timer: PhaseTimer,
    sequences: Sequence[TrainSequence],
    step: int,
) -> dict[str, float]:
    """Counts what was sampled into `state.counters` and returns the step's row. Equal on every rank but for times."""
    lengths = request_lengths(rollout)
    new_tokens = count_decoding(state.counters, parts.decoding_cost, lengths)
    trained_tokens = sum(len(sequence.token_ids) for sequence in sequences)
    chunks = [chunk for group in rollout.groups for chunk in group.chunks]
    row = {
        "train/reward": _mean([trajectory.reward for trajectory in credit.fresh]),
        "train/endpoint_value": _mean(credit.endpoints.value[credit.endpoints.present]),
        "train/advantage_abs": _mean([float(np.abs(sequence.advantages).mean()) for sequence in sequences]),
        "train/chunk_len": _mean([len(chunk.token_ids) for chunk in chunks]),
        "train/groups": float(len(rollout.groups)),
        "train/discarded_groups": float(len(rollout.discarded)),
        "train/version_lag": _mean([step - float(chunk.versions.mean()) for chunk in chunks]),
        "train/grader_failures": _mean([not grade.valid for grade in credit.grades.values()]),
        "perf/decoding_flops": state.counters.decoding_flops,
        "perf/generated_tokens": float(state.counters.generated_tokens),
        "perf/prefill_tokens": float(state.counters.prefill_tokens),
        "perf/generation_tokens_per_s": timer.tokens_per_second(new_tokens, "sample"),
        "perf/training_tokens_per_s": timer.tokens_per_second(trained_tokens, "train"),
        **memory_metrics(),
        **{f"share/{stop}": value for stop, value in stop_shares(rollout).items()},
    }
    # An estimator that works by token asks no value of a prefix, and trusts no problem to the critic.
    return row | critic_metrics(rollout, credit, state, ready_before) if len(credit.probes.value) else row


def count_decoding(counters: Counters, cost: DecodingCost, lengths: Sequence[tuple[int, int]]) -> int:
    """Add requests of (prompt + prefix, new) tokens to the run's totals; the number of new tokens."""
    new_tokens = sum(num_new for _, num_new in lengths)
    counters.decoding_flops += cost.total(lengths)
    counters.generated_tokens += new_tokens
    counters.prefill_tokens += sum(num_context for num_context, _ in lengths)
    return new_tokens


def critic_metrics(rollout: Rollout, credit: Credit, state: RunState, ready_before: Set[str]) -> dict[str, float]:
    modes = [group.continuation.mode for group in rollout.groups]
    problem_ids = [group.continuation.prefix.problem_id for group in rollout.groups]
    from_critic, present = credit.endpoints.from_critic, credit.endpoints.present
    audit_values, audit_rewards = (np.array(column) for column in (zip(*credit.audits) if credit.audits else ((), ())))
    return {
        "readiness/ready_fraction": share([problem_id in ready_before for problem_id in problem_ids]),
        "readiness/ready_problems": float(len(state.readiness.ready)),
        "readiness/global_error": state.readiness.global_error,
        "readiness/audits": float(modes.count("audit")),
        "readiness/demoted": float(len(state.readiness.demoted)),
        "critic/endpoint_share": share(from_critic[present]),
        "critic/invalid_probe": invalid_rate(credit.probes.valid),
        "critic/invalid_endpoint": invalid_rate(credit.endpoints.valid[from_critic]),
        "critic/audit_mae": mean_absolute_error(audit_values, audit_rewards),
        "critic/audit_bias": bias(audit_values, audit_rewards),
        "critic/num_targets": float(len(state.targets)),
        "critic/references": float(len(state.references)),
        **{f"critic/error_{tag}": error for tag, error in errors_by_tag(credit.records).items()},
        **{f"critic/{name}": value for name, value in probe_calibration(credit).items()},
    }


def probe_calibration(credit: Credit) -> dict[str, float]:
    """How good V(s) is against the targets that rewards alone made: a bootstrapped target would flatter it."""
    pairs = [
        (record.probe_value, target.value)
        for record, target in zip(credit.records, credit.targets, strict=True)
        if record.probe_valid and record.tag == "terminal"
    ]
    values, outcomes = (np.array(column) for column in zip(*pairs)) if pairs else (np.zeros(0), np.zeros(0))
    bins = reliability(values, outcomes)
    return {
        "probe_bias": bias(values, outcomes),
        "explained_variance_terminal": explained_variance(values, outcomes),
        "calibration_error": expected_calibration_error(values, outcomes),
        **{f"reliability/{low:.1f}-{high:.1f}": outcome for low, high, count, _, outcome in bins if count},
    }


def request_lengths(rollout: Rollout) -> list[tuple[int, int]]:
    """(prompt + prefix, new tokens) of every request that counts as decoding: fresh rollouts and all groups."""
    lengths = [(len(problem.prompt_ids), len(sample.token_ids)) for problem, sample in rollout.fresh]
    for group in (*rollout.groups, *rollout.discarded):
        context = group.num_context
        lengths += [(context, len(chunk.token_ids)) for chunk in group.chunks]
    return lengths


def stop_shares(rollout: Rollout) -> dict[str, float]:
    stops = [chunk.stop for group in rollout.groups for chunk in group.chunks]
    return {stop: stops.count(stop) / max(len(stops), 1) for stop in ("chunk_end", "eos", "budget")}


def starting_costs(config: Config) -> dict[str, float]:
    """Tokens that a supervised stage of ours spent on what this run starts from; no part of its decoding FLOPs."""
    folders = {"actor": config.model.path, "critic": config.critic.path}
    files = {role: Path(folder) / COST_FILE for role, folder in folders.items() if folder}
    return {
        f"start/{role}_sft_tokens": float(json.loads(file.read_text())["tokens"])
        for role, file in files.items()
        if file.is_file()
    }


def _mean(values: Sequence[float] | np.ndarray) -> float:
    return float(np.mean(values)) if len(values) else float("nan")
