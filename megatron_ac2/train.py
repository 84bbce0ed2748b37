"""Train: `python -m megatron_ac2.train CONFIG.yaml [section.field=value ...]`, alone or under torchrun.

`run` is the whole story of a run, `train_step` that of a step (docs/ALGORITHM.md §3); what they call does one thing.
"""

from __future__ import annotations

import sys
from pathlib import Path

from megatron_ac2.algorithm.sampling import choose_prefixes, fresh_prefixes, route
from megatron_ac2.config import Config
from megatron_ac2.config_file import load_config, to_dict, to_yaml, warnings_for
from megatron_ac2.credit import Credit, assign_credit, reference_candidates, train_sequences
from megatron_ac2.engine.reshard import publish
from megatron_ac2.entry import run_entry_point
from megatron_ac2.evaluate import evaluate
from megatron_ac2.learn import update_actor_and_critic
from megatron_ac2.metrics import MetricsWriter
from megatron_ac2.parallel.collectives import all_ranks_agree
from megatron_ac2.parallel.topology import shutdown
from megatron_ac2.parts import Parts, build, load_latest, save
from megatron_ac2.perf import PhaseTimer
from megatron_ac2.random_streams import stream
from megatron_ac2.report import starting_costs, step_metrics
from megatron_ac2.rollout import Rollout, grade_responses, sample_step
from megatron_ac2.state import RunState
from megatron_ac2.types import Continuation, Problem, UserError


def main() -> int:
    if len(sys.argv) < 2:
        raise UserError("usage: python -m megatron_ac2.train CONFIG.yaml [section.field=value ...]")
    run(load_config(sys.argv[1], sys.argv[2:]))
    return 0


def run(config: Config) -> RunState:
    """From a checked configuration to the last checkpoint; resumes from the latest one in `run.dir`."""
    parts, state = build(config)
    load_latest(parts, state, config)
    writer = _open_writer(parts, state, config)
    timer = PhaseTimer(show=writer.phase)
    publish(parts.actor.model, parts.hf_config, parts.topology, parts.engine, state.next_step)
    timer.reset()
    while (step := state.next_step) < config.run.num_steps:
        metrics = _evaluate_if_due(parts, state, config, timer)
        metrics |= starting_costs(config) if step == 0 else {}
        metrics |= train_step(parts, state, config, step, timer)
        state.next_step = step + 1
        # Before the checkpoint, whose seconds count in the next row: a crash between the two must lose no row.
        writer.write(step, metrics | timer.metrics())
        timer.reset()
        if state.next_step == config.run.num_steps or _is_due(config.run.checkpoint_every, state.next_step):
            with timer.phase("checkpoint"):
                save(parts, state, config)
    if metrics := _evaluate_if_due(parts, state, config, timer, last=True):
        writer.write(state.next_step, metrics)
    writer.close()
    shutdown()
    return state


def train_step(parts: Parts, state: RunState, config: Config, step: int, timer: PhaseTimer) -> dict[str, float]:
    """One step of AC2, or of a baseline: which one is a matter of `sampling.routing`."""
    with timer.phase("sample"):
        fresh, continuations = plan_step(state, config, step)
        rollout = sample_step(
            parts.engine, state.stream.by_id, fresh, continuations,
            response_budget=config.sampling.response_budget, temperature=config.sampling.temperature,
            seed=config.run.seed, step=step,
        )  # fmt: skip
    with timer.phase("credit"):
        credit = assign_credit(
            rollout, state.stream.by_id, state.references, parts.critic,
            lambda items: grade_responses(parts.grader, parts.tokenizer, items, parts.topology), parts.decode,
            chunk_len=config.sampling.chunk_len, min_valid=config.replay.min_valid_for_target, version=step,
        )  # fmt: skip
        all_ranks_agree(
            (credit.endpoints.value.tobytes(), credit.probes.value.tobytes(), sorted(state.readiness.ready)),
            f"values of step {step}",
        )
        ready_before = state.readiness.ready
        remember(state, rollout, credit, config, step)
    with timer.phase("train"):
        sequences = train_sequences(rollout.groups, credit, state.stream.by_id)
        learned = update_actor_and_critic(parts.actor, parts.critic, state, sequences, config, step)
    with timer.phase("reshard"):
        synced = publish(parts.actor.model, parts.hf_config, parts.topology, parts.engine, step + 1)
    return step_metrics(rollout, credit, state, ready_before, parts, timer, sequences) | learned | synced


