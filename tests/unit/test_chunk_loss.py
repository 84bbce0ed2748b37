"""The fused loss against float64 logits, torch's log_softmax and autograd, for every objective that makes sense."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
import torch.distributed as dist

from megatron_ac2.algorithm.importance import KINDS
from megatron_ac2.algorithm.objective import PolicyTokens, policy_loss
from megatron_ac2.algorithm.objective_parts import LOSSES, PolicyObjective, objective_problems
from megatron_ac2.kernels import chunk_loss_tiled as tiled
from megatron_ac2.kernels import onednn_products
from megatron_ac2.kernels.chunk_loss import Head, chunk_loss, chunk_scores
from megatron_ac2.kernels.vocab_logprobs import TokenLogprobs, restricted_logprobs
from tests.unit.tensor_rank import TensorRank

T, H, V, VOCAB, K = 53, 16, 40, 37, 6
TOLERANCE = {torch.float64: 1e-11, torch.float32: 1e-5, torch.bfloat16: 1e-2}
# Ratios to the anchor and to the engine, inside, outside and far outside of every bound, none of them next to one.
RATIOS = torch.tensor([0.03, 0.53, 0.9, 1.0, 1.13, 1.61, 4.3, 50.0], dtype=torch.float64)
ENGINE_RATIOS = torch.tensor([0.31, 0.83, 1.0, 1.07, 1.9, 7.7], dtype=torch.float64)
# No sequence of the batch is within the default ones of these.
BOUNDS = {"sequence_mis": (0.0, 1e5), "geometric_rejection": (0.2, 5.0)}


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Several blocks of the vocabulary, the last one shorter; fp32 goes the way of large products; memory that is taken
    as it comes holds NaN."""
    monkeypatch.setattr(tiled, "BLOCK_ROWS", {"cpu": 16, "cuda": 16})
    monkeypatch.setattr(onednn_products, "_LEAST", 0)
    empty_like = torch.empty_like
    monkeypatch.setattr(torch, "empty_like", lambda *like, **options: empty_like(*like, **options).fill_(math.nan))


def rows_of_bytes(rows: int, dtype: torch.dtype, columns: int = V) -> int:
    return rows * (columns + 1) * dtype.itemsize


def inputs(dtype=torch.float64, tokens=T):
    """hidden, weight, labels, top_ids: the likeliest K, the label among them in three rows of four; exact in bf16."""
    generator = torch.Generator().manual_seed(tokens)
    hidden = torch.randn(tokens, H, generator=generator, dtype=torch.float64).bfloat16()
    weight = torch.randn(V, H, generator=generator, dtype=torch.float64).bfloat16()
    labels = torch.randint(0, VOCAB, (tokens,), generator=generator)
    top_ids = (hidden.double() @ weight.double()[:VOCAB].t()).topk(K, 1).indices
    inside = torch.arange(tokens) % 4 > 0
    labels[inside] = top_ids[torch.arange(tokens), torch.arange(tokens) % 4][inside]
    return hidden.to(dtype), weight.to(dtype), labels, top_ids


def naive(hidden, weight, labels, top_ids, temperature=1.0):
    logp = torch.log_softmax((hidden @ weight.t())[:, :VOCAB] / temperature, -1)
    top = None if top_ids is None else logp.gather(1, top_ids)
    return TokenLogprobs(logp.gather(1, labels[:, None])[:, 0], -(logp.exp() * logp).sum(1), top)


