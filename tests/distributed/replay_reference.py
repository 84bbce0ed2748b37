"""Router replay's cases and what they must give: float64 transformers whose routers are told what to choose."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from megatron_ac2.types import TrainSequence
from tests.distributed import tiny_families
from tests.distributed.training_reference import TEMPERATURE, chosen, token_logprobs

SHAPES = [(5, 20), (12, 9), (3, 6), (20, 15), (8, 1), (6, 17)]  # tokens of context, new ones
NUM_KNOWN = [24, 20, None, 12, 8, 22]  # first tokens with a choice: usually all but the last, once a part of the prompt


class Routers:
    """The gates of a model in float64: they follow `given`, a layer's int64[n, k] of the first n tokens, and note what
    they would have chosen themselves."""

    def __init__(self, model: torch.nn.Module):
        self.given: np.ndarray | None = None  # [n, layers, k]
        self.own: dict[int, torch.Tensor] = {}
        gates = [layer.mlp.gate for layer in model.model.layers if hasattr(layer.mlp, "gate")]
        for index, gate in enumerate(gates):
            gate.forward = partial(self.route, gate, index)

    def route(self, gate, index, hidden):
        logits = torch.nn.functional.linear(hidden.reshape(-1, gate.hidden_dim), gate.weight)
        probs = logits.softmax(-1)
        indices = self.own[index] = probs.topk(gate.top_k).indices
        if self.given is not None:
            told = torch.from_numpy(self.given[:, index].astype(np.int64))
            indices = torch.cat([told, indices[len(told) :]])
        weights = probs.gather(1, indices)
        if gate.norm_topk_prob:
            weights = weights / weights.sum(-1, keepdim=True)
        return logits, weights, indices

    def chosen(self, num_tokens: int) -> np.ndarray:
        return torch.stack([self.own[index][:num_tokens] for index in sorted(self.own)], 1).numpy().astype(np.uint8)


def other_choices(own: np.ndarray, num_experts: int, rng: np.random.Generator) -> np.ndarray:
    """Two tokens in three keep theirs, in another order; the others get distinct random ones."""
    found = own[..., ::-1].copy()
    for place in np.ndindex(own.shape[:2]):
        if place[0] % 3 == 0:
            found[place] = rng.choice(num_experts, own.shape[2], replace=False)
    return found


def answers(folder: Path) -> dict[str, Any]:
    """Sequences with their model's own choices and with others; what a policy step with the latter must give."""
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float64, experts_implementation="eager", attn_implementation="eager"
    )
    routers, rng = Routers(model), np.random.default_rng(11)
    own, others, logprobs, objective, num_given, num_other = [], [], [], 0.0, 0, 0
    for index, (num_context, num_new) in enumerate(SHAPES):
        ids = rng.integers(0, model.config.vocab_size, num_context + num_new).astype(np.int32)
        advantages = np.full(num_new, (-1.0) ** index * (1 + index), dtype=np.float32)
        routers.given = None
        with torch.no_grad():
            free = chosen(token_logprobs(model, ids, num_context, TEMPERATURE), ids[num_context:]).float().numpy()
        sequence = TrainSequence(ids, num_context, free, advantages, 1.0, empty_prefix=False)
        if (known := NUM_KNOWN[index]) is not None:
            mine = routers.chosen(known)
            routers.given = other_choices(mine, model.config.num_experts, rng)
        own.append(asdict(sequence) | {"routed_experts": None if known is None else mine})
        others.append(asdict(sequence) | {"routed_experts": routers.given})
        found = chosen(token_logprobs(model, ids, num_context, TEMPERATURE), ids[num_context:])
        logprobs.append(found.detach().numpy())
        objective = objective - (found * torch.from_numpy(advantages)).sum()
        if known is not None:
            num_given += mine[..., 0].size
            num_other += (np.sort(routers.chosen(known)) != np.sort(routers.given)).any(-1).sum()
    num_tokens = sum(new for _, new in SHAPES)
    (objective / num_tokens).backward()
    gradients = {name: p.grad if p.grad is not None else torch.zeros_like(p) for name, p in model.named_parameters()}
    return {
        "own": own, "others": others, "logprobs": logprobs, "gradients": tiny_families.split_experts(gradients),
        "rerouted": num_other / num_given, "num_tokens": num_tokens,
    }  # fmt: skip
