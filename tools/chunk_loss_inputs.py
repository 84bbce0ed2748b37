"""What the benchmarks of the fused loss measure: one policy loss, computed in several ways from the same inputs."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from megatron_ac2.algorithm.objective import PolicyTokens, policy_loss
from megatron_ac2.algorithm.objective_parts import PolicyObjective
from megatron_ac2.kernels.chunk_loss import Head, chunk_loss
from megatron_ac2.kernels.vocab_logprobs import TokenLogprobs, token_logprobs

NUM_TOP = 32


class Case:
    """Inputs as of a policy near its own samples: proximal log-probs differ from the current ones by 0.3 nats.

    shape: T, V, H. kind, of a fused loss: "triton ..." or another word for torch's tiles; "... +entropy", an entropy
    bonus; "... +centering", score centering on NUM_TOP recorded tokens; "... bf16 grad", d(weight) accumulated in bf16.
    sequence: tokens that share an advantage, which Liger takes at a time.
    """

    def __init__(
        self, kind: str, shape: tuple[int, int, int], dtype: torch.dtype, device: str, sequence: int = 1024
    ):  # fmt: skip
        tokens, self.vocab, width = shape
        self.sequence = min(sequence, tokens)
        generator = torch.Generator(device).manual_seed(0)

        def normal(*size: int) -> Tensor:
            return torch.randn(*size, generator=generator, device=device)

        def ids(*size: int) -> Tensor:
            return torch.randint(0, self.vocab, size, generator=generator, device=device)

        self.tokens = tokens
        self.weight = (normal(self.vocab, width) * width**-0.5).to(dtype).requires_grad_()
        self.hidden = normal(tokens, width).to(dtype).requires_grad_()
        self.labels = ids(tokens)
        self.advantages = normal(-(-tokens // sequence)).repeat_interleave(sequence)[:tokens]
        centering = kind.endswith("centering")
        self.top_ids = ids(tokens, NUM_TOP) if centering else None
        with torch.no_grad():
            logits = (self.weight[self.labels].float() * self.hidden.float()).sum(1)
        # Logits are normal with variance 1: log sum exp = log V + 1/2, up to sampling.
        self.proximal = logits - math.log(self.vocab) - 0.5 + 0.3 * normal(tokens)
        bonus = 1e-3 if kind.endswith("entropy") else 0.0
        self.objective = PolicyObjective(entropy_bonus=bonus, score_centering=centering)
        self.backend = "triton" if kind.startswith("triton") else "torch"
        self.gradient_dtype = torch.bfloat16 if kind.endswith("grad") else None

    def evaluate(self, scores: TokenLogprobs, part: slice) -> tuple[Tensor, dict[str, Tensor]]:
        zeros, dtype = torch.zeros_like(scores.labels), scores.labels.dtype
        proximal = self.proximal[part].to(dtype)
        tokens = PolicyTokens(
            current=scores.labels, proximal=proximal, behavior=proximal, advantages=self.advantages[part].to(dtype),
            mask=zeros + 1, sequence_ids=zeros.long(), num_sequences=1, entropy=scores.entropy, top_current=scores.top,
            top_behavior=None if scores.top is None else scores.top.detach() - 0.1,
        )  # fmt: skip
        return policy_loss(tokens, self.objective, self.tokens)

    def fused(self, tile_bytes: int | None = None) -> Tensor:
        return chunk_loss(
            self.hidden, Head(self.weight, self.vocab), self.labels, self.evaluate, top_ids=self.top_ids,
            entropy_gradient=bool(self.objective.entropy_bonus), backend=self.backend, tile_bytes=tile_bytes,
            weight_gradient_dtype=self.gradient_dtype,
        ).loss  # fmt: skip

    def twin(self) -> Tensor:
        scores = token_logprobs(self.hidden @ self.weight.t(), self.labels, None, 1.0, self.vocab, self.top_ids)
        return self.evaluate(scores, slice(0, self.tokens))[0]

    def naive(self, hidden: Tensor | None = None, weight: Tensor | None = None) -> Tensor:
        hidden, weight = self.hidden if hidden is None else hidden, self.weight if weight is None else weight
        logits = hidden @ weight.t()
        logprobs = torch.log_softmax(logits if logits.dtype == torch.float64 else logits.float(), -1)
        current = logprobs.gather(1, self.labels[:, None])[:, 0]
        top = None if self.top_ids is None else logprobs.gather(1, self.top_ids)
        entropy = torch.zeros_like(current)
        if self.objective.entropy_bonus:
            entropy = -(logprobs.exp() * logprobs).sum(1)
        return self.evaluate(TokenLogprobs(current, entropy, top), slice(0, self.tokens))[0]

    def liger(self) -> Tensor:
        from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss

        shape = (self.tokens // self.sequence, self.sequence)
        function = LigerFusedLinearGRPOLoss(
            beta=0.0, compiled=self.hidden.is_cuda, use_ref_model=False, chunk_size=1, loss_type="grpo",
            epsilon_low=self.objective.clip_low, epsilon_high=self.objective.clip_high,
        )  # fmt: skip
        loss, _ = function(
            self.hidden.view(*shape, -1), self.weight, self.labels.view(shape),
            torch.ones(shape, device=self.hidden.device), self.advantages.view(shape)[:, 0],
            old_per_token_logps=self.proximal.view(shape),
        )  # fmt: skip
        return loss

    def function(self, kind: str) -> Callable[[], Tensor]:
        """Of one of the kinds "naive", "twin" (kernels/vocab_logprobs.py) and "liger", or else fused."""
        return {"naive": self.naive, "twin": self.twin, "liger": self.liger}.get(kind, self.fused)