class Batch:
    """What an objective reads besides the scores, [T] each, over three sequences of a batch."""

    def __init__(self, objective: PolicyObjective, is_filtered: bool, tokens: int = T):
        generator = torch.Generator().manual_seed(7)
        hidden, weight, labels, top_ids = inputs(tokens=tokens)
        self.objective = objective

        def choose(values):
            return values[torch.randint(0, len(values), (tokens,), generator=generator)]

        support = torch.ones(tokens, K, dtype=torch.bool)
        support[::2, 4:] = False
        self.support = support if is_filtered else None
        exact = self.filtered(naive(hidden, weight, labels, top_ids))
        self.proximal = exact.labels - choose(RATIOS).log()
        self.behavior = exact.labels - choose(ENGINE_RATIOS).log()
        if objective.loss in ("ppo", "cispo", "gspo"):
            self.behavior = self.proximal - choose(ENGINE_RATIOS).log()
        self.reference = exact.labels + 0.5 * torch.randn(tokens, generator=generator, dtype=torch.float64)
        ratios = torch.tensor([0.31, 0.83, 1.07, 1.6])[torch.arange(K) % 4].double()
        self.top_behavior = (exact.top - ratios.log()).masked_fill(~support, -math.inf)
        if is_filtered:  # all that the sampler could draw
            self.top_behavior = self.top_behavior.log_softmax(1)
        self.advantages = torch.randn(tokens, generator=generator, dtype=torch.float64)
        self.advantages[1::5] = 0.0
        self.mask = torch.rand(tokens, generator=generator, dtype=torch.float64) + 0.5
        self.mask[torch.rand(tokens, generator=generator) < 0.3] = 0.0
        if is_filtered:  # no token outside of the filter's support is sampled
            self.mask[::4] = 0.0
        self.sequence_ids = torch.arange(tokens) * 3 // max(tokens, 1)

    def filtered(self, scores, own=slice(None)):
        if self.support is None:
            return scores
        labels, top = restricted_logprobs(scores.labels, scores.top, self.support[own])
        return TokenLogprobs(labels, scores.entropy, top)

    def evaluation(self, rows):
        def evaluate(scores, part):
            own = rows[part]
            scores = self.filtered(scores, own)
            names = ("proximal", "behavior", "advantages", "mask", "sequence_ids", "reference", "top_behavior")
            fields = {name: getattr(self, name)[own] for name in names}
            tokens = PolicyTokens(
                current=scores.labels, entropy=scores.entropy, top_current=scores.top, num_sequences=3, **fields
            )
            return policy_loss(tokens, self.objective, 10.0)

        return evaluate


def relative(found, expected):
    difference = (found.double() - expected.double()).norm()
    return 0.0 if difference == 0 else (difference / expected.double().norm()).item()


def assert_near(found: dict, expected: dict, tolerance: float):
    errors = {name: relative(found[name], expected[name]) for name in ("hidden", "weight")}
    # Of a sum of terms of both signs: relative to the sum of their magnitudes.
    errors["loss"] = (
        ((found["loss"] - expected["loss"]).abs() / expected["magnitude"]).item() if expected["loss"] else 0
    )
    assert max(errors.values()) <= tolerance, errors


def fused(dtype, evaluate, rows=None, top=True, tokens=T, temperature=1.0, tile_rows=16, scale=1.0, **options):
    hidden, weight, labels, top_ids = inputs(dtype, tokens)
    hidden, weight = hidden.requires_grad_(), weight.requires_grad_()
    found = chunk_loss(
        hidden, Head(weight, VOCAB, temperature), labels, evaluate, rows=rows, top_ids=top_ids if top else None,
        tile_bytes=rows_of_bytes(tile_rows, dtype), **options,
    )  # fmt: skip
    (found.loss * scale).backward()
    return found, {"loss": found.loss.detach(), "hidden": hidden.grad, "weight": weight.grad}


def materialised(evaluate, linear_in, rows=None, top=True, tokens=T, temperature=1.0):
    """The float64 reference. `linear_in`: a tensor whose entries are factors of the loss's terms."""
    hidden, weight, labels, top_ids = inputs(tokens=tokens)
    hidden, weight = hidden.requires_grad_(), weight.requires_grad_()
    scores = naive(hidden, weight, labels, top_ids if top else None, temperature)
    rows = torch.arange(tokens) if rows is None else rows
    scores = TokenLogprobs(scores.labels[rows], scores.entropy[rows], scores.top[rows] if top else None)
    factors = linear_in.requires_grad_()
    loss, metrics = evaluate(scores, slice(0, len(rows)))
    (slopes,) = torch.autograd.grad(loss, factors, retain_graph=True)
    loss.backward(inputs=[hidden, weight])
    magnitude = (slopes * factors.requires_grad_(False)).abs().sum()
    gradients = {"hidden": hidden.grad, "weight": weight.grad}
    return scores, metrics, {"loss": loss.detach(), "magnitude": magnitude, **gradients}


