"""Log-probs over a vocabulary on 2 and on 4 tensor ranks against one process and torch's log_softmax in float64: from
logits, and fused with the output layer.

usage: torchrun --nproc_per_node=4 chunk_loss_cases.py
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from megatron_ac2.kernels.chunk_loss import Head, chunk_loss
from megatron_ac2.kernels.vocab_logprobs import token_logprobs
from megatron_ac2.parallel.collectives import all_ranks_agree

SHAPE, WIDTH, HIDDEN, K = (2, 6), 32, 8, 5
TEMPERATURE = 0.8
VOCAB_SIZES = (32, 27, 7)  # no padding; the last rank has some; of four ranks, three hold padding alone


def make_case(vocab_size: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Logits, labels, ids and coefficients [..., 2 + K]. Row 0 records the label too, the last row zeros only."""
    generator = torch.Generator().manual_seed(vocab_size)
    logits = 4 * torch.randn(*SHAPE, WIDTH, generator=generator, dtype=torch.float64)
    logits[..., vocab_size:] = 50.0
    labels = torch.randint(0, vocab_size, SHAPE, generator=generator)
    top_ids = torch.randint(0, vocab_size, (*SHAPE, K), generator=generator)
    top_ids[0, 0, 0] = labels[0, 0]
    top_ids[-1, -1] = labels[-1, -1] = 0
    coefficients = torch.randn(*SHAPE, 2 + K, generator=generator, dtype=torch.float64)
    return logits.to(dtype), labels, top_ids, coefficients


def run(logits, labels, top_ids, coefficients, group, vocab_size):  # type: ignore[no-untyped-def]
    logits = logits.detach().clone().requires_grad_()
    found = token_logprobs(logits, labels, group, TEMPERATURE, vocab_size, top_ids)
    values = torch.cat([found.labels[..., None], found.entropy[..., None], found.top], -1)
    (values * coefficients).sum().backward()
    return values.detach(), logits.grad


def reference(logits, labels, top_ids, coefficients, vocab_size):  # type: ignore[no-untyped-def]
    logits = logits.detach().double().requires_grad_()
    logp = torch.log_softmax(logits[..., :vocab_size] / TEMPERATURE, -1)
    picked = logp.gather(-1, torch.cat([labels[..., None], top_ids], -1))
    entropy = -(logp.exp() * logp).sum(-1, keepdim=True)
    values = torch.cat([picked[..., :1], entropy, picked[..., 1:]], -1)
    (values * coefficients).sum().backward()
    return values.detach(), logits.grad


def check(group: dist.ProcessGroup, vocab_size: int, dtype: torch.dtype, tolerance: float) -> None:
    case = make_case(vocab_size, dtype)
    shard = case[0].chunk(group.size(), -1)[group.rank()]
    values, gradient = run(shard, *case[1:], group, vocab_size)
    all_ranks_agree(values.numpy().tobytes(), "log-probs")  # the same bits on every tensor rank
    for expected in (run(*case, None, vocab_size), reference(*case, vocab_size)):
        own = expected[1].chunk(group.size(), -1)[group.rank()]
        torch.testing.assert_close(values.double(), expected[0].double(), rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(gradient.double(), own.double(), rtol=10 * tolerance, atol=10 * tolerance)


def check_fused(group: dist.ProcessGroup, vocab_size: int, dtype: torch.dtype, tolerance: float) -> None:
    """Tiles of five tokens on every rank; scores, d(weight) of the rank's rows, d(hidden) summed over ranks."""
    _, labels, top_ids, coefficients = (x.flatten(0, 1) for x in make_case(vocab_size, dtype))
    generator = torch.Generator().manual_seed(vocab_size)
    hidden = torch.randn(len(labels), HIDDEN, generator=generator, dtype=torch.float64).bfloat16().to(dtype)
    weight = torch.randn(WIDTH, HIDDEN, generator=generator, dtype=torch.float64).bfloat16().to(dtype)
    weight[vocab_size:] = 50.0
    own = weight.chunk(group.size())[group.rank()].clone().requires_grad_()
    leaf = hidden.clone().requires_grad_()

    def objective(scores, part):  # type: ignore[no-untyped-def]
        values = torch.cat([scores.labels[:, None], scores.entropy[:, None], scores.top], 1)
        return (values * coefficients[part]).sum(), {}

    for token_local in (True, False):
        leaf.grad = own.grad = None
        found = chunk_loss(
            leaf, Head(own, vocab_size, TEMPERATURE, group), labels, objective, top_ids=top_ids,
            token_local=token_local, entropy_gradient=True, tile_bytes=5 * (WIDTH // group.size() + 1) * dtype.itemsize,
        )  # fmt: skip
        all_ranks_agree(found.scores.top.numpy().tobytes() + found.loss.detach().numpy().tobytes(), "scores, loss")
        found.loss.backward()
        to_hidden = leaf.grad.double()
        dist.all_reduce(to_hidden, group=group)
        exact, exact_weight = (x.double().clone().requires_grad_() for x in (hidden, weight))
        values, to_logits = reference(exact @ exact_weight.t(), labels, top_ids, coefficients, vocab_size)
        (exact @ exact_weight.t()).backward(to_logits)
        top = found.scores.top.double()
        expected = ((top, values[:, 2:]), (to_hidden, exact.grad),
                    (own.grad.double(), exact_weight.grad.chunk(group.size())[group.rank()]))  # fmt: skip
        for ours, theirs in expected:
            assert (ours - theirs).norm() <= tolerance * theirs.norm()


def main() -> None:
    dist.init_process_group("gloo")
    pairs, _ = dist.new_subgroups(2)
    for group in (pairs, dist.group.WORLD):
        for vocab_size in VOCAB_SIZES:
            check(group, vocab_size, torch.float64, 1e-12)
            check(group, vocab_size, torch.float32, 2e-6)
            for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 1e-2)):
                check_fused(group, vocab_size, dtype, tolerance)
        if dist.get_rank() == 0:
            print("passed", group.size(), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
