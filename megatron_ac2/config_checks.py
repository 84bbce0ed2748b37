"""What makes a configuration impossible and can be seen without a file or a model: combinations of fields."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from megatron_ac2.config import Config
from megatron_ac2.config_values import get, shown, value_problems

_RATIO_LOSSES = ("ppo", "cispo", "gspo")
_TOKEN_ESTIMATORS = ("gae", "brace", "rfpo")
_TOKEN_WEIGHTS = ("none", "token_is", "token_tis", "token_mis")


@dataclass(frozen=True, slots=True)
class Rule:
    """`field` must not hold what it holds when `broken`; `text` may name other fields as {c.section.field}."""

    field: str
    broken: Callable[[Config], bool]
    text: str

    def message(self, config: Config) -> str:
        return f"{self.field}: found {shown(get(config, self.field))}, {self.text.format(c=config)}"


def _off_beat(period: int, c: Config) -> bool:
    return c.engine.publish_every > 1 and period % c.engine.publish_every != 0


def _entropy_range(c: Config) -> tuple[float, float]:
    """What entropy control may add to clip_high."""
    return (c.entropy.k_min, c.entropy.k_max) if c.entropy.enabled else (0.0, 0.0)


def _weighs_for_engine(c: Config) -> bool:
    return c.actor.anchor == "behavior" and c.actor.loss in _RATIO_LOSSES


def _has_bounds(c: Config) -> bool:
    return c.actor.importance.kind not in ("none", "token_is")


def _plain_grpo(c: Config) -> bool:
    return c.sampling.routing == "grpo" and c.estimator.kind == "group"


_PUBLISH = "must be a multiple of engine.publish_every ({c.engine.publish_every}): "
RULES = (
    Rule("run.num_steps", lambda c: _off_beat(c.run.num_steps, c), _PUBLISH + "a run ends with the newest weights"),
    Rule("run.checkpoint_every", lambda c: _off_beat(c.run.checkpoint_every, c),
         _PUBLISH + "a resumed run samples from its checkpoint's weights"),
    Rule("run.keep_every", lambda c: c.run.keep_every % (c.run.checkpoint_every or math.inf) != 0,
         "must be a multiple of run.checkpoint_every ({c.run.checkpoint_every}): only what is saved can be kept"),
    Rule("evaluation.every", lambda c: _off_beat(c.evaluation.every, c), _PUBLISH + "an evaluation sees the newest"),
    Rule("data.reward_range",
         lambda c: not -math.inf < c.data.reward_range[0] < c.data.reward_range[1] < math.inf,
         "accepted: two finite numbers, the smaller one first"),
    # sampling
    Rule("sampling.chunk_len", lambda c: c.sampling.chunk_len > c.sampling.response_budget,
         "longer than sampling.response_budget ({c.sampling.response_budget}); a chunk must fit into the budget"),
    Rule("sampling.num_prefixes", lambda c: c.sampling.num_prefixes % max(c.actor.num_minibatches, 1) != 0,
         "must be a multiple of actor.num_minibatches ({c.actor.num_minibatches})"),
    Rule("sampling.group_size", lambda c: c.estimator.kind == "group" and c.sampling.group_size == 1,
         "with estimator.kind group every advantage would be 0; must be > 1"),
    Rule("sampling.top_p", lambda c: c.sampling.top_p < 1 and c.sampling.top_k is None,
         "below 1 needs sampling.top_k: the trainer renormalises over the recorded support"),
    Rule("sampling.dynamic", lambda c: c.sampling.dynamic and not _plain_grpo(c),
         "needs sampling.routing grpo (found {c.sampling.routing}) and estimator.kind group ({c.estimator.kind})"),
    Rule("sampling.overlong_cache", lambda c: c.sampling.overlong_cache > 0 and not _plain_grpo(c),
         "needs sampling.routing grpo (found {c.sampling.routing}) and estimator.kind group ({c.estimator.kind})"),
    Rule("sampling.overlong_cache", lambda c: c.sampling.overlong_cache >= c.sampling.response_budget > 0,
         "must be below sampling.response_budget ({c.sampling.response_budget})"),
    # replay and readiness
    Rule("replay.min_valid_for_target",
         lambda c: c.sampling.routing == "ac2" and c.replay.min_valid_for_target > c.sampling.group_size,
         "more than sampling.group_size ({c.sampling.group_size}): no critic target could ever be made"),
    Rule("replay.capacity",
         lambda c: (c.replay.kind == "stale" and c.sampling.routing != "grpo"
                    and c.replay.capacity < c.sampling.num_fresh * c.replay.stale_every),
         "replay.kind stale stores sampling.num_fresh ({c.sampling.num_fresh}) x replay.stale_every "
         "({c.replay.stale_every}) rollouts at once; must hold them all"),
    Rule("readiness.demote_threshold",
         lambda c: c.readiness.demote_threshold is not None and c.sampling.audit_fraction == 0,
         "but sampling.audit_fraction 0 makes no audit that could demote a problem; set null"),
    Rule("readiness.demote_threshold",
         lambda c: c.readiness.demote_threshold is not None and c.readiness.kind == "global_only",
         "but readiness.kind global_only makes every problem ready again; set null"),
    # actor
    Rule("actor.clip_low", lambda c: c.actor.loss in ("ppo", "gspo") and c.actor.clip_low == 1,
         "must be below 1 with actor.loss {c.actor.loss}"),
    Rule("actor.clip_high", lambda c: c.actor.loss in _RATIO_LOSSES and c.actor.clip_high + _entropy_range(c)[0] < 0,
         "below 0 with entropy.k_min ({c.entropy.k_min}) added"),
    Rule("actor.dual_clip",
         lambda c: (c.actor.loss == "ppo" and c.actor.dual_clip is not None
                    and c.actor.dual_clip <= 1 + c.actor.clip_high + _entropy_range(c)[1]),
         "must be null, or above 1 + actor.clip_high ({c.actor.clip_high}) + what entropy control may add to it"),
    Rule("actor.aggregation", lambda c: c.actor.loss == "asympo" and c.actor.aggregation != "sequence_mean",
         "actor.loss asympo averages by response; set sequence_mean"),
    Rule("actor.anchor", lambda c: c.actor.anchor == "behavior" and c.actor.loss in ("policy_gradient", "asympo"),
         "but actor.loss {c.actor.loss} takes no ratio; set proximal"),
    Rule("actor.importance.kind", lambda c: c.actor.loss == "asympo" and c.actor.importance.kind != "none",
         "but actor.loss asympo reads no engine log-probs; set none"),
    Rule("actor.importance.kind", lambda c: _weighs_for_engine(c) and c.actor.importance.kind != "none",
         "but with actor.anchor behavior the loss's own ratio is against the engine already; set one of the two"),
    Rule("actor.importance.low", lambda c: c.actor.importance.low is not None and not _has_bounds(c),
         "but actor.importance.kind {c.actor.importance.kind} has no bounds; set null"),
    Rule("actor.importance.high", lambda c: c.actor.importance.high is not None and not _has_bounds(c),
         "but actor.importance.kind {c.actor.importance.kind} has no bounds; set null"),
    Rule("actor.score_centering.enabled",
         lambda c: c.actor.score_centering.enabled and c.actor.loss in ("gspo", "asympo"),
         "needs a loss by token, actor.loss policy_gradient, ppo or cispo (found {c.actor.loss})"),
    Rule("actor.score_centering.enabled", lambda c: c.actor.score_centering.enabled and _weighs_for_engine(c),
         "but with actor.anchor behavior the loss's own ratio weighs for the engine already; set proximal"),
    Rule("actor.score_centering.enabled",
         lambda c: c.actor.score_centering.enabled and c.actor.importance.kind not in _TOKEN_WEIGHTS,
         f"needs a weight by token, actor.importance.kind {', '.join(_TOKEN_WEIGHTS)} "
         "(found {c.actor.importance.kind})"),
    Rule("actor.score_centering.top_k",
         lambda c: c.actor.score_centering.enabled and c.actor.score_centering.top_k < (c.sampling.top_k or 0),
         "must reach sampling.top_k ({c.sampling.top_k}), which it then covers"),
    Rule("parallel.sequence", lambda c: c.parallel.sequence and c.parallel.tensor == 1,
         "with parallel.tensor 1; sequence parallel needs tensor > 1"),
    Rule("parallel.virtual_pipeline",
         lambda c: c.parallel.virtual_pipeline == 1 or (c.parallel.virtual_pipeline and c.parallel.pipeline == 1),
         "with parallel.pipeline {c.parallel.pipeline}; an interleaved pipeline needs two or more of both, or null"),
    # fp8
    Rule("fp8.emulate", lambda c: c.fp8.emulate and c.fp8.recipe == "none", "but fp8.recipe is none; set false"),
    Rule("fp8.recipe", lambda c: c.fp8.recipe != "none" and not c.fp8.emulate and c.model.dtype != "bfloat16",
         "needs model.dtype bfloat16 (found {c.model.dtype}), or fp8.emulate true"),
    Rule("fp8.keep_first_layers", lambda c: c.fp8.recipe == "delayed" and c.fp8.keep_first_layers > 0,
         "but fp8.recipe delayed quantises all layers; set 0"),
    Rule("fp8.keep_last_layers", lambda c: c.fp8.recipe == "delayed" and c.fp8.keep_last_layers > 0,
         "but fp8.recipe delayed quantises all layers; set 0"),
    Rule("fp8.recipe", lambda c: c.fp8.recipe == "delayed" and c.actor.reference_kl.coefficient > 0,
         "but actor.reference_kl has a frozen model, which no training pass would give a scale; set tensorwise"),
    Rule("fp8.recipe", lambda c: c.fp8.recipe == "delayed" and c.critic.fit == "nstep",
         "but critic.fit nstep has a frozen critic, which no training pass would give a scale; set tensorwise"),
    # critic and estimator
    Rule("critic.lr_min", lambda c: c.critic.lr_min > c.critic.optimizer.lr,
         "above critic.optimizer.lr ({c.critic.optimizer.lr})"),
    Rule("critic.path", lambda c: c.critic.kind == "generative" and c.critic.path is not None,
         "with critic.kind generative, which is the actor itself; set null"),
    Rule("critic.parallel", lambda c: c.critic.kind == "generative" and c.critic.parallel is not None,
         "with critic.kind generative, which is the actor itself; set null"),
    Rule("critic.value", lambda c: c.critic.value == "soft" and c.critic.kind != "generative",
         "needs critic.kind generative (found {c.critic.kind})"),
    Rule("critic.head", lambda c: c.critic.head != "bce" and c.critic.kind != "value_head",
         "needs critic.kind value_head (found {c.critic.kind})"),
    Rule("critic.fit", lambda c: c.critic.fit == "nstep" and c.critic.kind != "value_head",
         "needs critic.kind value_head (found {c.critic.kind})"),
    Rule("critic.fit", lambda c: c.critic.fit == "nstep" and c.sampling.routing != "ac2",
         "needs sampling.routing ac2 (found {c.sampling.routing})"),
    Rule("critic.reference_prompts",
         lambda c: c.critic.reference_prompts == "reference_only" and not c.critic.use_references,
         "needs critic.use_references true"),
    Rule("critic.kind", lambda c: c.estimator.kind in _TOKEN_ESTIMATORS and c.critic.kind != "value_head",
         "estimator.kind {c.estimator.kind} needs a value at every token: value_head"),
    Rule("sampling.routing", lambda c: c.estimator.kind in _TOKEN_ESTIMATORS and c.sampling.routing == "ac2",
         "estimator.kind {c.estimator.kind} needs full rollouts: grpo or prefix_grpo"),
    Rule("sampling.routing", lambda c: c.estimator.kind == "singleton" and c.sampling.routing != "ac2",
         "estimator.kind singleton needs ac2"),
    Rule("estimator.baseline", lambda c: c.estimator.baseline != "mean" and c.estimator.kind != "group",
         "needs estimator.kind group (found {c.estimator.kind})"),
    Rule("estimator.divide_by_std", lambda c: c.estimator.divide_by_std and c.estimator.kind != "group",
         "needs estimator.kind group (found {c.estimator.kind})"),
    Rule("engine.block_size", lambda c: c.engine.block_size % 32 != 0, "must be a multiple of 32"),
)  # fmt: skip


def check_config(config: Config) -> list[str]:
    """Every impossible value or combination that needs no file and no model to see, as messages.

    No rule is asked about a field that holds what it never may: it could not even be read.
    """
    problems = value_problems(config)
    named = {problem.partition(":")[0] for problem in problems}
    return problems + [r.message(config) for r in RULES if r.field not in named and r.broken(config)]


def warnings_for(config: Config) -> list[str]:
    """What is legal but deserves a word at start."""
    sampling, actor, engine = config.sampling, config.actor, config.engine
    has_prefixes = sampling.routing != "grpo"
    cases = (
        (sampling.routing == "ac2" and sampling.audit_fraction == 0,
         "sampling.audit_fraction is 0: no unbiased measure of the critic's error on ready problems is left"),
        (config.run.checkpoint_every == 0, "run.checkpoint_every is 0: a crash loses the whole run"),
        (not config.data.confine_answers,
         "data.confine_answers is false: only checks in Python keep answers from files and network"),
        (has_prefixes and sampling.cut_grid > sampling.cut_max_fraction * sampling.response_budget,
         "sampling.cut_grid is beyond the last cut of a response of full length: every prefix will be empty"),
        (config.entropy.enabled and actor.loss not in ("ppo", "cispo"),
         f"entropy.enabled moves actor.clip_high, of which actor.loss {actor.loss} makes no use"),
        (actor.score_centering.enabled and actor.importance.kind == "token_is",
         "actor.score_centering vanishes under actor.importance.kind token_is, which leaves no drift to cancel"),
        (config.fp8.emulate, "fp8.emulate is true: linear layers round as FP8 would and compute in fp32, slowly"),
        (config.fp8.recipe == "delayed",
         "fp8.recipe delayed: the first scores are rounded under scales of 1, and a training pass moves the scales, so "
         "that the first update's ratios are not 1"),
        (engine.rounding != "none",
         f"engine.rounding is {engine.rounding}: the engine samples from weights other than the trainer's, on purpose"),
        (engine.publish_every > 1 and sampling.routing == "ac2" and config.critic.kind == "generative",
         "engine.publish_every is above 1: the generative critic answers through the engine, with old weights too"),
    )  # fmt: skip
    return [text for applies, text in cases if applies]
