from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ac2.algorithm.importance import KINDS
from megatron_ac2.algorithm.objective import AGGREGATIONS, PolicyTokens, aggregation_weights, policy_loss
from megatron_ac2.algorithm.objective_parts import (
    ANCHORS,
    LOSSES,
    RATIO_LOSSES,
    PolicyObjective,
    objective_problems,
)
from megatron_ac2.types import UserError

VOCABULARY = 5
DIFFERENTIABLE = ("current", "entropy", "top_current")
EXTRAS = {"entropy_bonus": 0.02, "kl_coefficient": 0.1}


def legal_objectives() -> list[PolicyObjective]:
    """Every combination of loss, importance kind, anchor and score centering that makes sense."""
    every = [
        PolicyObjective(loss=loss, importance_kind=kind, anchor=anchor, score_centering=centering, **EXTRAS)
        for loss, kind, anchor, centering in itertools.product(LOSSES, KINDS, ANCHORS, (False, True))
    ]
    return [objective for objective in every if not objective_problems(objective)]


def name_of(objective: PolicyObjective) -> str:
    centring = "-centred" if objective.score_centering else ""
    return f"{objective.loss}-{objective.importance_kind}-{objective.anchor}{centring}"


LEGAL = pytest.mark.parametrize("objective", legal_objectives(), ids=name_of)


def row(*values: float, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype)


def leaves(tokens: PolicyTokens) -> PolicyTokens:
    """The same with leaves of its own, to differentiate."""
    return replace(tokens, **{name: getattr(tokens, name).detach().requires_grad_() for name in DIFFERENTIABLE})


def gradients(loss: torch.Tensor, tokens: PolicyTokens) -> list[torch.Tensor]:
    inputs = [getattr(tokens, name) for name in DIFFERENTIABLE]
    found = torch.autograd.grad(loss, inputs, allow_unused=True, retain_graph=True)
    return [torch.zeros_like(leaf) if grad is None else grad for leaf, grad in zip(inputs, found, strict=True)]


def tokens_of(lengths: list[int], seed: int = 0, noise: float = 0.3) -> PolicyTokens:
    """Random float64 tokens, sequences end to end; the proximal and engine's policies are near the current one."""
    generator = torch.Generator().manual_seed(seed)
    length = sum(lengths)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    logits = normal(length, VOCABULARY)
    sampler = torch.log_softmax(logits + noise * normal(length, VOCABULARY), -1)
    current = torch.log_softmax(logits, -1)
    tokens = PolicyTokens(
        current=current[:, 0],
        proximal=current[:, 0] + noise * normal(length),
        behavior=sampler[:, 0],
        advantages=normal(length),
        mask=torch.ones(length, dtype=torch.float64),
        sequence_ids=torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)),
        num_sequences=len(lengths),
        entropy=-(current.exp() * current).sum(-1),
        reference=current[:, 0] + noise * normal(length),
        top_current=current[:, :3],
        top_behavior=sampler[:, :3],
    )
    return leaves(tokens)


def select(tokens: PolicyTokens, sequences: list[int]) -> PolicyTokens:
    """The tokens of some sequences, renumbered from 0."""
    chosen = torch.isin(tokens.sequence_ids, torch.tensor(sequences, dtype=torch.int64))
    names = [name for name in tokens.__slots__ if name not in ("num_sequences", "sequence_ids")]
    parts = {name: getattr(tokens, name)[chosen] for name in names}
    renumbered = {old: new for new, old in enumerate(sequences)}
    ids = torch.tensor([renumbered[int(i)] for i in tokens.sequence_ids[chosen]], dtype=torch.int64)
    return PolicyTokens(**parts, sequence_ids=ids, num_sequences=len(sequences))


# -- the sum of its parts, by hand ------------------------------------------------------------------------------------