def objectives(loss):
    """Every legal combination of the objective's parts, the entropy bonus and the reference KL together or apart."""
    for kind, centering, bonus, (kl, estimator) in itertools.product(
        KINDS, (False, True), (0.0, 0.3), ((0.0, "k1"), (0.2, "k1"), (0.2, "k2"), (0.2, "k3"))
    ):
        if (kind, centering) != ("none", False) and (bonus > 0) != (kl > 0):
            continue
        low, high = BOUNDS.get(kind, (None, None))
        objective = PolicyObjective(
            loss=loss, importance_kind=kind, importance_low=low, importance_high=high, score_centering=centering,
            entropy_bonus=bonus, kl_coefficient=kl, kl_estimator=estimator,
        )  # fmt: skip
        if not objective_problems(objective):
            yield objective


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("is_filtered", [False, True])
def test_every_objective_equals_float64_reference(loss, dtype, is_filtered):
    count = 0
    for objective in objectives(loss):
        batch = Batch(objective, is_filtered)
        rows = batch.mask.nonzero()[:, 0]
        evaluate = batch.evaluation(rows)
        flags = {"token_local": objective.is_token_local, "entropy_gradient": objective.entropy_bonus > 0}
        found, gradients = fused(dtype, evaluate, rows, **flags)
        scores, metrics, expected = materialised(evaluate, batch.mask, rows)
        assert expected["hidden"].norm() > 0
        assert_near(gradients, expected, TOLERANCE[dtype])
        assert found.metrics.keys() == metrics.keys()
        for name in ("labels", "entropy", "top"):
            assert relative(getattr(found.scores, name), getattr(scores, name).detach()) <= TOLERANCE[dtype]
            assert not getattr(found.scores, name).requires_grad
        outside = torch.ones(T).index_fill(0, rows, 0).bool()
        assert (gradients["hidden"][outside] == 0).all() and (gradients["weight"][VOCAB:] == 0).all()
        if dtype == torch.float64:
            for name, value in metrics.items():
                torch.testing.assert_close(found.metrics[name], value)
        count += 1
    assert count >= (8 if loss == "asympo" else 20)


def weighted(coefficients):
    """Not linear, reads all: sum c0 p_label + c1 H^2 + sum c log p_top."""

    def evaluate(scores, part):
        c = coefficients[part]
        loss = (scores.labels.exp() * c[:, 0]).sum() + (scores.entropy.square() * c[:, 1]).sum()
        if scores.top is not None:
            loss = loss + (scores.top * c[:, 2:]).sum()
        return loss, {"rows": torch.tensor(float(len(c))), "most_max": torch.tensor(float(part.stop))}

    return evaluate


