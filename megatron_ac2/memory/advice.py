"""What to change when a plan does not fit: every candidate is planned in full, none is a rule of thumb."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from megatron_ac2.config import Config
from megatron_ac2.config_values import get
from megatron_ac2.memory.question import Question

_RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
_STEPS = 4  # of changes taken together


@dataclass(frozen=True, slots=True)
class Change:
    overrides: str  # as they are given on the command line
    question: Question
    gain: int  # bytes of a card that it frees
    fits: bool


def changes(question: Question, card: int) -> list[Change]:
    """Single changes that help, the best first; of two that suffice, the one named first in `_candidates`."""
    before = question.plan()
    found = []
    for fields in _candidates(question.config):
        other = question.changed(fields)
        if other is None:
            continue
        plan = other.plan()
        gain = plan.spare(card) - before.spare(card)
        starves = before.problem(card) != "cache" and plan.problem(card) == "cache"
        if gain > 0 and not starves:
            text = " ".join(f"{key}={_yaml(value)}" for key, value in fields.items())
            found.append(Change(text, other, gain, plan.problem(card) is None))
    return sorted(found, key=lambda change: (not change.fits, 0 if change.fits else -change.gain))


def together(question: Question, card: int) -> list[Change] | None:
    """The best change, then the best beside it, until the plan fits; None if a few do not suffice."""
    taken: list[Change] = []
    while len(taken) < _STEPS:
        found = changes(question, card)
        if not found:
            return None
        taken.append(found[0])
        question = found[0].question
        if found[0].fits:
            return taken
    return None


def _candidates(config: Config) -> Iterator[dict[str, Any]]:
    """Those that cost nothing first, then those that cost time, then those that cost cache or ranks."""
    parallel, tensor = config.parallel, config.parallel.tensor
    if tensor > 1 and not parallel.sequence:
        yield {"parallel.sequence": True}
    both = {"actor.optimizer.distributed": True, "critic.optimizer.distributed": True}
    if not all(get(config, key) for key in both):
        yield both
    if not config.megatron.get("bias_activation_fusion"):
        yield {"megatron.bias_activation_fusion": True}
    if config.megatron.get("recompute_granularity") != "full":
        yield {f"megatron.{name}": value for name, value in _RECOMPUTE.items()}
    for offload in ("optimizer", "all"):
        if config.run.offload not in (offload, "all"):
            yield {"run.offload": offload}
    yield {"parallel.context": 2 * parallel.context}
    yield {"parallel.tensor": 2 * tensor, "parallel.sequence": True}
    yield {"parallel.pipeline": 2 * parallel.pipeline}
    for section in ("actor", "critic"):
        yield {f"{section}.max_tokens_per_microbatch": get(config, section).max_tokens_per_microbatch // 2}
    for share in (0.5, 0.4, 0.3):
        if share < config.engine.gpu_memory_utilization:
            yield {"engine.gpu_memory_utilization": share}


def _yaml(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
