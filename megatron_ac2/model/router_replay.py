"""Router replay (R3, arXiv 2510.11370): a model's routers take the experts that the engine chose for a token.

A near-tie in a router ends one way in the engine and the other in the trainer; from there on the two compute with other
experts. With the choice given, an expert's weight and its gradient are still those of the trainer's own logits.

Megatron's own replay keeps queues of choices in globals, which a pipeline or recomputation must empty in the order in
which they filled them. Here the choice travels with the batch, in the parameters of the packed sequences that each
layer is called with, again so when it is computed anew: no order is taken for granted, and a batch without choices
routes freely. From Megatron comes the call that asks for a choice (megatron.core.transformer.moe.router_replay).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor
from transformers import PretrainedConfig

from megatron_ac2.model.chunks import gpt_models
from megatron_ac2.model.experts import is_sparse
from megatron_ac2.parallel.megatron_versions import asks_for_replayed_experts
from megatron_ac2.parallel.topology import Topology

# Fields of TransformerConfig under which a router would not ask, or would be asked about another batch.
_NOT_WITH_REPLAY = {
    "moe_router_fusion": "chooses inside of one kernel",
    "moe_enable_routing_replay": "is Megatron's own replay, which nothing would feed",
    "overlap_moe_expert_parallel_comm": "does not call layers as a whole",
}


@dataclass
class RoutedSeqParams(PackedSeqParams):
    """Megatron's, and which experts the tokens that this rank's routers see are sent to."""

    routed_experts: Tensor | None = None  # int16[tokens, layers with experts, k]; negative: the router chooses


def routers_part(choices: Tensor, topology: Topology, sequence_parallel: bool) -> Tensor:
    """[T, ...] of the tokens that a context rank holds -> of those that its tensor rank's routers see."""
    return choices.chunk(topology.tensor)[topology.tensor_rank] if sequence_parallel else choices


def replay_problems(hf_config: PretrainedConfig, extra: Mapping[str, Any]) -> list[str]:
    """Why actor.router_replay cannot be true, as messages. `extra`: the `megatron` section."""
    found = "actor.router_replay: found true, but "
    if not is_sparse(hf_config):
        return [found + "the model has no experts; accepted: false"]
    problems = [
        f"{found}megatron.{name} {effect}; set one of the two to false"
        for name, effect in _NOT_WITH_REPLAY.items()
        if extra.get(name)
    ]
    if extra.get("recompute_granularity") == "selective" and "moe" in (extra.get("recompute_modules") or ()):
        problems.append(
            f"{found}megatron.recompute_modules names moe, which recomputes routers without their layers; "
            "take moe out, or set megatron.recompute_granularity full"
        )
    if not asks_for_replayed_experts():
        problems.append(found + "this Megatron-Core has no router replay; use one of the versions in requirements.txt")
    return problems


class RouterReplay:
    """Makes the routers of a model, bare or in DDP, follow `RoutedSeqParams`. Attach it before the first forward pass.

    `num_layers` counts the whole model's layers with experts, `top_k` the experts a token takes.
    """

    def __init__(self, model: torch.nn.Module):
        config = gpt_models(model)[0].config
        pattern = config.moe_layer_freq
        sparse = pattern if isinstance(pattern, list) else [1] * config.num_layers
        self.num_layers, self.top_k = sum(sparse), config.moe_router_topk
        self._count: Tensor | None = None
        for chunk in gpt_models(model):
            for layer in chunk.decoder.layers:
                if (router := getattr(layer.mlp, "router", None)) is not None:
                    choice = LayerChoice(sum(sparse[: layer.layer_number - 1]), self._add)
                    router.router_replay = choice
                    layer.register_forward_pre_hook(choice.take, with_kwargs=True)

    @contextmanager
    def counting(self, device: torch.device) -> Iterator[Tensor]:
        """int64[2]: how many choices (a token's in a layer) are replayed inside on this rank, and how many of them its
        routers would have made otherwise, in the order of experts no difference. Forward passes without gradient only:
        a recomputed one would count again."""
        self._count = torch.zeros(2, dtype=torch.int64, device=device)
        try:
            yield self._count
        finally:
            self._count = None

    def _add(self, given: Tensor, replayed: Tensor, own: Tensor) -> None:
        if self._count is not None:
            other = (replayed.sort(dim=1).values != own.sort(dim=1).values).any(dim=1)
            self._count += torch.stack([given.sum(), (given & other).sum()])


class LayerChoice:
    """What the router of one layer asks, the `index`-th with experts. Stands where Megatron's RouterReplay would.

    `count` is told which tokens had a choice bool[tokens], the experts taken and the router's own, [tokens, k] each.
    """

    def __init__(self, index: int, count: Callable[[Tensor, Tensor, Tensor], None]):
        self._index, self._count = index, count
        self._choices: Tensor | None = None  # int16[tokens, k]

    def take(self, layer: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A layer's forward pre-hook, in its first pass and in a recomputed one."""
        choices = getattr(kwargs.get("packed_seq_params"), "routed_experts", None)
        self._choices = None if choices is None else choices[:, self._index]

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Callable[..., tuple[Tensor, Tensor]] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """scores [tokens, experts] -> the chosen ones' scores and indices [tokens, topk], the highest first."""
        own_scores, own = default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
        if self._choices is None:
            return own_scores, own
        if self._choices.shape != own.shape:
            raise RuntimeError(f"choices {list(self._choices.shape)} for a router that makes {list(own.shape)}")
        given = self._choices[:, 0] >= 0
        chosen = torch.where(given[:, None], self._choices.long(), own)
        # In the router's own order, so that the same set of experts gives the same numbers to the last bit.
        values, order = scores.gather(1, chosen).sort(dim=1, descending=True, stable=True)
        chosen = chosen.gather(1, order)
        self._count(given, chosen, own)
        return values, chosen