def coefficients(tokens=T, with_entropy=True):
    found = torch.randn(tokens, 2 + K, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    return found if with_entropy else found * torch.tensor([1.0, 0.0] + [1.0] * K)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("tokens", [0, 1, 2, 33, T])
@pytest.mark.parametrize("top", [False, True])
@pytest.mark.parametrize("with_entropy,token_local", [(False, True), (True, True), (True, False)])
def test_odd_sizes_tiles_and_temperatures(dtype, tokens, top, with_entropy, token_local):
    factors = coefficients(tokens, with_entropy)
    evaluate = weighted(factors)
    for tile_rows, temperature in ((1, 1.0), (7, 0.7), (32, 1.6), (1000, 1.0)):
        found, gradients = fused(
            dtype, evaluate, None, top, tokens, temperature, tile_rows, token_local=token_local,
            entropy_gradient=with_entropy,
        )  # fmt: skip
        scores, _, expected = materialised(evaluate, factors, None, top, tokens, temperature)
        assert_near(gradients, expected, TOLERANCE[dtype])
        assert found.metrics["rows"] == tokens and found.metrics["most_max"] == tokens
        assert found.scores.labels.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        assert relative(found.scores.labels, scores.labels.detach()) <= TOLERANCE[dtype]


@pytest.mark.parametrize("top", [False, True])
@pytest.mark.parametrize("with_entropy", [False, True])
def test_products_too_small_for_onednn_give_the_same(monkeypatch, top, with_entropy):
    factors = coefficients(with_entropy=with_entropy)
    options = {"top": top, "temperature": 0.7, "entropy_gradient": with_entropy}
    by_onednn = fused(torch.float32, weighted(factors), **options)
    monkeypatch.setattr(onednn_products, "_LEAST", V * H * T)  # what a block takes is less
    monkeypatch.setattr(onednn_products, "product", None)
    by_torch = fused(torch.float32, weighted(factors), **options)
    for name in ("loss", "hidden", "weight"):
        assert relative(by_onednn[1][name], by_torch[1][name]) <= 1e-6
    assert relative(by_onednn[0].scores.labels, by_torch[0].scores.labels) <= 1e-6


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_scoring_gives_the_same_bits_as_the_loss(dtype):
    hidden, weight, labels, top_ids = inputs(dtype)
    rows = torch.arange(1, T, 2)
    size = {"tile_bytes": rows_of_bytes(8, dtype)}
    found, _ = fused(dtype, weighted(coefficients(with_entropy=False)), rows, tile_rows=8)
    scores = chunk_scores(hidden.requires_grad_(), Head(weight, VOCAB), labels, top_ids=top_ids, rows=rows, **size)
    for name in ("labels", "entropy", "top"):
        assert torch.equal(getattr(scores, name), getattr(found.scores, name))
        assert not getattr(scores, name).requires_grad


def test_by_hand():
    """z = (0, log 3), p = (1/4, 3/4), loss 2 log p_1: d z = (-1/2, 1/2), times W for hidden and x for weight."""
    hidden = torch.tensor([[1.0, 2.0]], requires_grad=True)
    weight = torch.tensor([[0.0, 0.0], [math.log(3.0), 0.0]], requires_grad=True)
    found = chunk_loss(hidden, Head(weight, 2), torch.tensor([1]), lambda s, part: (2 * s.labels.sum(), {}))
    found.loss.backward()
    assert found.loss.item() == pytest.approx(2 * math.log(0.75), rel=1e-6)
    assert found.scores.entropy.item() == pytest.approx(-0.75 * math.log(0.75) - 0.25 * math.log(0.25), rel=1e-6)
    assert hidden.grad[0].tolist() == pytest.approx([0.5 * math.log(3.0), 0.0], abs=1e-6)
    assert weight.grad.flatten().tolist() == pytest.approx([-0.5, -1.0, 0.5, 1.0], abs=1e-6)


@pytest.mark.parametrize("loss", ["ppo", "gspo"])
def test_a_ratio_on_both_clip_bounds(loss):
    """Bounds of width 0 and a ratio of exactly 1: the clip's kink, where maximum halves the gradient."""
    objective = PolicyObjective(loss=loss, clip_low=0.0, clip_high=0.0)
    batch = Batch(objective, False)
    hidden, weight, labels, top_ids = inputs()
    size = {"tile_bytes": rows_of_bytes(16, torch.float64)}
    batch.proximal = chunk_scores(hidden, Head(weight, VOCAB), labels, top_ids=top_ids, **size).labels
    found, gradients = fused(torch.float64, batch.evaluation(torch.arange(T)), token_local=objective.is_token_local)
    leaf = batch.proximal.clone().requires_grad_()
    value, _ = batch.evaluation(torch.arange(T))(TokenLogprobs(leaf, leaf, None), slice(0, T))
    (slopes,) = torch.autograd.grad(value, leaf)
    assert found.metrics["ratio"] == found.metrics["tokens"]

    expected = materialised(lambda scores, part: ((scores.labels * slopes[part]).sum(), {}), slopes)[2]
    assert_near(gradients, {**expected, "loss": value.detach()}, 1e-11)


def test_all_masked_is_exactly_zero_whatever_the_rows_hold():
    objective = PolicyObjective(entropy_bonus=0.1, score_centering=True, importance_kind="token_tis")
    batch = Batch(objective, False)
    batch.mask = torch.zeros(T)
    for rows in (torch.arange(T), torch.zeros(0, dtype=torch.int64)):
        found, gradients = fused(torch.float32, batch.evaluation(rows), rows, entropy_gradient=True)
        assert found.loss.item() == 0 and found.metrics["tokens"].item() == 0
        assert (gradients["hidden"] == 0).all() and (gradients["weight"] == 0).all()


def test_rows_left_out_are_not_read():
    hidden, weight, labels, _ = inputs(torch.float32)
    results = []
    for outside in (0.0, math.nan):
        hidden[::2] = outside
        leaf, matrix = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        rows = torch.arange(1, T, 2)
        found = chunk_loss(leaf, Head(matrix, VOCAB), labels, lambda s, part: (s.labels.sum(), {}), rows=rows)
        found.loss.backward()
        results.append((found.loss.detach(), leaf.grad, matrix.grad))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert (results[1][1][::2] == 0).all() and results[1][1].isfinite().all()


@pytest.mark.parametrize("with_entropy", [False, True])
@pytest.mark.parametrize("token_local", [True, False])
def test_rows_without_a_slope_cost_no_gradient_product(monkeypatch, token_local, with_entropy):
    counts = []
    real = tiled.VocabTile.gradients

    def count(self, hidden, *arguments, **options):
        counts.append(len(hidden))
        return real(self, hidden, *arguments, **options)

    monkeypatch.setattr(tiled.VocabTile, "gradients", count)
    factors = coefficients(with_entropy=with_entropy)
    factors[::2] = 0.0
    factors[16:32] = 0.0
    factors[20, 0] = 1.0
    evaluate = weighted(factors)
    options = {"token_local": token_local, "entropy_gradient": with_entropy}
    for dtype in TOLERANCE:
        counts.clear()
        found, gradients = fused(dtype, evaluate, tile_rows=16, **options)
        assert counts == [8, 1, 8, 2]  # of tiles of 16, 16, 16 and 5 rows
        assert_near(gradients, materialised(evaluate, factors)[2], TOLERANCE[dtype])
        assert torch.equal(gradients["hidden"].any(1), factors.any(1))


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_a_sure_token_keeps_its_small_gradient(dtype):
    """p of the label = 1 - 3e-4: the label's entry of d loss / d z is the difference of two numbers close to 1."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight, labels, _ = inputs(dtype, 8)
    hidden = weight[labels].clone()
    weight = (weight.double() + 0.01 * torch.randn(V, H, generator=generator).double()).to(dtype)
    evaluate = lambda s, part: (s.labels.sum(), {})  # noqa: E731
    leaf, matrix = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    found = chunk_loss(leaf, Head(matrix, VOCAB), labels, evaluate)
    found.loss.backward()
    exact_hidden, exact_weight = hidden.double().requires_grad_(), weight.double().requires_grad_()
    scores = naive(exact_hidden, exact_weight, labels, None)
    assert (1 - scores.labels.exp()).median() < 1e-3
    scores.labels.sum().backward()
    tolerance = {torch.float64: 1e-11, torch.float32: 1e-3, torch.bfloat16: 2e-2}[dtype]
    assert relative(leaf.grad, exact_hidden.grad) < tolerance and relative(matrix.grad, exact_weight.grad) < tolerance


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("with_entropy", [False, True])
def test_a_maximum_far_above_the_label_and_the_sample(monkeypatch, dtype, with_entropy):
    """Logits 0 but for one of 60 or 200, which neither the label nor the sample sees: the tile is computed again."""
    monkeypatch.setattr(tiled, "_SAMPLE", 1)
    for peak in (60.0, 200.0):
        weight = torch.zeros(V, 2, dtype=dtype)
        weight[5] = torch.tensor([peak, 0.0])
        weight[1:4, 1] = torch.tensor([0.5, -0.25, 1.0])
        hidden = torch.tensor([[1.0, 1.0]] * 3, dtype=dtype)
        labels, top_ids = torch.tensor([2, 5, 7]), torch.tensor([[5, 2], [5, 1], [9, 8]])

        def evaluate(scores, part):
            loss = scores.labels.sum() + (scores.top * torch.tensor([1.0, 2.0])).sum()
            return loss + (scores.entropy.sum() if with_entropy else 0.0), {}

        leaf, matrix = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        found = chunk_loss(leaf, Head(matrix, VOCAB), labels, evaluate, top_ids=top_ids, entropy_gradient=with_entropy)
        found.loss.backward()
        exact, exact_matrix = hidden.double().requires_grad_(), weight.double().requires_grad_()
        scores = naive(exact, exact_matrix, labels, top_ids)
        evaluate(scores, slice(0, 3))[0].backward()
        assert relative(found.scores.labels, scores.labels.detach()) < TOLERANCE[dtype]
        assert relative(found.scores.top, scores.top.detach()) < TOLERANCE[dtype]
        assert relative(leaf.grad, exact.grad) < TOLERANCE[dtype]
        assert relative(matrix.grad, exact_matrix.grad) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_ids_may_repeat_and_slopes_may_cancel(dtype):
    """The label recorded too, an id twice, and slopes that sum to 0: no probability's share but the corrections."""
    hidden, weight, labels, _ = inputs(dtype, 4)
    top_ids = torch.stack([labels, (labels + 1) % VOCAB, (labels + 1) % VOCAB], 1)
    slopes = torch.tensor([[1.0, 1.0, -1.0, -1.0], [0.5, 0, 0, -0.5], [1, 2, 3, 4], [1e-3, -1e-3, 1, -1]])

    def evaluate(scores, part):
        return (scores.labels * slopes[part, 0]).sum() + (scores.top * slopes[part, 1:]).sum(), {}

    leaf, matrix = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    chunk_loss(leaf, Head(matrix, VOCAB), labels, evaluate, top_ids=top_ids).loss.backward()
    exact, exact_matrix = hidden.double().requires_grad_(), weight.double().requires_grad_()
    evaluate(naive(exact, exact_matrix, labels, top_ids), slice(0, 4))[0].backward()
    assert relative(leaf.grad, exact.grad) < TOLERANCE[dtype]
    assert relative(matrix.grad, exact_matrix.grad) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_the_gradient_that_arrives_scales_and_is_used_once(dtype):
    evaluate = weighted(coefficients(with_entropy=False))
    _, once = fused(dtype, evaluate)
    _, scaled = fused(dtype, evaluate, scale=0.25)
    assert torch.equal(scaled["hidden"], once["hidden"] * 0.25) and torch.equal(scaled["weight"], once["weight"] * 0.25)
    hidden, weight, labels, top_ids = inputs(dtype)
    found = chunk_loss(hidden, Head(weight.requires_grad_(), VOCAB), labels, evaluate, top_ids=top_ids)
    found.loss.backward(retain_graph=True)
    assert hidden.grad is None and weight.grad.norm() > 0
    with pytest.raises(RuntimeError, match="call chunk_loss again"):
        found.loss.backward()


def test_without_gradients_there_is_a_loss_all_the_same():
    hidden, weight, labels, top_ids = inputs(torch.float32)
    factors = coefficients()
    evaluate = weighted(factors)
    with torch.no_grad():
        found = chunk_loss(hidden, Head(weight.requires_grad_(), VOCAB), labels, evaluate, top_ids=top_ids,
                           entropy_gradient=True)  # fmt: skip
    assert not found.loss.requires_grad
    assert relative(found.loss, materialised(evaluate, factors)[2]["loss"]) < 1e-5


def test_an_unannounced_entropy_gradient_is_refused():
    with pytest.raises(ValueError, match="entropy_gradient=True"):
        fused(torch.float32, weighted(coefficients()))


def test_sums_over_many_tiles_lose_nothing_in_float32():
    """d(weight) of 53 tiles of one row. In bf16 each addition rounds: on a sum of like signs the error grows."""
    factors = torch.ones(T, dtype=torch.float64)
    evaluate = lambda s, part: ((s.labels * factors[part]).sum(), {})  # noqa: E731
    expected = materialised(evaluate, factors, top=False)[2]["weight"]
    errors = {}
    for dtype in (None, torch.float32, torch.bfloat16):
        found = fused(torch.bfloat16, evaluate, top=False, tile_rows=1, weight_gradient_dtype=dtype)[1]["weight"]
        assert found.dtype == torch.bfloat16
        errors[dtype] = relative(found, expected)
    assert errors[None] == errors[torch.float32] < 4e-3
    assert errors[torch.bfloat16] > errors[torch.float32]


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("token_local", [True, False])
@pytest.mark.parametrize("vocab_size", [VOCAB, 9])  # 9 of 40: the last ranks of four hold padding alone
def test_shards_combine_to_the_whole_with_one_message_a_tile(monkeypatch, tp, token_local, vocab_size):
    """The all-reduce adds up what each rank would send, computed beforehand. d(hidden): the ranks' sum."""
    hidden, weight, labels, top_ids = inputs()
    labels, top_ids = labels % vocab_size, top_ids % vocab_size
    evaluate, rows = weighted(coefficients()), torch.arange(3, T)

    size = {"tile_bytes": rows_of_bytes(13, torch.float64, V // tp)}

    def run(head_weight, group):
        leaf, matrix = hidden.clone().requires_grad_(), head_weight.clone().requires_grad_()
        found = chunk_loss(
            leaf, Head(matrix, vocab_size, 0.8, group), labels, evaluate, top_ids=top_ids, rows=rows,
            token_local=token_local, entropy_gradient=True, **size,
        )  # fmt: skip
        found.loss.backward()
        return found, leaf.grad, matrix.grad

    whole = run(weight, None)
    shards, sent = weight.chunk(tp), []
    for rank in range(tp):
        own = []
        monkeypatch.setattr(dist, "all_reduce", lambda numbers, group, own=own: own.append(numbers.clone()))
        with torch.no_grad():
            head = Head(shards[rank], vocab_size, 0.8, TensorRank(rank, tp))
            chunk_scores(hidden, head, labels, top_ids=top_ids, rows=rows, **size)
        sent.append(own)
    assert all([len(numbers) for numbers in own] == [13, 13, 13, 11] for own in sent)  # padding or not
    assert all(numbers.shape[1] == 1 + K + 3 * tp for own in sent for numbers in own)  # as the module's docstring says
    totals = [torch.stack(numbers).sum(0) for numbers in zip(*sent, strict=True)]
    parts = []
    for rank in range(tp):
        waiting = list(totals)
        monkeypatch.setattr(dist, "all_reduce", lambda numbers, group, w=waiting: numbers.copy_(w.pop(0)))
        found, to_hidden, to_weight = run(shards[rank], TensorRank(rank, tp))
        assert not waiting  # one message a tile: none in a second walk, none in backward
        parts.append(to_hidden)
        torch.testing.assert_close(found.loss, whole[0].loss, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(found.scores.top, whole[0].scores.top, rtol=1e-11, atol=1e-11)
        torch.testing.assert_close(to_weight, whole[2].chunk(tp)[rank], rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(sum(parts), whole[1], rtol=1e-10, atol=1e-12)
