"""Hugging Face config -> Megatron config, layouts that do not fit, and the table of weights. No process group."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from megatron_ac2.config_training import ParallelConfig
from megatron_ac2.model.build import check_layout, load_hf_config, padded_vocab_size, transformer_config
from megatron_ac2.model.families import FAMILIES
from megatron_ac2.model.hf_table import Table
from megatron_ac2.model.rope import rope_arguments
from megatron_ac2.parallel.topology import check_world, init_topology
from megatron_ac2.types import UserError
from tests.distributed.tiny_families import split_experts

SIZES = dict(
    vocab_size=250, hidden_size=64, intermediate_size=96, num_hidden_layers=6, num_attention_heads=4,
    num_key_value_heads=2, rope_parameters={"rope_type": "default", "rope_theta": 500.0},
)  # fmt: skip
LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip


def qwen3(**changes) -> Qwen3Config:
    return Qwen3Config(**{**SIZES, "head_dim": 32, "architectures": ["Qwen3ForCausalLM"], **changes})


def qwen2(**changes) -> Qwen2Config:
    return Qwen2Config(**{**SIZES, "architectures": ["Qwen2ForCausalLM"], **changes})


def llama(**changes) -> LlamaConfig:
    return LlamaConfig(**{**SIZES, "architectures": ["LlamaForCausalLM"], **changes})


def qwen3_moe(**changes) -> Qwen3MoeConfig:
    experts = {"head_dim": 32, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
    return Qwen3MoeConfig(
        **{**SIZES, **experts, "norm_topk_prob": True, "architectures": ["Qwen3MoeForCausalLM"], **changes}
    )


MAKERS = {
    "Qwen3ForCausalLM": qwen3,
    "Qwen3MoeForCausalLM": qwen3_moe,
    "Qwen2ForCausalLM": qwen2,
    "LlamaForCausalLM": llama,
}


def write_config(folder: Path, family: str = "Qwen3ForCausalLM", **changes) -> Path:
    folder.mkdir(exist_ok=True)
    fields = json.loads(MAKERS[family]().to_json_string(use_diff=False)) | changes
    (folder / "config.json").write_text(json.dumps(fields))
    return folder


def test_config_fields_follow_the_model():
    config = transformer_config(qwen3(rms_norm_eps=1e-5), ParallelConfig(2, 3, True), torch.bfloat16)
    assert (config.num_layers, config.hidden_size, config.ffn_hidden_size) == (6, 64, 96)
    assert (config.num_attention_heads, config.num_query_groups, config.kv_channels) == (4, 2, 32)
    assert (config.tensor_model_parallel_size, config.pipeline_model_parallel_size) == (2, 3)
    assert config.sequence_parallel and config.layernorm_epsilon == 1e-5
    assert config.bf16 and config.params_dtype == config.pipeline_dtype == torch.bfloat16
    assert config.calculate_per_token_loss and config.variable_seq_lengths
    assert config.hidden_dropout == config.attention_dropout == 0.0


def test_extra_fields_pass_through():
    extra = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    assert transformer_config(qwen3(), ParallelConfig(), torch.float32, extra).recompute_granularity == "full"


def test_every_bad_extra_field_is_named():
    extra = {"hiden_dropout": 0.1, "num_layers": 2, "context_parallel_size": 2}
    with pytest.raises(UserError) as caught:
        transformer_config(qwen3(), ParallelConfig(), torch.float32, extra)
    assert len(caught.value.problems) == 3
    for problem, name in zip(caught.value.problems, extra, strict=True):
        assert problem.startswith(f"megatron.{name}: found")


def test_other_ways_to_share_a_sequence_are_refused():
    """Packed batches are cut for Transformer Engine's ring."""
    transformer_config(qwen3(), ParallelConfig(context=2), torch.float32, {"cp_comm_type": "p2p"})
    extra = {"cp_comm_type": "a2a", "hybrid_context_parallel": True, "hierarchical_context_parallel_sizes": [2, 2]}
    with pytest.raises(UserError) as caught:
        transformer_config(qwen3(), ParallelConfig(context=2), torch.float32, extra)
    for problem, (name, value) in zip(caught.value.problems, extra.items(), strict=True):
        assert problem.startswith(f"megatron.{name}: found {value!r}") and "accepted: " in problem


def test_values_that_megatron_refuses_are_user_errors():
    with pytest.raises(UserError, match="recompute_granularity"):
        transformer_config(qwen3(), ParallelConfig(), torch.float32, {"recompute_granularity": "some"})


INTERLEAVED, PLAIN = ParallelConfig(pipeline=2, virtual_pipeline=3), ParallelConfig(pipeline=2)


