"""The vocabulary-parallel log-prob and entropy against a float64 reference made of torch's own operators."""

from __future__ import annotations

import math

import pytest
import torch

from megatron_ac2.kernels import chunk_loss
from megatron_ac2.kernels.chunk_loss import vocab_parallel_logprobs_and_entropy


def reference(logits, labels, temperature, vocab_size):
    logp = torch.log_softmax(logits[..., :vocab_size] / temperature, -1)
    return logp.gather(-1, labels[..., None]).squeeze(-1), -(logp.exp() * logp).sum(-1)


def case(dtype=torch.float64, shape=(3, 5), width=24, vocab_size=19, scale=4.0):
    generator = torch.Generator().manual_seed(0)
    logits = (torch.randn(*shape, width, generator=generator, dtype=torch.float64) * scale).to(dtype)
    labels = torch.randint(0, vocab_size, shape, generator=generator)
    weights = torch.randn(2, *shape, generator=generator, dtype=torch.float64)
    return logits, labels, weights


def value_and_gradient(function, logits, weights):
    logits = logits.detach().clone().requires_grad_()
    logprobs, entropy = function(logits)
    ((logprobs.double() * weights[0]).sum() + (entropy.double() * weights[1]).sum()).backward()
    return logprobs.detach(), entropy.detach(), logits.grad


def test_by_hand():
    logits = torch.tensor([[0.0, math.log(3.0)]])
    logprobs, entropy = vocab_parallel_logprobs_and_entropy(logits, torch.tensor([1]), None, 1.0, 2)
    assert logprobs.item() == pytest.approx(math.log(0.75), rel=1e-6)
    assert entropy.item() == pytest.approx(-0.75 * math.log(0.75) - 0.25 * math.log(0.25), rel=1e-6)


@pytest.mark.parametrize("temperature", [1.0, 0.8, 2.0])
@pytest.mark.parametrize("vocab_size", [19, 24, 1])
@pytest.mark.parametrize("tile_elements", [1, 50, 1 << 24])
def test_equals_float64_reference(monkeypatch, temperature, vocab_size, tile_elements):
    monkeypatch.setattr(chunk_loss, "_TILE_ELEMENTS", tile_elements)
    logits, labels, weights = case(vocab_size=vocab_size)
    ours = value_and_gradient(
        lambda x: vocab_parallel_logprobs_and_entropy(x, labels, None, temperature, vocab_size), logits, weights
    )
    theirs = value_and_gradient(lambda x: reference(x, labels, temperature, vocab_size), logits, weights)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("dtype,tolerance", [(torch.float32, 2e-6), (torch.bfloat16, 8e-3)])
def test_low_precision_logits_accumulate_in_float32(dtype, tolerance):
    logits, labels, weights = case(dtype)
    logprobs, entropy, gradient = value_and_gradient(
        lambda x: vocab_parallel_logprobs_and_entropy(x, labels, None, 0.8, 19), logits, weights
    )
    exact = value_and_gradient(lambda x: reference(x, labels, 0.8, 19), logits.double(), weights)
    assert logprobs.dtype == entropy.dtype == torch.float32 and gradient.dtype == dtype
    torch.testing.assert_close(logprobs.double(), exact[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(entropy.double(), exact[1], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(gradient.double(), exact[2], rtol=tolerance, atol=tolerance)


def test_gradcheck():
    logits, labels, _ = case(shape=(4,), width=6, vocab_size=5)
    logits.requires_grad_()
    assert torch.autograd.gradcheck(lambda x: vocab_parallel_logprobs_and_entropy(x, labels, None, 0.7, 5), logits)


def test_padded_columns_have_no_probability_and_no_gradient():
    logits, labels, weights = case()
    huge = logits.clone()
    huge[..., 19:] = 1e4
    run = lambda x: value_and_gradient(  # noqa: E731
        lambda y: vocab_parallel_logprobs_and_entropy(y, labels, None, 1.0, 19), x, weights
    )
    for a, b in zip(run(logits), run(huge), strict=True):
        assert torch.equal(a, b)
    assert run(huge)[2][..., 19:].abs().max() == 0


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("vocab_size", [19, 9])  # 9 of 24 columns: the last ranks of four hold padding alone
def test_shards_combine_to_the_whole(monkeypatch, tp, vocab_size):
    """Ranks played one after the other: the gathered parts are computed here, the group is a stand-in."""
    logits, labels, weights = case(vocab_size=vocab_size)
    whole = value_and_gradient(
        lambda x: vocab_parallel_logprobs_and_entropy(x, labels, None, 0.8, vocab_size), logits, weights
    )
    shards = logits.chunk(tp, -1)
    width = shards[0].shape[-1]

    class Group:
        def __init__(self, rank):
            self._rank = rank

        def rank(self):
            return self._rank

        def size(self):
            return tp

    every = []
    for rank in range(tp):
        columns, first = chunk_loss._own_columns(width, Group(rank), vocab_size)
        flat = shards[rank].reshape(-1, width)
        every.append(chunk_loss._local_parts(flat, labels.reshape(-1) - first, columns, 0.8))
    monkeypatch.setattr(chunk_loss, "_gather", lambda parts, group: torch.stack(every))
    for rank in range(tp):
        logprobs, entropy, gradient = value_and_gradient(
            lambda x, rank=rank: vocab_parallel_logprobs_and_entropy(x, labels, Group(rank), 0.8, vocab_size),
            shards[rank],
            weights,
        )
        torch.testing.assert_close(logprobs, whole[0], rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(entropy, whole[1], rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(gradient, whole[2].chunk(tp, -1)[rank], rtol=1e-12, atol=1e-12)
        assert torch.isfinite(gradient).all()


def test_large_logits_do_not_overflow():
    logits = torch.tensor([[3e4, -3e4, 0.0]])
    logprobs, entropy = vocab_parallel_logprobs_and_entropy(logits, torch.tensor([0]), None, 0.5, 3)
    assert logprobs.item() == 0 and entropy.item() == 0