def test_every_term_by_hand() -> None:
    """One token. ratio e^0.1 against the proximal, rho e^0.2 (proximal / engine), A 2, weight 0.5, 4 units."""
    tokens = leaves(
        PolicyTokens(
            current=row(-1.0),
            proximal=row(-1.1),
            behavior=row(-1.3),
            advantages=row(2.0),
            mask=row(0.5),
            sequence_ids=torch.tensor([0]),
            num_sequences=1,
            entropy=row(0.9),
            reference=row(-1.2),
            top_current=row(math.log(0.4), math.log(0.1))[None],
            top_behavior=row(math.log(0.1), math.log(0.3))[None],
        )
    )
    objective = PolicyObjective(
        importance_kind="token_tis", score_centering=True, entropy_bonus=0.03, kl_coefficient=0.2, kl_estimator="k2"
    )
    loss, sums = policy_loss(tokens, objective, 4)
    surrogate = -2.0 * math.exp(0.1) * math.exp(0.2)
    centre = (0.2 - 0.4) * math.log(0.4)  # as in test_score_centering.test_hand_worked
    expected = 0.5 * (surrogate + 2.0 * centre - 0.03 * 0.9 + 0.2 * 0.02) / 4
    assert loss.item() == pytest.approx(expected)
    by_current, by_entropy, by_top = gradients(loss, tokens)
    assert by_current.item() == pytest.approx(0.5 * (surrogate + 0.2 * 0.2) / 4)
    assert by_entropy.item() == pytest.approx(-0.5 * 0.03 / 4)
    assert by_top.flatten().tolist() == pytest.approx([0.5 * 2.0 * (0.2 - 0.4) / 4, 0.0])
    named = {name: value.item() for name, value in sums.items()}
    assert named == pytest.approx(
        {
            "ratio": math.exp(0.1),
            "clip_low": 0.0,
            "clip_high": 0.0,
            "dual_clip": 0.0,
            "kl_k1": -0.1,
            "kl_k3": math.exp(0.1) - 1.1,
            "importance_weight": math.exp(0.2),
            "importance_truncated": 0.0,
            "head_mass_q": 0.4,
            "head_mass_p": 0.5,
            "reference_kl": 0.02,
            "tokens": 1.0,
        }
    )


def test_metrics_count_a_token_once_whatever_its_weight() -> None:
    tokens = PolicyTokens(
        current=row(math.log(2.0), 0.0, 7.0),
        proximal=row(0.0, 0.0, 0.0),
        behavior=row(0.0, 0.0, 0.0),
        advantages=row(1.0, 1.0, 1.0),
        mask=row(0.25, 3.0, 0.0),
        sequence_ids=torch.tensor([0, 0, 0]),
        num_sequences=1,
    )
    loss, sums = policy_loss(tokens, PolicyObjective(), 100)
    assert loss.item() == pytest.approx((-0.25 * 1.28 - 3.0) / 100)
    assert sums["tokens"] == 2
    assert sums["ratio"] == pytest.approx(3.0)
    assert sums["clip_high"] == 1
    assert sums["kl_k1"] == pytest.approx(-math.log(2.0))
    assert sums["kl_k3"] == pytest.approx(1.0 - math.log(2.0))


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"loss": "policy_gradient"}, set()),
        ({"loss": "asympo"}, {"nll_floored"}),
        ({}, {"ratio", "clip_low", "clip_high", "dual_clip", "kl_k1", "kl_k3"}),
        ({"loss": "gspo"}, {"ratio", "clip_low", "clip_high", "kl_k1", "kl_k3"}),
        (
            {"loss": "policy_gradient", "importance_kind": "token_mis", "score_centering": True, "kl_coefficient": 1.0},
            {"importance_weight", "importance_rejected", "head_mass_q", "head_mass_p", "reference_kl"},
        ),
    ],
)
def test_only_the_metrics_that_apply(changes: dict, names: set[str]) -> None:
    assert set(policy_loss(tokens_of([3, 2]), PolicyObjective(**changes), 5)[1]) == names | {"tokens"}


# -- special cases ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loss", RATIO_LOSSES)
@pytest.mark.parametrize("kind", KINDS)
def test_decoupled_with_proximal_equal_to_behavior_is_the_plain_loss(loss: str, kind: str) -> None:
    tokens = tokens_of([4, 3])
    tokens = replace(tokens, behavior=tokens.proximal)
    plain, _ = policy_loss(tokens, PolicyObjective(loss=loss), 7)
    for objective in (
        PolicyObjective(loss=loss, importance_kind=kind),
        PolicyObjective(loss=loss, anchor="behavior"),
    ):
        found, _ = policy_loss(tokens, objective, 7)
        torch.testing.assert_close(found, plain)
        torch.testing.assert_close(gradients(found, tokens), gradients(plain, tokens))