def test_stages_talk_as_their_schedule_needs():
    config = transformer_config(qwen3(), INTERLEAVED, torch.float32)
    assert config.overlap_p2p_comm and not config.batch_p2p_comm
    assert (config.virtual_pipeline_model_parallel_size, config.microbatch_group_size_per_vp_stage) == (3, 2)
    config = transformer_config(qwen3(), PLAIN, torch.float32)
    assert config.batch_p2p_comm and not config.overlap_p2p_comm
    assert config.virtual_pipeline_model_parallel_size is None
    assert not transformer_config(qwen3(), PLAIN, torch.float32, {"batch_p2p_comm": False}).batch_p2p_comm
    right = {"overlap_p2p_comm": True, "batch_p2p_comm": False, "overlap_p2p_comm_warmup_flush": True}
    assert transformer_config(qwen3(), INTERLEAVED, torch.float32, right).overlap_p2p_comm_warmup_flush


@pytest.mark.parametrize(
    ("parallel", "extra", "words"),
    [
        (INTERLEAVED, {"batch_p2p_comm": True}, "parallel.virtual_pipeline 3; gradients .* silently wrong"),
        (INTERLEAVED, {"overlap_p2p_comm": False}, "needs batch_p2p_comm, which is wrong; accepted: true"),
        (PLAIN, {"overlap_p2p_comm": True}, "virtual_pipeline None; it needs an interleaved pipeline"),
        (INTERLEAVED, {"microbatch_group_size_per_vp_stage": 4}, "follows from the model and the parallel section"),
        (PLAIN, {"virtual_pipeline_model_parallel_size": 3}, "follows from the model and the parallel section"),
    ],
)
def test_stages_that_would_talk_wrongly_are_refused(parallel: ParallelConfig, extra: dict, words: str):
    """The first is silently wrong in Megatron-Core 0.16: gradients are off by 8e-2 with two stages."""
    with pytest.raises(UserError, match=f"megatron.{next(iter(extra))}: found .*{words}"):
        transformer_config(qwen3(), parallel, torch.float32, extra)


@pytest.mark.parametrize("layout", [(1, 1), (2, 1), (1, 6), (2, 3), (4, 1)])
def test_layouts_that_fit(layout: tuple[int, int]):
    assert check_layout(qwen3(), ParallelConfig(*layout)) == []


def test_every_violation_of_a_layout_is_listed():
    problems = check_layout(qwen3(intermediate_size=100), ParallelConfig(3, 4))
    assert problems == [
        "parallel.tensor: found 3, model has 4 attention heads; accepted: divisors of 4",
        "parallel.tensor: found 3, model has 100 feed-forward channels; accepted: divisors of 100",
        "parallel.tensor: found 3, model has 2 key-value heads; accepted: divisors of 2, and multiples, where ranks "
        "share a head",
        "parallel.pipeline: found 4, model has 6 layers; accepted: divisors of 6",
    ]
    assert "sequence parallel needs tensor > 1" in check_layout(qwen3(), ParallelConfig(1, 1, True))[0]


def test_ranks_that_share_a_key_value_head_cut_it_evenly():
    """12 heads in 2 groups of 6 queries: 3 ranks a head cut (6 + 2) x 2 = 16 channels, which is no multiple of 3."""
    config = qwen3(num_attention_heads=12, head_dim=2)
    (problem,) = check_layout(config, ParallelConfig(6))
    assert problem.startswith("parallel.tensor: found 6, so that 3 ranks share a key-value head") and "16" in problem
    assert check_layout(qwen3(num_attention_heads=12, head_dim=3), ParallelConfig(6)) == []


def test_layers_must_divide_over_stages_and_chunks():
    assert check_layout(qwen3(), INTERLEAVED) == []
    assert check_layout(qwen3(), ParallelConfig(pipeline=2, virtual_pipeline=2)) == [
        "parallel.virtual_pipeline: found 2, a stage has 3 of the model's 6 layers; "
        "accepted: divisors of 3 above 1, or null"
    ]


def test_padded_vocabulary_does_not_depend_on_usual_degrees():
    assert {padded_vocab_size(qwen3(), tensor) for tensor in (1, 2, 4, 8)} == {256}
    assert padded_vocab_size(qwen3(vocab_size=256), 2) == 256
    assert padded_vocab_size(qwen3(vocab_size=257), 2) == 384
    assert padded_vocab_size(qwen3(), 3) == 384  # a multiple of 3 and 128


