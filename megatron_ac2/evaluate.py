"""k answers a problem on the engine, graded: mean@k with its standard error over problems, and best@k."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatron_ac2.config import EvaluationConfig
from megatron_ac2.metrics import best_at_k, mean_at_k
from megatron_ac2.parallel.topology import Topology
from megatron_ac2.random_streams import request_seed
from megatron_ac2.rollout import grade_responses
from megatron_ac2.types import Grader, Problem, Sampler, SampleRequest


def evaluate(
    sampler: Sampler,
    problems: Sequence[Problem],
    grader: Grader,
    tokenizer,
    topology: Topology,
    config: EvaluationConfig,
    *,
    response_budget: int,
    seed: int,
    reward_range: tuple[float, float] = (0.0, 1.0),
) -> dict[str, float]:
    """Collective. The request seeds do not depend on the step, so two evaluations differ by the weights alone."""
    problems = problems[: config.num_problems]
    k = config.samples_per_problem
    requests = [
        SampleRequest(problem.prompt_ids, response_budget, config.temperature, request_seed(seed, "evaluate", 0, slot))
        for slot, problem in enumerate(problem for problem in problems for _ in range(k))
    ]
    samples = sampler.sample(requests)
    items = [(problem, sample.token_ids) for problem, sample in zip((p for p in problems for _ in range(k)), samples)]
    grades = grade_responses(grader, tokenizer, items, topology, reward_range)
    rewards = np.array([grade.reward for grade in grades], dtype=np.float64).reshape(len(problems), k)
    mean, standard_error = mean_at_k(rewards)
    return {
        "evaluation/mean": mean,
        "evaluation/mean_se": standard_error,
        "evaluation/best_at_k": best_at_k(rewards),
        "evaluation/response_len": float(np.mean([len(sample.token_ids) for sample in samples])),
        "evaluation/unfinished": float(np.mean([sample.finish == "length" for sample in samples])),
        "evaluation/generated_tokens": float(sum(len(sample.token_ids) for sample in samples)),
    }