def test_the_importance_ratio_is_the_anchors() -> None:
    """proximal / engine under a ratio loss, current / engine (detached) under the policy gradient."""
    tokens = tokens_of([6], noise=0.2)
    for loss, trainer in (("ppo", tokens.proximal), ("cispo", tokens.proximal), ("policy_gradient", tokens.current)):
        objective = PolicyObjective(loss=loss, importance_kind="token_is")
        _, sums = policy_loss(tokens, objective, 6)
        torch.testing.assert_close(sums["importance_weight"], (trainer - tokens.behavior).exp().sum().detach())
    found, _ = policy_loss(tokens, PolicyObjective(loss="policy_gradient", importance_kind="token_is"), 1)
    ratio = (tokens.current - tokens.behavior).exp()
    by_ratio = torch.autograd.grad(-(ratio * tokens.advantages).sum(), tokens.current)[0]
    torch.testing.assert_close(gradients(found, tokens)[0], by_ratio)  # grad r = r grad log pi


def test_rejected_tokens_stay_in_the_denominator() -> None:
    tokens = replace(tokens_of([2]), behavior=row(-50.0, -1.0), proximal=row(-1.0, -1.0), advantages=row(1.0, 1.0))
    tokens = replace(tokens, current=row(-1.0, -1.0).requires_grad_())
    loss, sums = policy_loss(tokens, PolicyObjective(importance_kind="token_mis"), 2)
    assert loss.item() == pytest.approx(-0.5)
    assert (sums["importance_rejected"], sums["tokens"]) == (1, 2)


