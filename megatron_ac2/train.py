"""Train: `python -m megatron_ac2.train CONFIG.yaml [OVERLAY.yaml ...] [section.field=value ...]`, or under torchrun.

`run` is the whole story of a run, `train_step` that of a step (docs/ALGORITHM.md §3); what they call does one thing.
"""

from __future__ import annotations

import sys
from pathlib import Path

from megatron_ac2.collect import calibrate, collect
from megatron_ac2.config import Config
from megatron_ac2.config_checks import warnings_for
from megatron_ac2.config_file import load_config, split_arguments, to_dict, to_yaml
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
from megatron_ac2.rollout import GradeCache, Rollout
from megatron_ac2.state import RunState
from megatron_ac2.token_credit import TOKEN_ESTIMATORS, assign_token_credit, nstep_examples
from megatron_ac2.types import DenseExample, TrainSequence


def main() -> int:
    run(load_config(*split_arguments(sys.argv[1:])))
    return 0


def run(config: Config) -> RunState:
    """From a checked configuration to the last checkpoint; resumes from the latest one in `run.dir`."""
    parts, state = build(config)
    load_latest(parts, state, config)
    writer = _open_writer(parts, state, config)
    timer = PhaseTimer(show=writer.phase)
    publish_weights(parts, config, state.next_step)
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
                save(parts, state)
    if metrics := _evaluate_if_due(parts, state, config, timer, last=True):
        writer.write(state.next_step, metrics)
    parts.saver.wait()
    writer.close()
    shutdown()
    return state


def train_step(parts: Parts, state: RunState, config: Config, step: int, timer: PhaseTimer) -> dict[str, float]:
    """One step of AC2, or of a baseline: which one is a matter of `sampling.routing` and `estimator.kind`."""
    grade = GradeCache(lambda items: parts.grade(items, config.data.reward_range))
    if config.estimator.kind == "rfpo" and state.calibration is None:
        with timer.phase("calibrate"):
            calibrate(parts, state, config, grade)
    with timer.phase("sample"):
        rollout = collect(parts, state, config, step, grade)
    if config.critic.kind == "value_head":  # it values with the trainer, a generative one with the engine
        take_turn(parts, config, step, timer)
    with timer.phase("credit"):
        chunk_critic = parts.critic if config.sampling.routing == "ac2" else None
        credit = assign_credit(
            rollout, state.stream.by_id, state.references, chunk_critic, grade, parts.decode, config,
            version=parts.engine.version,
        )  # fmt: skip
        all_ranks_agree(
            (credit.endpoints.value.tobytes(), credit.probes.value.tobytes(), sorted(state.readiness.ready)),
            f"values of step {step}",
        )
        sequences, examples = refine_credit(rollout, credit, parts, state, config, step)
        trusted = state.readiness.ready_among([g.continuation.prefix.problem_id for g in rollout.groups])
        remember(state, rollout, credit, config, step)
    take_turn(parts, config, step, timer)
    with timer.phase("train"):
        learned = update_actor_and_critic(parts.actor, parts.critic, state, sequences, config, step, examples)
    with timer.phase("reshard"):
        synced = pass_turn(parts, config, step)
    return step_metrics(rollout, credit, state, trusted, parts, timer, sequences, step) | learned | synced


def take_turn(parts: Parts, config: Config, step: int, timer: PhaseTimer) -> None:
    """The trainer's on the device, if it has not got it."""
    if config.run.offload != "none":
        with timer.phase("offload"):
            parts.turns.train(publish_follows=_is_due(config.engine.publish_every, step + 1))


def pass_turn(parts: Parts, config: Config, step: int) -> dict[str, float]:
    """The engine's again, with the weights after this step where they are due; metrics of how they got there."""
    if _is_due(config.engine.publish_every, step + 1):
        return publish_weights(parts, config, step + 1)
    parts.turns.generate()
    return {}


def refine_credit(
    rollout: Rollout, credit: Credit, parts: Parts, state: RunState, config: Config, step: int
) -> tuple[list[TrainSequence], list[DenseExample] | None]:
    """What the actor is trained on, and what the critic learns from instead of its target buffer (None: the buffer)."""
    books = (state.stream.by_id, state.references)
    sequences = train_sequences(rollout.groups, credit, state.stream.by_id)
    if config.estimator.kind in TOKEN_ESTIMATORS:
        refined = assign_token_credit(
            rollout.groups, sequences, credit, *books, parts.critic, parts.actor, config, step=step,
            calibration=state.calibration,
        )  # fmt: skip
        return refined.sequences, refined.examples
    if config.critic.fit == "nstep" and parts.critic is not None:
        return sequences, nstep_examples(rollout.groups, credit, *books, parts.critic, config)
    return sequences, None


def remember(state: RunState, rollout: Rollout, credit: Credit, config: Config, step: int) -> None:
    """Readiness first, against the reference bank as it was; then references, targets, and replay for the next step."""
    state.readiness.update(credit.records, state.references.problem_ids())
    candidates = reference_candidates(rollout, credit, config.readiness.reference_min_reward)
    state.references.add(candidates, stream(config.run.seed, "references", step))
    if config.replay.max_target_age is not None:
        state.targets.drop_older_than(step - config.replay.max_target_age)
    state.targets.add(credit.targets)
    state.replay.add(credit.fresh)


def publish_weights(parts: Parts, config: Config, version: int) -> dict[str, float]:
    parts.turns.before_publish()
    return publish(
        parts.actor.model, parts.hf_config, parts.topology, parts.engine, version, rounding=config.engine.rounding,
        loaded=parts.turns.after_publish,
    )  # fmt: skip


def _evaluate_if_due(
    parts: Parts, state: RunState, config: Config, timer: PhaseTimer, last: bool = False
) -> dict[str, float]:
    """The row of step s holds the score of the weights after s updates, and what these had cost in decoding."""
    due = state.next_step == 0 or last or _is_due(config.evaluation.every, state.next_step)
    if not parts.validation or not due:
        return {}
    with timer.phase("evaluate"):
        if parts.engine.version != state.next_step:  # engine.publish_every: at the end of a run only
            publish_weights(parts, config, state.next_step)
        scores = evaluate(
            parts.engine, parts.validation, parts.grader, parts.tokenizer, parts.topology, config.evaluation,
            response_budget=config.sampling.response_budget, seed=config.run.seed,
            reward_range=config.data.reward_range,
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
        for warning in (*warnings_for(config), *parts.warnings):
            writer.say(f"warning: {warning}")
        if state.next_step:
            writer.say(f"resumed from the checkpoint after step {state.next_step} in {run_dir}")
    return writer


if __name__ == "__main__":
    run_entry_point(main)
