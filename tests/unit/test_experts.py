"""Mixtures of experts: Megatron's config, layouts, the table of weights, what is refused. No process group."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from megatron_ac2.architecture import sparse_layers
from megatron_ac2.config_training import ParallelConfig
from megatron_ac2.model.build import check_layout, load_hf_config, transformer_config
from megatron_ac2.model.hf_table import Table
from megatron_ac2.parallel.topology import check_world
from megatron_ac2.types import UserError
from tests.unit.test_build import qwen3, qwen3_moe, write_config


def config_of(parallel: ParallelConfig | None = None, extra: dict | None = None, **changes):
    return transformer_config(qwen3_moe(**changes), parallel or ParallelConfig(), torch.bfloat16, extra)


def test_config_fields_follow_the_model():
    config = config_of(ParallelConfig(tensor=2, sequence=True, expert=4, expert_tensor=1))
    assert (config.num_moe_experts, config.moe_router_topk, config.moe_ffn_hidden_size) == (8, 2, 48)
    assert (config.expert_model_parallel_size, config.expert_tensor_parallel_size) == (4, 1)
    assert (config.moe_router_dtype, config.moe_router_score_function) == ("fp32", "softmax")
    assert (config.moe_router_load_balancing_type, config.moe_aux_loss_coeff) == ("none", 0.0)
    assert config.moe_expert_capacity_factor is None and config.moe_token_dispatcher_type == "alltoall"
    assert config.moe_layer_freq == 1 and not config.moe_grouped_gemm
    assert config_of(ParallelConfig(tensor=2)).expert_tensor_parallel_size == 2


@pytest.mark.parametrize("renormalised", [True, False])
def test_softmax_over_the_chosen_is_softmax_over_all_renormalised(renormalised: bool):
    assert config_of(norm_topk_prob=renormalised).moe_router_pre_softmax is not renormalised


def test_every_second_layer_but_one():
    layers = sparse_layers(qwen3_moe(decoder_sparse_step=2, mlp_only_layers=[3]))
    assert layers == [False, True, False, False, False, True]
    assert config_of(decoder_sparse_step=2, mlp_only_layers=[3]).moe_layer_freq == [0, 1, 0, 0, 0, 1]
    assert sparse_layers(qwen3()) == [False] * 6


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_local_experts": 0}, "num_experts: found num_experts 0, .* no layer with experts"),
        ({"mlp_only_layers": [0, 1, 2, 3, 4, 5]}, "mlp_only_layers .*accepted: at least one"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok: found 9, accepted: 1 to num_experts"),
        ({"num_experts_per_tok": 1}, "num_experts_per_tok: found 1 with norm_topk_prob true"),
        ({"hidden_act": "gelu"}, "hidden_act: found 'gelu', accepted for Qwen3MoeForCausalLM"),
    ],
)
def test_models_that_are_not_supported(tmp_path: Path, changes: dict, words: str):
    with pytest.raises(UserError, match=words):
        load_hf_config(write_config(tmp_path / "model", "Qwen3MoeForCausalLM", **changes))


def test_what_would_part_the_trainer_from_the_engine_is_refused():
    with pytest.raises(UserError, match="drops tokens") as caught:
        config_of(extra={"moe_expert_capacity_factor": 1.0, "moe_input_jitter_eps": 0.1, "moe_router_topk": 4})
    named = ("moe_router_topk", "moe_expert_capacity_factor", "moe_input_jitter_eps")
    for problem, name in zip(caught.value.problems, named, strict=True):
        assert problem.startswith(f"megatron.{name}: found")
    assert config_of(extra={"moe_z_loss_coeff": None, "moe_permute_fusion": False}).moe_z_loss_coeff is None


@pytest.mark.parametrize(
    "fields",
    [
        {"expert": 8},
        {"tensor": 2, "sequence": True},
        {"tensor": 2, "sequence": True, "expert": 2},
        {"tensor": 2, "sequence": True, "expert": 4, "expert_tensor": 1},
        {"expert": 2, "expert_tensor": 2, "pipeline": 3},
    ],
)
def test_layouts_that_fit(fields: dict):
    assert check_layout(qwen3_moe(intermediate_size=1), ParallelConfig(**fields)) == []


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"expert": 3}, ["parallel.expert: found 3, model has 8 experts; accepted: divisors of 8"]),
        ({"expert": 2, "expert_tensor": 5}, ["parallel.expert_tensor: found 5 .* 48 channels"]),
        (
            {"tensor": 2, "expert": 2},
            ["parallel.sequence: found false with parallel.tensor 2 and a model with experts"],
        ),
        ({"tensor": 2, "sequence": True, "expert_tensor": 1}, ["expert_tensor: found 1 with parallel.expert 1"]),
        ({"expert": 0, "tensor": 2}, ["parallel.expert: found 0", "parallel.sequence: found false"]),
    ],
)
def test_layouts_that_do_not(fields: dict, words: list[str]):
    problems = check_layout(qwen3_moe(), ParallelConfig(**fields))
    assert len(problems) == len(words), problems
    for problem, expected in zip(problems, words, strict=True):
        assert re.search(expected, problem), problem


def test_a_dense_model_has_no_experts_to_share_out():
    problems = check_layout(qwen3(), ParallelConfig(expert=2, expert_tensor=2))
    assert problems == [
        "parallel.expert: found 2, but the model has no experts; accepted: 1",
        "parallel.expert_tensor: found 2, but the model has no experts; accepted: null",
    ]


def test_dense_layers_count_for_tensor_parallel_where_there_are_some():
    parallel = ParallelConfig(tensor=2, sequence=True)
    assert check_layout(qwen3_moe(intermediate_size=95), parallel) == []
    (problem,) = check_layout(qwen3_moe(intermediate_size=95, mlp_only_layers=[0]), parallel)
    assert "95 feed-forward channels" in problem


def test_the_world_must_divide():
    assert check_world(ParallelConfig(pipeline=2, expert=4), 8) == []
    (problem,) = check_world(ParallelConfig(tensor=2, sequence=True, expert=4), 12)
    assert "4 x 2 x 1 = 8 with 12 process(es)" in problem
    (problem,) = check_world(ParallelConfig(expert=0), 1)
    assert problem == "parallel.expert: found 0, must be >= 1"


@pytest.mark.parametrize("name", ["local_experts.1.linear_fc1.weight", "linear_fc1.weight1"])
def test_experts_by_both_of_megatrons_names(name: str):
    """One module an expert; with grouped GEMMs (Transformer Engine) one weight each of one module."""
    table = Table(qwen3_moe())
    rule = table.rule(f"decoder.layers.2.mlp.experts.{name}", first_layer=3, first_expert=4)
    assert rule.of_expert and rule.parts == (
        "model.layers.5.mlp.experts.5.gate_proj.weight",
        "model.layers.5.mlp.experts.5.up_proj.weight",
    )
    gate, up = torch.zeros(2, 3), torch.ones(2, 3)
    fused = table.fuse(rule, (gate, up))
    assert fused[:, 0].tolist() == [0, 0, 1, 1]
    assert all(torch.equal(*pair) for pair in zip(table.unfuse(rule, fused), (gate, up), strict=True))
    assert table.full_shape(rule.cut, (2, 3), 2) == (4, 3)


def test_the_router_and_its_norm():
    table = Table(qwen3_moe())
    assert table.rule("decoder.layers.1.mlp.router.weight", 0).parts == ("model.layers.1.mlp.gate.weight",)
    norm = table.rule("decoder.layers.1.pre_mlp_layernorm.weight", 0)
    assert norm.parts == ("model.layers.1.post_attention_layernorm.weight",)
    for name in (
        "mlp.router.bias",
        "mlp.experts.local_experts.0.linear_fc1.bias",
        "mlp.shared_experts.linear_fc1.weight",
    ):
        with pytest.raises(UserError, match=name):
            table.rule(f"decoder.layers.1.{name}", 0)
    with pytest.raises(UserError, match="router"):  # a dense family
        Table(qwen3()).rule("decoder.layers.1.mlp.router.weight", 0)
