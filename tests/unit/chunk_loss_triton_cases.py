"""The chunk loss with backend "triton" in Triton's interpreter, against float64 logits and torch's log_softmax.

usage: TRITON_INTERPRET=1 chunk_loss_triton_cases.py  prints {case: {what: relative error}} as JSON
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace

import torch

from megatron_ac2.algorithm.objective import PolicyTokens, policy_loss
from megatron_ac2.algorithm.objective_parts import PolicyObjective
from megatron_ac2.kernels.chunk_loss import Head, chunk_loss, chunk_scores
from megatron_ac2.kernels.vocab_logprobs import TokenLogprobs
from megatron_ac2.kernels.vocab_shards import combine


@dataclass(frozen=True)
class Case:
    """Blocks are [16, 16, 16]: nothing here is a multiple of them."""

    objective: PolicyObjective | None = PolicyObjective()  # None: a square of sums, over all rows at once
    dtype: torch.dtype = torch.float32
    tokens: int = 5
    vocab: int = 37
    width: int = 37  # of the weight: rows beyond the vocabulary hold NaN
    hidden: int = 24
    top: int = 0
    temperature: float = 1.0
    tile_rows: int = 100
    every: int = 1  # rows: each second, ...
    dead: int = 0  # each second row, ..., gets no slope
    scale: float = 1.0  # of the logits
    peak: float = 0.0  # of one logit that no sample sees


CASES = {
    "default": Case(),
    "default, bf16": Case(dtype=torch.bfloat16),
    "score centering": Case(PolicyObjective(score_centering=True), top=4),
    "score centering, bf16": Case(PolicyObjective(score_centering=True), torch.bfloat16, top=4),
    "entropy": Case(PolicyObjective(entropy_bonus=0.3), temperature=0.7),
    "entropy, bf16": Case(PolicyObjective(entropy_bonus=0.3), torch.bfloat16, temperature=1.6),
    "entropy and centering": Case(PolicyObjective(entropy_bonus=0.3, score_centering=True), top=4),
    "two walks": Case(None, top=4, tile_rows=2),
    "two walks, bf16": Case(None, torch.bfloat16, top=4, tile_rows=3),
    "padding": Case(None, width=48, top=2, temperature=0.7),
    "padding, bf16": Case(None, torch.bfloat16, width=48, top=2),
    "several tiles": Case(tokens=37, tile_rows=16),
    "several tiles, bf16": Case(dtype=torch.bfloat16, tokens=37, tile_rows=16),
    "some rows": Case(tokens=9, every=2),
    "few live rows": Case(tokens=37, tile_rows=16, dead=2),
    "few live rows, bf16": Case(PolicyObjective(score_centering=True), torch.bfloat16, top=4, tokens=37, dead=2),
    "few live rows, two walks": Case(None, top=4, tokens=21, tile_rows=16, dead=2),
    "whole blocks": Case(tokens=32, vocab=48, width=48, hidden=32),
    "one token": Case(tokens=1),
    "no token": Case(tokens=0),
    "one word": Case(vocab=1, width=3),
    "sure tokens": Case(scale=2.2),
    "sure tokens, bf16": Case(dtype=torch.bfloat16, scale=2.2),
    "a maximum unseen": Case(PolicyObjective(entropy_bonus=0.3), vocab=600, width=600, peak=60.0),
    "a maximum unseen, bf16": Case(dtype=torch.bfloat16, vocab=600, width=600, peak=300.0),
}


class Inputs:
    def __init__(self, case: Case, device: str = "cpu"):
        generator = torch.Generator().manual_seed(0)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        self.case = case
        self.rows = torch.arange(0, case.tokens, case.every)
        hidden = normal(case.tokens, case.hidden)
        weight = case.scale * normal(case.width, case.hidden) / case.hidden**0.5
        self.labels = torch.randint(0, case.vocab, (case.tokens,), generator=generator)
        self.top_ids = torch.randint(0, case.vocab, (case.tokens, case.top), generator=generator)
        if case.top:
            self.top_ids[::2, 0] = self.labels[::2]
        if case.peak:
            hidden[:, 0] = 1.0
            weight[3, 0] = case.peak  # the sample takes every second row
        if case.scale > 1:
            hidden = weight[self.labels] * 3
        weight[case.vocab :] = torch.nan
        self.hidden, self.weight = hidden.to(device, case.dtype), weight.to(device, case.dtype)
        self.rows, self.labels, self.top_ids = (x.to(device) for x in (self.rows, self.labels, self.top_ids))
        self.signs, self.noise = normal(case.tokens).to(device), 0.3 * normal(case.tokens).to(device)
        if case.dead:
            self.signs[:: case.dead] = 0.0
        exact = self.exact(self.hidden.double(), self.weight.double())
        self.proximal = exact.labels - self.noise[self.rows]
        self.behavior_top = None if exact.top is None else exact.top - 0.2

    def exact(self, hidden: torch.Tensor, weight: torch.Tensor) -> TokenLogprobs:
        logits = hidden[self.rows] @ weight[: self.case.vocab].t() / self.case.temperature
        logp = torch.log_softmax(logits, -1)
        top = logp.gather(1, self.top_ids[self.rows]) if self.case.top else None
        return TokenLogprobs(logp.gather(1, self.labels[self.rows, None])[:, 0], -(logp.exp() * logp).sum(1), top)

    def evaluate(self, scores: TokenLogprobs, part: slice) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        signs, dtype = self.signs[self.rows][part].to(scores.labels.dtype), scores.labels.dtype
        if self.case.objective is None:
            parts = [(signs * scores.labels).sum(), (signs * scores.entropy).sum(), (signs[:, None] * scores.top).sum()]
            return sum(x + 0.1 * x * x for x in parts), {}
        tokens = PolicyTokens(
            current=scores.labels, proximal=self.proximal[part].to(dtype), behavior=self.proximal[part].to(dtype),
            advantages=signs, mask=torch.ones_like(signs), sequence_ids=torch.zeros_like(signs).long(),
            num_sequences=1, entropy=scores.entropy, top_current=scores.top,
            top_behavior=None if scores.top is None else self.behavior_top[part].to(dtype),
        )  # fmt: skip
        return policy_loss(tokens, self.case.objective, 1.0)

    def fused(self, backend: str, evaluate=None):  # type: ignore[no-untyped-def]
        case = self.case
        hidden, weight = self.hidden.clone().requires_grad_(), self.weight.clone().requires_grad_()
        with_entropy = case.objective is None or bool(case.objective.entropy_bonus)
        found = chunk_loss(
            hidden, Head(weight, case.vocab, case.temperature), self.labels, evaluate or self.evaluate,
            top_ids=self.top_ids if case.top else None, rows=self.rows if case.every > 1 else None,
            token_local=case.objective is not None, entropy_gradient=with_entropy,
            tile_bytes=case.tile_rows * (case.vocab + 1) * case.dtype.itemsize, backend=backend,
        )  # fmt: skip
        found.loss.backward()
        return found, hidden.grad, weight.grad


def relative(found: torch.Tensor, expected: torch.Tensor, floor: float = 0.0) -> float:
    assert found.shape == expected.shape
    difference = (found.double() - expected.double()).norm().item()
    return difference / (max(expected.double().norm().item(), floor) or 1.0)


def errors(case: Case, backend: str = "triton", device: str = "cpu") -> dict[str, float]:
    inputs = Inputs(case, device)
    found, hidden_gradient, weight_gradient = inputs.fused(backend)
    hidden, weight = inputs.hidden.double().requires_grad_(), inputs.weight.double().requires_grad_()
    scores = inputs.exact(hidden, weight)
    loss, _ = inputs.evaluate(scores, slice(0, len(inputs.rows)))
    loss.backward()
    result = {
        "loss": relative(found.loss, loss, 0.1),
        "labels": relative(found.scores.labels, scores.labels, 0.1),
        "entropy": relative(found.scores.entropy, scores.entropy, 0.1),
        "d(hidden)": relative(hidden_gradient, hidden.grad),
        "d(weight)": relative(weight_gradient, weight.grad.nan_to_num()),
    }
    if case.top:
        result["top"] = relative(found.scores.top, scores.top, 0.1)
    return result


def too_large(case: Case, found: dict[str, float]) -> dict[str, float]:
    """The errors that are beyond their bounds. Scores and loss come from fp32 sums even in bf16."""
    bound = 1e-5
    if case.scale > 1:  # 1 - p of these labels is a few thousandths: what fp32 has left of it
        bound = 1e-3
    if case.peak > 100:  # so are ratios of the log-probs of 300 nats
        bound = 1e-4
    gradients = max(bound, 1e-2 if case.dtype == torch.bfloat16 else 1e-5)
    bounds = {what: gradients if what.startswith("d(") else bound for what in found}
    return {what: error for what, error in found.items() if not error < bounds[what]}


def zero_slopes() -> dict[str, float]:
    """Rows without a slope: their d(hidden) is 0, and all of d(weight) where no row has one."""
    inputs = Inputs(Case())
    one = inputs.fused("triton", lambda scores, part: (0.0 * scores.labels.sum() + scores.labels[2], {}))[1]
    _, hidden, weight = inputs.fused("triton", lambda scores, part: (0.0 * scores.labels.sum(), {}))
    return {"other rows": one[[0, 1, 3, 4]].abs().max().item(), "one": float(one[2].abs().max() == 0)} | {
        "d(hidden)": hidden.abs().max().item(),
        "d(weight)": weight.abs().max().item(),
    }


def scoring() -> dict[str, float]:
    """chunk_scores, which stores no tile, gives the bits of chunk_loss."""
    inputs = Inputs(Case(None, torch.bfloat16, width=48, top=3, temperature=0.7))
    scores = chunk_scores(
        inputs.hidden, Head(inputs.weight, 37, 0.7), inputs.labels, top_ids=inputs.top_ids, backend="triton"
    )
    found = inputs.fused("triton")[0].scores
    return {name: relative(getattr(scores, name), getattr(found, name)) for name in ("labels", "entropy", "top")}


def shards() -> dict[str, float]:
    """Two ranks' shards of the vocabulary, ids of the other's among them, and a third that is all padding."""
    from megatron_ac2.kernels.chunk_loss_triton import TritonTile

    case = Case(None, top=4, temperature=0.7)
    inputs = Inputs(case)
    ids = torch.cat([inputs.labels[:, None], inputs.top_ids], 1)
    weight, tiles = inputs.weight, []
    for first, columns in ((0, 20), (20, 17), (40, 0)):
        local = ids - first
        local = local.masked_fill((local < 0) | (local >= columns), columns)
        tile = TritonTile(weight[first : first + columns], columns, case.temperature, case.tokens)
        tiles.append((tile, local, first, *tile.scores(inputs.hidden, local)))
    sums = combine(torch.stack([entry[3] for entry in tiles], 1))
    logprobs = sums.logprobs(sum(entry[4] for entry in tiles))
    slopes, entropy_slopes = torch.randn(5, 5), torch.randn(5)
    hidden_gradient, weight_gradient = torch.zeros_like(inputs.hidden), torch.zeros_like(weight)
    for tile, local, first, *_ in tiles:
        hidden_gradient += tile.gradients(
            inputs.hidden, local, slopes, entropy_slopes, (sums.reference, sums.log_mass), sums.entropy,
            weight_gradient[first : first + tile.columns], True,
        )  # fmt: skip
    exact_hidden, exact_weight = inputs.hidden.double().requires_grad_(), weight.double().requires_grad_()
    scores = inputs.exact(exact_hidden, exact_weight)
    exact = torch.cat([scores.labels[:, None], scores.top], 1)
    ((slopes * exact).sum() + (entropy_slopes * scores.entropy).sum()).backward()
    return {
        "logprobs": relative(logprobs, exact),
        "entropy": relative(sums.entropy, scores.entropy),
        "d(hidden)": relative(hidden_gradient, exact_hidden.grad),
        "d(weight)": relative(weight_gradient, exact_weight.grad),
    }


def main() -> None:
    found = {name: errors(case) for name, case in CASES.items()}
    torch.manual_seed(0)
    found |= {"zero slopes": zero_slopes(), "scoring": scoring(), "shards": shards()}
    found["torch"] = errors(replace(CASES["two walks"], dtype=torch.float32), "torch")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
