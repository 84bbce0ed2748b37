"""Log-probs and entropy over a sharded vocabulary, against a float64 reference made of torch's own operators."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from megatron_ac2.kernels import vocab_logprobs
from megatron_ac2.kernels.vocab_logprobs import (
    OUTSIDE_LOGPROB,
    restricted_logprobs,
    token_logprobs,
)
from tests.unit.tensor_rank import TensorRank

K = 4


def reference(logits, labels, top_ids, temperature, vocab_size):
    logp = torch.log_softmax(logits[..., :vocab_size] / temperature, -1)
    picked = logp.gather(-1, labels[..., None]).squeeze(-1)
    return picked, -(logp.exp() * logp).sum(-1), None if top_ids is None else logp.gather(-1, top_ids)


def ours(logits, labels, top_ids, temperature, vocab_size, group=None):
    found = token_logprobs(logits, labels, group, temperature, vocab_size, top_ids)
    return found.labels, found.entropy, found.top


def case(dtype=torch.float64, shape=(3, 5), width=24, vocab_size=19, scale=4.0):
    """Logits, labels, K ids a row and weights of the outputs. Row 0: distinct ids, the label first; last row: zeros."""
    generator = torch.Generator().manual_seed(0)
    logits = (torch.randn(*shape, width, generator=generator, dtype=torch.float64) * scale).to(dtype)
    labels = torch.randint(0, vocab_size, shape, generator=generator)
    top_ids = torch.randint(0, vocab_size, (*shape, K), generator=generator)
    flat_ids, flat_labels = top_ids.view(-1, K), labels.view(-1)
    flat_ids[0] = (flat_labels[0] + torch.arange(K)) % vocab_size
    flat_ids[-1] = flat_labels[-1] = 0
    weights = torch.randn(*shape, 2 + K, generator=generator, dtype=torch.float64)
    return logits, labels, top_ids, weights


def value_and_gradient(function, logits, weights):
    """The outputs of `function` (logits -> labels, entropy, top) side by side, and d (weights * outputs) / d logits."""
    logits = logits.detach().clone().requires_grad_()
    labels, entropy, top = function(logits)
    columns = [labels[..., None], entropy[..., None], *([] if top is None else [top])]
    outputs = torch.cat(columns, -1).double()
    (outputs * weights[..., : outputs.shape[-1]]).sum().backward()
    return outputs.detach(), logits.grad


def test_by_hand():
    logits = torch.tensor([[0.0, math.log(3.0)]])  # p = 1/4, 3/4
    found = token_logprobs(logits, torch.tensor([1]), None, 1.0, 2, torch.tensor([[1, 0]]))
    assert found.labels.item() == pytest.approx(math.log(0.75), rel=1e-6)
    assert found.entropy.item() == pytest.approx(-0.75 * math.log(0.75) - 0.25 * math.log(0.25), rel=1e-6)
    assert found.top.tolist()[0] == pytest.approx([math.log(0.75), math.log(0.25)], rel=1e-6)


def test_gradient_by_hand():
    """p = 1/4, 3/4; 2 log p_1 (label) + 5 log p_1 + 3 log p_0 (recorded): d/dz = [3, 7] - 10 p = [0.5, -0.5]."""
    logits = torch.tensor([[0.0, math.log(3.0)]], requires_grad=True)
    found = token_logprobs(logits, torch.tensor([1]), None, 1.0, 2, torch.tensor([[1, 0]]))
    (2 * found.labels.sum() + (found.top * torch.tensor([5.0, 3.0])).sum()).backward()
    assert logits.grad.tolist()[0] == pytest.approx([0.5, -0.5], abs=1e-6)


@pytest.mark.parametrize("temperature", [1.0, 0.8, 2.0])
@pytest.mark.parametrize("vocab_size", [19, 24, 1])
@pytest.mark.parametrize("tile_elements", [1, 50, 1 << 24])
@pytest.mark.parametrize("recorded", [False, True])
def test_equals_float64_reference(monkeypatch, temperature, vocab_size, tile_elements, recorded):
    monkeypatch.setattr(vocab_logprobs, "_TILE_ELEMENTS", tile_elements)
    logits, labels, top_ids, weights = case(vocab_size=vocab_size)
    rest = (labels, top_ids if recorded else None, temperature, vocab_size)
    found = value_and_gradient(lambda x: ours(x, *rest), logits, weights)
    expected = value_and_gradient(lambda x: reference(x, *rest), logits, weights)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


def test_recorded_tokens_change_nothing_of_the_others():
    logits, labels, top_ids, _ = case()
    found = token_logprobs(logits, labels, None, 0.8, 19)
    assert found.top is None
    none = token_logprobs(logits, labels, None, 0.8, 19, torch.zeros(3, 5, 0, dtype=torch.int64))
    assert none.top.shape == (3, 5, 0)
    for other in (none, token_logprobs(logits, labels, None, 0.8, 19, top_ids)):
        assert torch.equal(found.labels, other.labels) and torch.equal(found.entropy, other.entropy)


def test_all_of_the_vocabulary_recorded_sums_to_one():
    logits, labels, _, _ = case()
    top = token_logprobs(logits, labels, None, 0.8, 19, torch.arange(19).expand(3, 5, 19)).top
    torch.testing.assert_close(top.exp().sum(-1), torch.ones(3, 5, dtype=torch.float64))


@pytest.mark.parametrize("output", ["labels", "entropy", "top"])
def test_an_output_that_the_loss_ignores_needs_no_coefficient(output):
    logits, labels, top_ids, _ = case()
    logits.requires_grad_()
    found = token_logprobs(logits, labels, None, 0.8, 19, top_ids)
    position = ("labels", "entropy", "top").index(output)
    expected = reference(logits, labels, top_ids, 0.8, 19)[position]
    (gradient,) = torch.autograd.grad(getattr(found, output).sum(), logits)
    torch.testing.assert_close(gradient, torch.autograd.grad(expected.sum(), logits)[0], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("dtype,tolerance", [(torch.float32, 4e-6), (torch.bfloat16, 8e-3)])
def test_low_precision_logits_accumulate_in_float32(dtype, tolerance):
    logits, labels, top_ids, weights = case(dtype)
    found = token_logprobs(logits, labels, None, 0.8, 19, top_ids)
    assert found.labels.dtype == found.entropy.dtype == found.top.dtype == torch.float32
    values, gradient = value_and_gradient(lambda x: ours(x, labels, top_ids, 0.8, 19), logits, weights)
    exact = value_and_gradient(lambda x: reference(x, labels, top_ids, 0.8, 19), logits.double(), weights)
    assert gradient.dtype == dtype
    torch.testing.assert_close(values, exact[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(gradient.double(), exact[1], rtol=tolerance, atol=tolerance)


def test_gradcheck():
    logits, labels, top_ids, _ = case(shape=(4,), width=6, vocab_size=5)
    logits.requires_grad_()
    assert torch.autograd.gradcheck(lambda x: ours(x, labels, top_ids, 0.7, 5), logits)


def test_a_second_derivative_is_refused():
    logits, labels, _, _ = case()
    logits.requires_grad_()
    found = token_logprobs(logits, labels, None, 1.0, 19)
    (gradient,) = torch.autograd.grad(found.labels.square().sum(), logits, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


def test_padded_columns_have_no_probability_and_no_gradient():
    logits, labels, top_ids, weights = case()
    huge = logits.clone()
    huge[..., 19:] = 1e4
    found = [value_and_gradient(lambda y: ours(y, labels, top_ids, 1.0, 19), x, weights) for x in (logits, huge)]
    assert torch.equal(found[0][0], found[1][0]) and torch.equal(found[0][1], found[1][1])
    assert found[1][1][..., 19:].abs().max() == 0


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("vocab_size", [19, 9])  # 9 of 24 columns: the last ranks of four hold padding alone
def test_shards_combine_to_the_whole(monkeypatch, tp, vocab_size):
    """The all-reduce adds up what each rank would send, computed here beforehand."""
    logits, labels, top_ids, weights = case(vocab_size=vocab_size)
    whole = value_and_gradient(lambda x: ours(x, labels, top_ids, 0.8, vocab_size), logits, weights)
    shards, sent = logits.chunk(tp, -1), []
    monkeypatch.setattr(dist, "all_reduce", lambda numbers, group: sent.append(numbers.clone()))
    for rank in range(tp):
        token_logprobs(shards[rank], labels, TensorRank(rank, tp), 0.8, vocab_size, top_ids)
    assert all(numbers.shape == (15, 1 + K + 3 * tp) for numbers in sent)  # what the module's docstring promises
    total = torch.stack(sent).sum(0)
    monkeypatch.setattr(dist, "all_reduce", lambda numbers, group: numbers.copy_(total))
    for rank in range(tp):
        values, gradient = value_and_gradient(
            lambda x, rank=rank: ours(x, labels, top_ids, 0.8, vocab_size, TensorRank(rank, tp)), shards[rank], weights
        )
        torch.testing.assert_close(values, whole[0], rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(gradient, whole[1].chunk(tp, -1)[rank], rtol=1e-12, atol=1e-12)


def test_large_logits_do_not_overflow():
    logits = torch.tensor([[3e4, -3e4, 0.0]], requires_grad=True)
    found = token_logprobs(logits, torch.tensor([0]), None, 0.5, 3, torch.tensor([[1, 2]]))
    assert found.labels.item() == 0 and found.entropy.item() == 0
    assert found.top.tolist() == [[-1.2e5, -6e4]]
    (found.labels.sum() + found.entropy.sum() + found.top.sum()).backward()
    assert logits.grad.tolist() == [[-4.0, 2.0, 2.0]]  # ([1, 1, 1] - 3 p) / 0.5, p = [1, 0, 0]


def test_no_row():
    logits = torch.zeros(1, 0, 24, requires_grad=True)
    found = token_logprobs(logits, torch.zeros(1, 0, dtype=torch.int64), None, 1.0, 19, torch.zeros(1, 0, K).long())
    assert found.labels.shape == found.entropy.shape == (1, 0) and found.top.shape == (1, 0, K)
    found.top.sum().backward()
    assert logits.grad.shape == (1, 0, 24)


def test_restricted_by_hand():
    """p = .5, .3, .1 recorded, the first two kept: .5 / .8 and .3 / .8; the third is out, the label is the second."""
    top = torch.tensor([[0.5, 0.3, 0.1]], dtype=torch.float64).log()
    label, restricted = restricted_logprobs(top[:, 1], top, torch.tensor([[True, True, False]]))
    assert label.tolist() == pytest.approx([math.log(0.375)])
    assert restricted.tolist()[0] == pytest.approx([math.log(0.625), math.log(0.375), OUTSIDE_LOGPROB])
    assert restricted[0, 2].exp() == 0 and restricted[0, 2].float().exp() == 0


def test_restricted_through_the_kernel_is_the_softmax_of_the_support():
    """Distinct ids, the label among them, every support from one token to all: log_softmax over those logits alone."""
    logits, _, _, weights = case(shape=(K,))
    top_ids = torch.stack([torch.randperm(19, generator=torch.Generator().manual_seed(i))[:K] for i in range(K)])
    labels, support = top_ids[:, 0], torch.ones(K, K).tril().bool()

    def restricted(x):
        found = token_logprobs(x, labels, None, 0.7, 19, top_ids)
        label, top = restricted_logprobs(found.labels, found.top, support)
        return label, torch.zeros_like(label), top.masked_fill(~support, 0.0)

    def expected(x):
        kept = (x.gather(-1, top_ids) / 0.7).masked_fill(~support, -math.inf)
        top = torch.log_softmax(kept, -1).masked_fill(~support, 0.0)
        return top[:, 0], torch.zeros(K), top

    torch.testing.assert_close(
        value_and_gradient(restricted, logits, weights), value_and_gradient(expected, logits, weights)
    )


def test_an_empty_support_leaves_the_label_and_gives_no_gradient_to_the_top():
    label = torch.tensor([-1.5, -2.0], dtype=torch.float64, requires_grad=True)
    top = torch.full((2, 3), -math.inf, dtype=torch.float64)
    top[1] = math.nan
    top.requires_grad_()
    found, restricted = restricted_logprobs(label, top, torch.zeros(2, 3, dtype=torch.bool))
    assert torch.equal(found, label) and (restricted == OUTSIDE_LOGPROB).all()
    (found.sum() + restricted.sum()).backward()
    assert label.grad.tolist() == [1, 1] and (top.grad == 0).all()


def test_what_is_outside_of_the_support_is_not_read():
    support = torch.tensor([[True, False, True]])
    results = []
    for outside in (-1.0, math.nan, math.inf, -math.inf):
        top = torch.tensor([[-0.5, outside, -3.0]], dtype=torch.float64, requires_grad=True)
        label, restricted = restricted_logprobs(torch.tensor([-0.5], dtype=torch.float64), top, support)
        (label.sum() + 2 * restricted.exp().sum() + restricted.sum()).backward()
        results.append(torch.cat([label[:, None], restricted, top.grad], 1).detach())
    assert all(torch.equal(result, results[0]) for result in results)
    assert results[0].isfinite().all() and results[0][0, 5] == 0


def test_a_label_outside_of_the_support_stays_finite():
    """log .4 - log .2 = log 2: no log-prob, but nothing that a ratio could not clip."""
    label, _ = restricted_logprobs(torch.tensor([0.4]).log(), torch.tensor([[0.2]]).log(), torch.tensor([[True]]))
    assert label.item() == pytest.approx(math.log(2), rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_restricted_half_precision_is_computed_in_float32(dtype):
    top = torch.tensor([[-1.0, -2.0, -9.0]]).to(dtype)
    label, restricted = restricted_logprobs(top[:, 0], top, torch.tensor([[True, True, False]]))
    assert label.dtype == restricted.dtype == torch.float32
    assert label.item() == pytest.approx(-math.log1p(math.exp(-1)), rel=1e-6)


@given(
    logprobs=st.lists(st.floats(-200, 0), min_size=1, max_size=6),
    kept=st.integers(1, 6),
)
def test_restricted_probabilities_sum_to_one(logprobs, kept):
    top = torch.tensor(logprobs, dtype=torch.float64, requires_grad=True)
    support = torch.arange(len(logprobs)) < kept
    label, restricted = restricted_logprobs(top[0], top, support)
    assert restricted.exp().sum().item() == pytest.approx(1.0, rel=1e-9)
    assert label.item() == restricted[0].item() <= 1e-12
    label.backward()
    assert top.grad.isfinite().all() and abs(top.grad.sum().item()) < 1e-9  # a constant added to all changes nothing
