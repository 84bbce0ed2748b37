"""The update of one step: actor minibatch 1, critic, the actor's other minibatches (docs/ALGORITHM.md §3, item 10)."""

from __future__ import annotations

import math
from collections.abc import Sequence

from megatron_ac2.config import Config
from megatron_ac2.random_streams import stream
from megatron_ac2.state import RunState
from megatron_ac2.training.actor import Actor
from megatron_ac2.training.mismatch import score_metrics
from megatron_ac2.types import Critic, CriticExample, CriticState, CriticTarget, DenseExample, TrainSequence


def update_actor_and_critic(
    actor: Actor,
    critic: Critic | None,
    state: RunState,
    sequences: Sequence[TrainSequence],
    config: Config,
    step: int,
    examples: Sequence[DenseExample] | None = None,
) -> dict[str, float]:
    """All of the step's optimizer updates. A collective.

    The whole batch is scored before any update, so that every minibatch's proximal log-probs are those of the weights
    before this step, and the clip works against them. `examples`: what the critic learns from in place of the
    critic-target buffer, where the estimator has targets of its own (none of them: the critic stays as it is).
    """
    count = config.actor.num_minibatches
    bounds = [len(sequences) * index // count for index in range(count + 1)]
    minibatches = [actor.pack_minibatch(sequences[first:last]) for first, last in zip(bounds[:-1], bounds[1:])]
    scored = score_metrics([actor.score(minibatch) for minibatch in minibatches])
    if config.entropy.enabled:
        state.entropy_clip.update(scored["empty_prefix_entropy"])
    clip_high = config.actor.clip_high + (state.entropy_clip.k if config.entropy.enabled else 0.0)
    updates, criticised = [], {}
    for minibatch in minibatches:
        updates.append(actor.update(minibatch, clip_high))
        if critic is not None and len(updates) == 1:
            criticised = update_critic(critic, state, config, step, examples)
    if criticised:
        _control_critic_lr(critic, state, criticised, [update["update_norm"] for update in updates])
    return _actor_metrics(scored, updates, clip_high) | {f"critic/{k}": v for k, v in criticised.items()}


def update_critic(
    critic: Critic, state: RunState, config: Config, step: int, examples: Sequence[DenseExample] | None = None
) -> dict[str, float]:
    """`updates_per_step` updates, each on a batch of its own draw. Empty when there is nothing to learn from."""
    available = len(state.targets) if examples is None else len(examples)
    metrics: dict[str, float] = {}
    squared_norm = 0.0
    for index in range(config.critic.updates_per_step if available else 0):
        draw = stream(config.run.seed, "targets", step, index)
        if examples is None:
            targets = state.targets.sample(config.critic.batch_size, draw)
            metrics = critic.update([e for target in targets for e in _examples_of(target, state, config)])
        else:
            picks = draw.choice(available, min(config.critic.batch_size, available), replace=False)
            metrics = critic.update_dense([examples[pick] for pick in picks])
        squared_norm += metrics["update_norm"] ** 2
        if not math.isfinite(metrics["loss"]):
            break  # the learning rate is halved for it, which a later finite loss would hide
    return metrics | {"update_norm": math.sqrt(squared_norm)} if metrics else {}


def _examples_of(target: CriticTarget, state: RunState, config: Config) -> list[CriticExample]:
    """A pair whose problem has a reference is learnt with and without it, at weight 1/2 each."""
    problem = state.stream.by_id[target.problem_id]
    reference = state.references.get(target.problem_id) if config.critic.use_references else None
    plain = CriticState(problem, target.response_ids, None)
    if reference is None:
        return [CriticExample(plain, target.value, 1.0)]
    privileged = CriticState(problem, target.response_ids, reference)
    if config.critic.reference_prompts == "reference_only":
        return [CriticExample(privileged, target.value, 1.0)]
    return [CriticExample(plain, target.value, 0.5), CriticExample(privileged, target.value, 0.5)]


def _control_critic_lr(
    critic: Critic, state: RunState, metrics: dict[str, float], actor_norms: Sequence[float]
) -> None:
    """The rate that this step's norms leave for the next update; a non-finite loss halves it at once."""
    if not math.isfinite(metrics["loss"]):
        state.critic_lr.observe_non_finite()
    else:
        state.critic_lr.observe(metrics["update_norm"], actor_norms)
    metrics["lr"] = state.critic_lr.lr
    critic.optimizer.set_lr(state.critic_lr.lr)


def _actor_metrics(scored: dict[str, float], updates: Sequence[dict[str, float]], clip_high: float) -> dict[str, float]:
    """Means over the minibatches, but for totals and extremes: the first one's clip fractions alone are always 0."""
    renamed = {"clip_low": "clip_fraction_low", "clip_high": "clip_fraction_high"}  # "clip_high" is the bound itself
    names = dict.fromkeys(name for update in updates for name in update)
    columns = {name: [update[name] for update in updates if name in update] for name in names}
    means = {f"actor/{renamed.get(name, name)}": sum(column) / len(column) for name, column in columns.items()}
    metrics = means | {
        "actor/entropy": scored["entropy"],
        "actor/entropy_empty_prefix": scored["empty_prefix_entropy"],
        "actor/clip_high": clip_high,
        "actor/grad_norm": max(columns["grad_norm"]),
        "actor/update_norm": sum(columns["update_norm"]),
        "actor/num_tokens": sum(columns.get("num_tokens", [])),
    }
    names = {
        "mean_abs": "logprob_abs_mean", "max_abs": "logprob_abs_max", "k1": "kl_k1", "k3": "kl_k3", "ess": "ess",
        "ratio_above_2": "ratio_above_2", "ratio_below_half": "ratio_below_half",
    }  # fmt: skip
    names |= {"rerouted": "rerouted"} if "mismatch/rerouted" in scored else {}
    return metrics | {f"mismatch/{new}": scored[f"mismatch/{old}"] for old, new in names.items()}