@pytest.mark.parametrize("loss", ["policy_gradient", "ppo"])
def test_full_importance_sampling_makes_score_centering_vanish(loss: str) -> None:
    tokens = tokens_of([5, 3])
    objective = PolicyObjective(loss=loss, importance_kind="token_is")
    plain, _ = policy_loss(tokens, objective, 8)
    centred, _ = policy_loss(tokens, replace(objective, score_centering=True), 8)
    torch.testing.assert_close(centred, plain, rtol=0, atol=1e-12)
    for found, expected in zip(gradients(centred, tokens), gradients(plain, tokens), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def test_first_update_under_a_dapo_objective_is_the_policy_gradient() -> None:
    tokens = tokens_of([4])
    tokens = replace(tokens, proximal=tokens.current.detach())
    loss, _ = policy_loss(tokens, PolicyObjective(), 4)
    torch.testing.assert_close(loss, -tokens.advantages.mean())
    torch.testing.assert_close(gradients(loss, tokens)[0], -tokens.advantages / 4)


# -- what must hold for every objective -------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_ppo_gradients_by_finite_differences(kind: str, estimator: str) -> None:
    """Under ppo nothing that is detached depends on what is differentiated: the importance ratio is the proximal's."""
    tokens = tokens_of([2, 3], seed=3)
    objective = PolicyObjective(importance_kind=kind, kl_estimator=estimator, **EXTRAS)

    def loss(current: torch.Tensor, entropy: torch.Tensor) -> torch.Tensor:
        return policy_loss(replace(tokens, current=current, entropy=entropy), objective, 5)[0]

    assert torch.autograd.gradcheck(loss, (tokens.current, tokens.entropy))


@LEGAL
@pytest.mark.parametrize("junk", [math.nan, math.inf])
def test_all_masked_is_zero_whatever_it_holds(objective: PolicyObjective, junk: float) -> None:
    by_token, by_top = torch.full((1, 3), junk), torch.full((1, 3, 2), junk)
    tokens = leaves(
        PolicyTokens(
            current=by_token,
            proximal=by_token,
            behavior=by_token,
            advantages=by_token,
            mask=torch.zeros(1, 3),
            sequence_ids=torch.full((1, 3), -7),
            num_sequences=0,
            entropy=by_token,
            reference=by_token,
            top_current=by_top,
            top_behavior=by_top,
        )
    )
    for num_units in (0, torch.tensor(0)):
        loss, sums = policy_loss(tokens, objective, num_units)
        assert loss.item() == 0.0
        assert all((grad == 0).all() for grad in gradients(loss, tokens))
        assert all(total == 0 for total in sums.values())


@LEGAL
def test_masked_junk_does_not_leak(objective: PolicyObjective) -> None:
    clean = tokens_of([3, 2])
    order = [0, 5, 1, 2, 3, 5, 4]  # a token of junk amid either sequence

    def spread(tensor: torch.Tensor, junk: float) -> torch.Tensor:
        padding = torch.full_like(tensor[:1].detach(), junk)
        return torch.cat([tensor.detach(), padding])[order]

    names = [name for name in clean.__slots__ if name not in ("num_sequences", "sequence_ids", "mask")]
    dirty = leaves(
        PolicyTokens(
            **{name: spread(getattr(clean, name), math.nan) for name in names},
            mask=spread(clean.mask, 0),
            sequence_ids=spread(clean.sequence_ids, 99),
            num_sequences=2,
        )
    )
    loss, sums = policy_loss(dirty, objective, 5)
    expected, expected_sums = policy_loss(clean, objective, 5)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(sums, expected_sums)
    kept = [0, 2, 3, 4, 6]
    for found, wanted in zip(gradients(loss, dirty), gradients(expected, clean), strict=True):
        torch.testing.assert_close(found[kept], wanted)
        assert (found[[1, 5]] == 0).all()


@LEGAL
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_extreme_log_ratios_stay_finite(objective: PolicyObjective, dtype: torch.dtype) -> None:
    """Every pair of trainer and engine (or proximal, or reference) 100 nats apart, either way, either sign of A."""
    corners = torch.tensor(list(itertools.product((-100.0, 0.0), (-100.0, 0.0), (-1.0, 1.0))), dtype=dtype)
    current, other, advantages = corners.unbind(1)
    tokens = leaves(
        PolicyTokens(
            current=current,
            proximal=other if objective.anchor == "proximal" else current,
            behavior=other.flip(0),
            advantages=advantages,
            mask=torch.ones(8, dtype=dtype),
            sequence_ids=torch.arange(8),
            num_sequences=8,
            entropy=torch.ones(8, dtype=dtype),
            reference=other,
            top_current=torch.stack([current, other], -1),
            top_behavior=torch.stack([other, current], -1),
        )
    )
    for together in (tokens, replace(tokens, sequence_ids=torch.zeros(8, dtype=torch.int64), num_sequences=1)):
        loss, sums = policy_loss(together, objective, 8)
        assert loss.dtype == torch.float32 and torch.isfinite(loss)
        assert all(torch.isfinite(grad).all() for grad in gradients(loss, tokens))
        assert all(torch.isfinite(total) and not total.requires_grad for total in sums.values())


@LEGAL
def test_splitting_the_sequences_over_two_calls_changes_nothing(objective: PolicyObjective) -> None:
    tokens = tokens_of([3, 1, 4, 2], seed=9)
    whole, whole_sums = policy_loss(tokens, objective, 10)
    parts = [policy_loss(select(tokens, chosen), objective, 10) for chosen in ([0, 2], [1, 3])]
    total = parts[0][0] + parts[1][0]
    torch.testing.assert_close(total, whole)
    torch.testing.assert_close(gradients(total, tokens), gradients(whole, tokens))
    torch.testing.assert_close({name: parts[0][1][name] + parts[1][1][name] for name in whole_sums}, whole_sums)


# -- aggregation ------------------------------------------------------------------------------------------------------


def test_aggregation_hand_worked() -> None:
    # sequence 0 has 3 tokens, 1 has 1, 2 has none left; the last token is masked
    ids, mask = torch.tensor([0, 0, 0, 1, 2]), row(1.0, 1.0, 1.0, 1.0, 0.0)
    expected = {
        "token_mean": ([1.0, 1.0, 1.0, 1.0, 0.0], 4),
        "sequence_mean": ([1 / 3, 1 / 3, 1 / 3, 1.0, 0.0], 2),
        "budget_mean": ([0.1, 0.1, 0.1, 0.1, 0.0], 2),
    }
    for aggregation in AGGREGATIONS:
        weights, units = aggregation_weights(aggregation, ids, mask, 3, 10)
        assert weights.tolist() == pytest.approx(expected[aggregation][0])
        assert units.item() == expected[aggregation][1]


def aggregated(tokens: PolicyTokens, aggregation: str, objective: PolicyObjective, budget: int = 4) -> torch.Tensor:
    weights, units = aggregation_weights(aggregation, tokens.sequence_ids, tokens.mask, tokens.num_sequences, budget)
    return policy_loss(replace(tokens, mask=weights), objective, units)[0]


@pytest.mark.parametrize("loss", LOSSES)
def test_aggregations_agree_for_sequences_of_equal_length(loss: str) -> None:
    tokens, objective = tokens_of([4, 4, 4]), PolicyObjective(loss=loss)
    by_token = aggregated(tokens, "token_mean", objective)
    for aggregation in ("sequence_mean", "budget_mean"):  # the budget is the length
        found = aggregated(tokens, aggregation, objective)
        torch.testing.assert_close(found, by_token)
        torch.testing.assert_close(gradients(found, tokens), gradients(by_token, tokens))


def test_aggregations_differ_otherwise() -> None:
    tokens, objective = replace(tokens_of([1, 3]), advantages=row(1.0, 0.0, 0.0, 0.0)), PolicyObjective()
    tokens = replace(tokens, proximal=tokens.current.detach())
    # the first token's loss is -1: 1/4 of the tokens, half of the sequences, 1/4 of either's budget
    found = [aggregated(tokens, aggregation, objective).item() for aggregation in AGGREGATIONS]
    assert found == pytest.approx([-0.25, -0.5, -0.125])


def test_asympo_paper_form() -> None:
    # (1/G) sum_i A_i mean_t l_t / sg[mean_t l_t]: the value is the mean advantage
    tokens = replace(tokens_of([2, 5]), advantages=row(0.3, 0.3, *[-0.7] * 5))
    loss = aggregated(tokens, "sequence_mean", PolicyObjective(loss="asympo"))
    assert loss.item() == pytest.approx((0.3 - 0.7) / 2)


@given(
    lengths=st.lists(st.integers(1, 5), min_size=1, max_size=6),
    split=st.integers(0, 6),
    seed=st.integers(0, 100),
    aggregation=st.sampled_from(AGGREGATIONS),
    loss=st.sampled_from(LOSSES),
)
@settings(max_examples=40)
def test_aggregation_over_any_split(lengths: list[int], split: int, seed: int, aggregation: str, loss: str) -> None:
    """Microbatches of whole sequences: the sum of the weighted sums over the sum of the counts."""
    tokens = tokens_of(lengths, seed)
    mask = (torch.rand(len(tokens.mask), generator=torch.Generator().manual_seed(seed)) > 0.3).double()
    tokens = replace(tokens, mask=mask)
    objective = PolicyObjective(loss=loss)
    total, count = torch.zeros((), dtype=torch.float64), 0
    for chosen in (list(range(len(lengths)))[:split], list(range(len(lengths)))[split:]):
        part = select(tokens, chosen)
        weights, units = aggregation_weights(aggregation, part.sequence_ids, part.mask, part.num_sequences, 4)
        total = total + policy_loss(replace(part, mask=weights), objective, 1)[0]
        count += int(units)
    torch.testing.assert_close(total / max(count, 1), aggregated(tokens, aggregation, objective))


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_aggregation_of_nothing(aggregation: str) -> None:
    weights, units = aggregation_weights(aggregation, torch.full((1, 3), 5), torch.zeros(1, 3), 0, 10)
    assert (weights == 0).all() and units.item() == 0


def test_bad_aggregations_are_refused() -> None:
    ids, mask = torch.tensor([0]), row(1.0)
    with pytest.raises(UserError, match="actor.aggregation: found 'mean', accepted: token_mean"):
        aggregation_weights("mean", ids, mask, 1, 10)
    with pytest.raises(UserError, match="sampling.response_budget: found None"):
        aggregation_weights("budget_mean", ids, mask, 1)


# -- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "fields"),
    [
        ({"loss": "grpo"}, ["actor.loss: found 'grpo', accepted: policy_gradient, ppo"]),
        ({"anchor": "old"}, ["actor.anchor: found 'old'"]),
        ({"kl_estimator": "k4"}, ["actor.reference_kl.estimator: found 'k4'"]),
        ({"kl_coefficient": -1.0}, ["actor.reference_kl.coefficient: found -1.0"]),
        ({"entropy_bonus": math.nan}, ["actor.entropy_bonus: found nan"]),
        ({"loss": "asympo", "asympo_floor": 0.0}, ["actor.asympo_floor: found 0.0"]),
        ({"clip_low": 1.0}, ["actor.clip_low: found 1.0"]),
        ({"clip_high": -0.1}, ["actor.clip_high: found -0.1"]),
        ({"dual_clip": 1.28}, ["actor.dual_clip: found 1.28, must be null or above 1 + actor.clip_high (1.28)"]),
        ({"loss": "cispo", "clip_low": 1.1}, ["actor.clip_low: found 1.1"]),
        ({"importance_kind": "tis"}, ["actor.importance.kind: found 'tis'"]),
        ({"importance_kind": "token_mis", "importance_high": 0.5}, ["actor.importance.high: found 0.5"]),
        ({"loss": "asympo", "importance_kind": "token_tis"}, ["actor.importance.kind: found token_tis"]),
        ({"anchor": "behavior", "importance_kind": "token_tis"}, ["actor.importance.kind: found token_tis"]),
        ({"anchor": "behavior", "loss": "policy_gradient"}, ["actor.anchor: found behavior"]),
        ({"anchor": "behavior", "score_centering": True}, ["actor.score_centering.enabled"]),
        ({"loss": "asympo", "score_centering": True}, ["actor.score_centering.enabled"]),
        ({"score_centering": True, "importance_kind": "sequence_mis"}, ["actor.score_centering.enabled"]),
        ({"score_centering": True, "importance_kind": "geometric_rejection"}, ["actor.score_centering.enabled"]),
        (
            {"loss": "reinforce", "clip_low": -1.0, "importance_kind": "none", "importance_low": 0.1, "anchor": "x"},
            ["actor.loss", "actor.anchor", "actor.importance.low"],
        ),
        (
            {"clip_low": -1.0, "clip_high": -2.0, "dual_clip": -3.0, "importance_kind": "x", "score_centering": True},
            ["actor.clip_low", "actor.clip_high", "actor.dual_clip", "actor.importance.kind"],
        ),
    ],
)
def test_senseless_objectives_name_every_field(changes: dict, fields: list[str]) -> None:
    objective = PolicyObjective(**changes)
    problems = objective_problems(objective)
    assert len(problems) == len(fields)
    assert all(problem.startswith(field) for problem, field in zip(problems, fields, strict=True))
    with pytest.raises(UserError, match=fields[-1].split(":")[0]):
        policy_loss(tokens_of([2]), objective, 2)


def test_the_default_and_the_legal_are_accepted() -> None:
    assert objective_problems(PolicyObjective()) == []
    assert objective_problems(PolicyObjective(loss="cispo", clip_low=1.0, dual_clip=1.0)) == []
    assert objective_problems(PolicyObjective(dual_clip=None, clip_high=5.0)) == []
    # policy_gradient and 3 ratio losses x 7 kinds, the 4 token kinds of them also centred, 3 on behavior, asympo
    assert len(legal_objectives()) == 4 * 7 + 4 * 4 + 3 + 1


def test_missing_tensors_are_named() -> None:
    tokens = replace(tokens_of([2]), entropy=None, reference=None, top_behavior=None)
    objective = PolicyObjective(score_centering=True, **EXTRAS)
    with pytest.raises(ValueError, match="None: entropy, reference, top_behavior"):
        policy_loss(tokens, objective, 2)