def test_world_must_divide():
    assert check_world(ParallelConfig(2, 2), 8) == []
    (problem,) = check_world(ParallelConfig(2, 2), 6)
    assert "2 x 2 x 1 = 4 with 6 process(es)" in problem
    assert check_world(ParallelConfig(2, 2, context=2), 8) == []
    (problem,) = check_world(ParallelConfig(2, context=2), 6)
    assert "2 x 1 x 2 = 4 with 6 process(es)" in problem
    assert len(check_world(ParallelConfig(0, -1, context=0), 8)) == 3
    assert check_world(INTERLEAVED, 4) == []
    for refused in (ParallelConfig(virtual_pipeline=2), ParallelConfig(pipeline=2, virtual_pipeline=1)):
        (problem,) = check_world(refused, 4)
        assert problem.startswith("parallel.virtual_pipeline: found") and "two or more of both" in problem


def test_init_topology_fails_before_it_joins(monkeypatch: pytest.MonkeyPatch):
    for name, value in {"RANK": "1", "WORLD_SIZE": "3", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)  # nobody else is there: joining would wait for ever
    with pytest.raises(UserError, match="parallel.tensor x parallel.pipeline"):
        init_topology(ParallelConfig(2, 1), seed=0)
    monkeypatch.delenv("LOCAL_RANK")
    with pytest.raises(UserError, match="LOCAL_RANK: not set"):
        init_topology(ParallelConfig(1, 1), seed=0)


def test_load_hf_config(tmp_path: Path):
    config = load_hf_config(write_config(tmp_path / "good"))
    assert config.num_hidden_layers == 6 and rope_arguments(config)["rotary_base"] == 500.0


def test_rope_theta_where_transformers_4_wrote_it(tmp_path: Path):
    folder = write_config(tmp_path / "old", rope_theta=123.0)
    fields = json.loads((folder / "config.json").read_text())
    del fields["rope_parameters"]
    (folder / "config.json").write_text(json.dumps(fields))
    assert rope_arguments(load_hf_config(folder))["rotary_base"] == 123.0


def test_folder_mistakes(tmp_path: Path):
    with pytest.raises(UserError, match="not a folder"):
        load_hf_config(tmp_path / "nowhere")
    with pytest.raises(UserError, match="no config.json"):
        load_hf_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UserError, match="cannot be read"):
        load_hf_config(tmp_path)


@pytest.mark.parametrize(
    ("family", "changes", "words"),
    [
        ("Qwen3", {"architectures": ["MistralForCausalLM"]}, "architectures: found.*one of Qwen3ForCausalLM, Qwen3Moe"),
        ("Qwen3", {"architectures": ["LlamaForCausalLM"]}, "model_type: found 'qwen3' with architecture Llama"),
        ("Qwen3", {"hidden_act": "gelu"}, "hidden_act: found 'gelu'"),
        ("Qwen3", {"attention_bias": True}, "attention_bias: found True, accepted for Qwen3ForCausalLM: False"),
        ("Qwen2", {"use_sliding_window": True}, "use_sliding_window: found True"),
        ("Llama", {"attention_bias": True}, "attention_bias: found True, accepted for LlamaForCausalLM: False"),
        ("Llama", {"mlp_bias": True}, "mlp_bias: found True"),
        ("Llama", {"quantization_config": {"quant_method": "awq"}}, "quantization_config: found"),
        *[
            ("Llama", {"rope_parameters": {"rope_type": kind, "rope_theta": 5e5, "factor": 4.0}}, f"found '{kind}'")
            for kind in ("linear", "dynamic", "yarn")
        ],
    ],
)
def test_models_that_are_not_supported(tmp_path: Path, family: str, changes: dict, words: str):
    with pytest.raises(UserError, match=words):
        load_hf_config(write_config(tmp_path / "model", f"{family}ForCausalLM", **changes))


