"""What a step samples: which problems are rolled out afresh, which prefixes are continued, and how far."""

from __future__ import annotations

from megatron_ac2.algorithm.sampling import choose_prefixes, fresh_prefixes, num_fresh_at, route, singleton_prefixes
from megatron_ac2.config import Config
from megatron_ac2.random_streams import stream
from megatron_ac2.state import RunState
from megatron_ac2.types import Continuation, Prefix, Problem


def plan_step(state: RunState, config: Config, step: int) -> tuple[list[Problem], list[Continuation]]:
    """Which problems are rolled out afresh, and which prefixes are continued how far."""
    sampling, seed = config.sampling, config.run.seed
    replayed = state.replay.by_problem()
    if sampling.routing == "grpo":
        fresh: list[Problem] = []
        prefixes = fresh_prefixes(
            [problem.problem_id for problem in state.stream.take(sampling.num_prefixes)], sampling.num_prefixes
        )
    else:
        num_fresh = num_fresh_at(step, config.replay.kind, sampling.num_fresh, config.replay.stale_every)
        # A stale buffer is filled by the takes of many steps at once: a problem may come back in the next epoch's.
        takes = range(0, num_fresh, sampling.num_fresh)
        fresh = [problem for _ in takes for problem in state.stream.take(sampling.num_fresh)]
        prefixes = (
            choose_prefixes(replayed, sampling.num_prefixes, sampling.cut_grid, sampling.cut_max_fraction,
                            stream(seed, "prefixes", step))
            if replayed
            else _bare_prefixes(state, fresh, sampling.num_prefixes)
        )  # fmt: skip
    ready = state.readiness.ready_among([prefix.problem_id for prefix in prefixes])
    continuations = route(
        prefixes, ready, audit_fraction=sampling.audit_fraction, chunk_len=sampling.chunk_len,
        response_budget=sampling.response_budget, group_size=sampling.group_size, rng=stream(seed, "audits", step),
        routing=sampling.routing,
    )  # fmt: skip
    if config.estimator.kind == "singleton":
        continuations = singleton_prefixes(
            continuations, replayed, sampling.cut_grid, sampling.cut_max_fraction, stream(seed, "singletons", step),
            chunk_len=sampling.chunk_len, response_budget=sampling.response_budget,
        )  # fmt: skip
    return fresh, continuations


def _bare_prefixes(state: RunState, fresh: list[Problem], num_prefixes: int) -> list[Prefix]:
    """Until something is replayed. A correct_only buffer may stay empty, a stale one is filled at some steps only."""
    problems = fresh or state.stream.take(min(num_prefixes, len(state.stream)))
    return fresh_prefixes([problem.problem_id for problem in problems], num_prefixes)
