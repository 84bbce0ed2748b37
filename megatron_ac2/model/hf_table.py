"""The one table of names and shapes, Megatron <-> Hugging Face (tied or untied): a family's rules, for one model."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

import torch
from transformers import PretrainedConfig

from megatron_ac2.architecture import sparse_layers
from megatron_ac2.model.families import Cut, Rule, family_of
from megatron_ac2.types import UserError

VALUE_HEAD = "value_head.weight"
LM_HEAD = "lm_head.weight"
_LAYER = re.compile(r"^decoder\.layers\.(\d+)\.(.+)$")
# One module an expert, or with grouped GEMMs one for all of a rank's, with a weight each.
_EXPERT = re.compile(r"^mlp\.experts\.(?:local_experts\.(\d+)\.)?(linear_fc[12]\.weight)(\d*)$")
_MODEL_RULES = (
    Rule("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), "vocab"),
    Rule("decoder.final_layernorm.weight", ("model.norm.weight",), "whole"),
    Rule("output_layer.weight", (LM_HEAD,), "vocab"),
)
# Transformer Engine fuses a norm into the linear layer after it.
_ALIASES = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
}


class Table:
    """The rules filled in for one model."""

    def __init__(self, hf_config: PretrainedConfig):
        self.num_layers: int = hf_config.num_hidden_layers
        self.vocab_size: int = hf_config.vocab_size
        self.tied = bool(hf_config.tie_word_embeddings)
        self._head_dim = head_dim(hf_config)
        self.num_groups: int = hf_config.num_key_value_heads
        self._queries_per_group: int = hf_config.num_attention_heads // self.num_groups
        self.num_experts: int = getattr(hf_config, "num_experts", None) or 0
        self._sparse = sparse_layers(hf_config)
        self._family = family_of(hf_config)
        rules = self._family.layer_rules + self._family.dense_rules + self._family.expert_rules
        self._layer_rules = {rule.megatron: rule for rule in rules}
        self._model_rules = {rule.megatron: rule for rule in _MODEL_RULES}

    def hf_names(self, with_lm_head: bool) -> list[str]:
        """Every tensor of the model's HF file: the trunk, and the LM head if asked for and not tied."""
        family = self._family
        layers = [
            f"model.layers.{layer}.{part.format(expert=expert)}"
            for layer, sparse in enumerate(self._sparse)
            for rule in family.layer_rules + (family.expert_rules if sparse else family.dense_rules)
            for expert in range(self.num_experts if rule.of_expert else 1)
            for part in rule.parts
        ]
        lm_head = [LM_HEAD] if with_lm_head and not self.tied else []
        return ["model.embed_tokens.weight", *layers, "model.norm.weight", *lm_head]

    def rule(self, megatron_name: str, first_layer: int, first_expert: int = 0) -> Rule:
        """The rule for a parameter, HF names in full: of a stage whose layer 0 is the model's layer `first_layer`, on a
        rank whose expert 0 is the model's expert `first_expert`.

        Raises `UserError` for a name that is not in the table.
        """
        match = _LAYER.match(megatron_name)
        local = match.group(2) if match else megatron_name
        of_expert = _EXPERT.match(local) if match else None
        if of_expert:
            local = f"mlp.experts.{of_expert.group(2)}"
        rule = (self._layer_rules if match else self._model_rules).get(_ALIASES.get(local, local))
        if rule is None:
            raise UserError(f"{megatron_name}: this Megatron parameter is not in the tables of model/families.py")
        if match:
            layer = int(match.group(1)) + first_layer
            expert = first_expert + int(of_expert.group(1) or of_expert.group(3)) if of_expert else None
            parts = tuple(f"model.layers.{layer}.{part.format(expert=expert)}" for part in rule.parts)
            return replace(rule, parts=parts)
        if self.tied and rule.parts == (LM_HEAD,):  # the last stage's own copy of the embedding
            return replace(rule, parts=("model.embed_tokens.weight",))
        return rule

    def fuse(self, rule: Rule, pieces: Sequence[torch.Tensor]) -> torch.Tensor:
        """One rank's pieces of the HF tensors -> its Megatron parameter."""
        if rule.fusion == "none":
            return pieces[0]
        if rule.fusion == "gate_up":
            return torch.cat(list(pieces))
        width = pieces[0].shape[1:]  # none for a bias
        groups = pieces[1].shape[0] // self._head_dim
        return torch.cat([piece.reshape(groups, -1, *width) for piece in pieces], dim=1).reshape(-1, *width)

    def unfuse(self, rule: Rule, parameter: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The inverse of `fuse`. Megatron lays qkv out by group: its queries, its key, its value."""
        if rule.fusion == "none":
            return (parameter,)
        if rule.fusion == "gate_up":
            return tuple(parameter.chunk(2))
        width, queries, head = parameter.shape[1:], self._queries_per_group, self._head_dim
        grouped = parameter.reshape(-1, (queries + 2) * head, *width)
        pieces = grouped.split([queries * head, head, head], dim=1)
        return tuple(piece.reshape(-1, *width) for piece in pieces)

    def full_shape(self, cut: Cut, piece: Sequence[int], tensor: int) -> tuple[int, ...]:
        """The HF tensor's shape, from the shape of one of its `tensor` pieces."""
        shape = list(piece)
        if cut == "vocab":
            shape[0] = self.vocab_size
        elif cut != "whole":
            shape[cut_dim(cut)] *= tensor
        return tuple(shape)


def cut_dim(cut: Cut) -> int:
    return 1 if cut == "columns" else 0


def head_dim(hf_config: PretrainedConfig) -> int:
    return getattr(hf_config, "head_dim", None) or hf_config.hidden_size // hf_config.num_attention_heads