def test_what_transformers_4_called_type_is_refused_as_well(tmp_path: Path):
    folder = write_config(tmp_path / "old", "LlamaForCausalLM", rope_theta=1e4)
    fields = json.loads((folder / "config.json").read_text())
    del fields["rope_parameters"]
    (folder / "config.json").write_text(json.dumps(fields | {"rope_scaling": {"type": "linear", "factor": 2.0}}))
    with pytest.raises(UserError, match="rope_type: found 'linear', accepted: default, llama3"):
        load_hf_config(folder)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_frequencies_are_those_of_transformers(tmp_path: Path, factor: float):
    rope = LLAMA3_ROPE | {"factor": factor}
    config = load_hf_config(write_config(tmp_path / "llama", "LlamaForCausalLM", rope_parameters=rope, head_dim=128))
    arguments = rope_arguments(config)
    assert arguments == {"rotary_base": 5e5, "rope_scaling": True, "rope_scaling_factor": factor}
    expected, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    unscaled = 5e5 ** -(torch.arange(0, 128, 2) / 128)
    ratio = unscaled / expected
    assert ratio.min() < 1.001 and ratio.max() > factor - 1e-3 and ((ratio > 1.01) & (ratio < factor - 0.1)).any()
    found = RotaryEmbedding(128, 1.0, **arguments, use_cpu_initialization=True, cp_group=object()).inv_freq
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("name", "value"),
    [("low_freq_factor", 2.0), ("high_freq_factor", 8.0), ("original_max_position_embeddings", 4096), ("factor", 0.5)],
)
def test_llama3_constants_that_megatron_cannot_take(tmp_path: Path, name: str, value: float):
    rope = LLAMA3_ROPE | {name: value}
    with pytest.raises(UserError) as caught:
        load_hf_config(write_config(tmp_path / "llama", "LlamaForCausalLM", rope_parameters=rope))
    (problem,) = caught.value.problems
    assert f"rope_parameters.{name}: found {value}" in problem and "accepted" in problem


@pytest.mark.parametrize(
    ("maker", "qk_norm", "qkv_bias"),
    [(qwen3, True, False), (qwen3_moe, True, False), (qwen2, False, True), (llama, False, False)],
)
def test_megatron_config_of_each_family(maker, qk_norm: bool, qkv_bias: bool):
    config = transformer_config(maker(), ParallelConfig(), torch.float32)
    assert (config.qk_layernorm, config.add_qkv_bias, config.add_bias_linear) == (qk_norm, qkv_bias, False)
    assert config.kv_channels == (32 if maker in (qwen3, qwen3_moe) else 16)


def test_qkv_is_laid_out_by_group():
    """4 heads, 2 groups: group 0 holds queries 0 and 1, then its key and value; group 1 the same of 2 and 3."""
    table = Table(qwen3(head_dim=1))
    rule = table.rule("decoder.layers.0.self_attention.linear_qkv.weight", first_layer=2)
    assert rule.parts[0] == "model.layers.2.self_attn.q_proj.weight"
    query, key, value = (torch.tensor(rows)[:, None] for rows in ([10, 11, 12, 13], [20, 21], [30, 31]))
    fused = table.fuse(rule, (query, key, value))
    assert fused[:, 0].tolist() == [10, 11, 20, 30, 12, 13, 21, 31]
    assert [piece[:, 0].tolist() for piece in table.unfuse(rule, fused)] == [[10, 11, 12, 13], [20, 21], [30, 31]]


def test_a_bias_is_laid_out_like_its_weight():
    """9 heads in 3 groups of 3 queries, as SmolLM2's; then cut over 3 ranks: rank 1 holds group 1."""
    table = Table(qwen2(num_attention_heads=9, num_key_value_heads=3, hidden_size=9))
    rule = table.rule("decoder.layers.1.self_attention.linear_qkv.bias", first_layer=0)
    assert rule.cut == "rows" and rule.parts[2] == "model.layers.1.self_attn.v_proj.bias"
    query, key, value = torch.arange(9), torch.arange(20, 23), torch.arange(30, 33)
    fused = table.fuse(rule, (query, key, value))
    assert fused.tolist() == [0, 1, 2, 20, 30, 3, 4, 5, 21, 31, 6, 7, 8, 22, 32]
    assert [piece.tolist() for piece in table.unfuse(rule, fused)] == [piece.tolist() for piece in (query, key, value)]
    assert table.fuse(rule, (query[3:6], key[1:2], value[1:2])).tolist() == [3, 4, 5, 21, 31]
    assert table.full_shape(rule.cut, (3,), 3) == (9,)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [False, True])
def test_table_covers_the_model_and_nothing_else(family: str, tied: bool):
    config: PretrainedConfig = MAKERS[family](tie_word_embeddings=tied)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert type(model).__name__ == family
    names = set(split_experts(dict(model.named_parameters())))  # a tied head appears once
    assert set(Table(config).hf_names(with_lm_head=True)) == names


def test_transformer_engine_names_are_known_and_others_refused():
    table = Table(qwen3())
    fused_norm = table.rule("decoder.layers.1.mlp.linear_fc1.layer_norm_weight", first_layer=0)
    assert fused_norm.parts == ("model.layers.1.post_attention_layernorm.weight",)
    bias = "decoder.layers.1.self_attention.linear_qkv.bias"  # Qwen3 has none
    for name in ("decoder.layers.1.mlp.linear_fc9.weight", "decoder.something.weight", bias):
        with pytest.raises(UserError, match=name):
            table.rule(name, first_layer=0)
