"""Mixtures of experts: which layers have them, their fields of Megatron's config, and the layouts that fit.

Routing is what the checkpoint was trained with and nothing else: no token is dropped, no load is balanced, so that the
trainer's policy is the one that the engine samples from. Logits of the router are computed in fp32.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import PretrainedConfig

from megatron_ac2.architecture import sparse_layers
from megatron_ac2.config_training import ParallelConfig

# Fields of TransformerConfig that change what is computed, or the gradient, behind the loss's back.
_NOT_WITH_RL = {
    "moe_expert_capacity_factor": "drops tokens",
    "moe_token_dropping": "drops tokens",
    "moe_input_jitter_eps": "adds noise to what the router sees",
    "moe_router_force_load_balancing": "routes at random",
    "moe_router_topk_scaling_factor": "scales the experts' outputs",
    "moe_router_num_groups": "limits the router's choice",
    "moe_router_group_topk": "limits the router's choice",
    "moe_router_enable_expert_bias": "moves the router's choice",
    "moe_z_loss_coeff": "adds a loss that step.py does not normalise",
    "moe_shared_expert_intermediate_size": "adds an expert that the checkpoint lacks",
    "moe_apply_probs_on_input": "weighs the experts' inputs, not their outputs",
}


def is_sparse(hf_config: PretrainedConfig) -> bool:
    """Whether any layer has experts."""
    return any(sparse_layers(hf_config))


def expert_problems(hf_config: PretrainedConfig) -> list[str]:
    """What config.json asks for that no layout could compute, as messages. For families with experts only."""
    if not is_sparse(hf_config):
        names = ("num_experts", "decoder_sparse_step", "mlp_only_layers")
        listed = ", ".join(f"{name} {getattr(hf_config, name, None)}" for name in names)
        return [f"num_experts: found {listed}, which leave no layer with experts; accepted: at least one"]
    chosen, num_experts = hf_config.num_experts_per_tok, hf_config.num_experts
    if not 1 <= chosen <= num_experts:
        return [f"num_experts_per_tok: found {chosen}, accepted: 1 to num_experts ({num_experts})"]
    if chosen == 1 and hf_config.norm_topk_prob:
        return ["num_experts_per_tok: found 1 with norm_topk_prob true, a router that no gradient reaches"]
    return []


def expert_fields(hf_config: PretrainedConfig, parallel: ParallelConfig, grouped: bool) -> dict[str, Any]:
    """Of TransformerConfig. `grouped`: one grouped GEMM for all of a rank's experts (Transformer Engine)."""
    layout = {"expert_model_parallel_size": parallel.expert, "expert_tensor_parallel_size": parallel.expert_tensor}
    if not is_sparse(hf_config):
        return layout
    sparse = sparse_layers(hf_config)
    return layout | {
        "num_moe_experts": hf_config.num_experts,
        "moe_ffn_hidden_size": hf_config.moe_intermediate_size,
        # A list makes the checkpoint's keys name each layer; with 1 all layers are alike and share a key.
        "moe_layer_freq": 1 if all(sparse) else [int(layer) for layer in sparse],
        "moe_router_topk": hf_config.num_experts_per_tok,
        "moe_router_score_function": "softmax",
        # Softmax over all experts, then the choice; or over the chosen, which is the same renormalised to a sum of 1.
        "moe_router_pre_softmax": not hf_config.norm_topk_prob,
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_grouped_gemm": grouped,
    }


def refused_fields(extra: Mapping[str, Any]) -> list[str]:
    """What the `megatron` section may not ask of experts, as messages."""
    return [
        f"megatron.{name}: found {extra[name]!r}, which {effect}; accepted: null"
        for name, effect in _NOT_WITH_RL.items()
        if extra.get(name)
    ]


def layout_problems(hf_config: PretrainedConfig, parallel: ParallelConfig) -> list[str]:
    """Every way in which the experts cannot be cut into `parallel`, as messages."""
    if not is_sparse(hf_config):
        wanted = (("expert", parallel.expert, "1"), ("expert_tensor", parallel.expert_tensor or 1, "null"))
        return [
            f"parallel.{name}: found {degree}, but the model has no experts; accepted: {accepted}"
            for name, degree, accepted in wanted
            if degree > 1
        ]
    problems = []
    if parallel.expert < 1 or hf_config.num_experts % parallel.expert:
        problems.append(
            f"parallel.expert: found {parallel.expert}, model has {hf_config.num_experts} experts; "
            f"accepted: divisors of {hf_config.num_experts}"
        )
    degree, channels = expert_tensor_degree(parallel), hf_config.moe_intermediate_size
    if degree < 1 or channels % degree:
        problems.append(
            f"parallel.expert_tensor: found {parallel.expert_tensor} (null: parallel.tensor, {parallel.tensor}), an "
            f"expert has {channels} channels; accepted: divisors of {channels}"
        )
    if parallel.expert == 1 and degree != parallel.tensor:
        problems.append(
            f"parallel.expert_tensor: found {degree} with parallel.expert 1 and parallel.tensor {parallel.tensor}; "
            "Megatron would sum the experts' gradients over too few ranks, and say nothing; accepted: null, or "
            "parallel.expert > 1"
        )
    if parallel.tensor > 1 and not parallel.sequence:
        problems.append(
            f"parallel.sequence: found false with parallel.tensor {parallel.tensor} and a model with experts; every "
            "tensor rank would send all tokens to the experts, and Megatron refuses to train so; accepted: true"
        )
    return problems


def expert_tensor_degree(parallel: ParallelConfig) -> int:
    """Over how many ranks an expert's matrices are cut."""
    return parallel.tensor if parallel.expert_tensor is None else parallel.expert_tensor