def plan_step(state: RunState, config: Config, step: int) -> tuple[list[Problem], list[Continuation]]:
    """Which problems are rolled out afresh, and which prefixes are continued how far."""
    sampling, seed = config.sampling, config.run.seed
    if sampling.routing == "grpo":
        fresh: list[Problem] = []
        prefixes = fresh_prefixes(
            [problem.problem_id for problem in state.stream.take(sampling.num_prefixes)], sampling.num_prefixes
        )
    else:
        fresh = state.stream.take(sampling.num_fresh)
        replayed = state.replay.by_problem()
        prefixes = (
            choose_prefixes(replayed, sampling.num_prefixes, sampling.cut_grid, sampling.cut_max_fraction,
                            stream(seed, "prefixes", step))
            if replayed
            else fresh_prefixes([problem.problem_id for problem in fresh], sampling.num_prefixes)
        )  # fmt: skip
    continuations = route(
        prefixes, state.readiness.ready, audit_fraction=sampling.audit_fraction, chunk_len=sampling.chunk_len,
        response_budget=sampling.response_budget, group_size=sampling.group_size, rng=stream(seed, "audits", step),
        routing=sampling.routing,
    )  # fmt: skip
    return fresh, continuations


def remember(state: RunState, rollout: Rollout, credit: Credit, config: Config, step: int) -> None:
    """Readiness first, against the reference bank as it was; then references, targets, and replay for the next step."""
    state.readiness.update(credit.records, state.references.problem_ids())
    candidates = reference_candidates(rollout, credit, config.readiness.reference_min_reward)
    state.references.add(candidates, stream(config.run.seed, "references", step))
    state.targets.add(credit.targets)
    state.replay.add(credit.fresh)


def _evaluate_if_due(
    parts: Parts, state: RunState, config: Config, timer: PhaseTimer, last: bool = False
) -> dict[str, float]:
    """The row of step s holds the score of the weights after s updates, and what these had cost in decoding."""
    due = state.next_step == 0 or last or _is_due(config.evaluation.every, state.next_step)
    if not parts.validation or not due:
        return {}
    with timer.phase("evaluate"):
        scores = evaluate(
            parts.engine, parts.validation, parts.grader, parts.tokenizer, parts.topology, config.evaluation,
            response_budget=config.sampling.response_budget, seed=config.run.seed,
        )  # fmt: skip
    return scores | {"evaluation/decoding_flops": state.counters.decoding_flops}


def _is_due(every: int, step: int) -> bool:
    return every > 0 and step % every == 0


def _open_writer(parts: Parts, state: RunState, config: Config) -> MetricsWriter:
    run_dir = Path(config.run.dir)
    text = to_yaml(config)
    writer = MetricsWriter(
        run_dir, parts.topology.rank, config.run.num_steps, tensorboard=config.run.tensorboard,
        wandb=config.run.wandb, resume_step=state.next_step, config=to_dict(config),
    )  # fmt: skip
    if parts.topology.rank == 0:
        (run_dir / "config.yaml").write_text(text)
        writer.say(text)
        for warning in warnings_for(config):
            writer.say(f"warning: {warning}")
        if state.next_step:
            writer.say(f"resumed from the checkpoint after step {state.next_step} in {run_dir}")
    return writer


if __name__ == "__main__":
    run_entry_point(main)
