"""The memory plan by hand: buffers and shards, in-flight microbatches, cache blocks, cards, advice. Counted bytes of
real models: tests/distributed/memory_cases.py."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from megatron.core.pipeline_parallel.schedules import get_pp_rank_microbatches
from transformers import Qwen3Config, Qwen3MoeConfig

from megatron_ac2.config import Config
from megatron_ac2.config_file import load_config
from megatron_ac2.config_training import ParallelConfig
from megatron_ac2.memory.__main__ import main
from megatron_ac2.memory.activations import Microbatch, chunk_bytes, in_flight, layer_terms
from megatron_ac2.memory.advice import changes, together
from megatron_ac2.memory.engine import EngineMemory, block_bytes, engine_weights
from megatron_ac2.memory.plan import RESERVE, plan_memory
from megatron_ac2.memory.question import Question, fewest_gpus, read_question
from megatron_ac2.memory.result import CARDS
from megatron_ac2.memory.shapes import Chunk, Parameter, Widths
from megatron_ac2.memory.states import States, model_states
from megatron_ac2.perf import GIB

BF16 = torch.bfloat16
QWEN3_4B = Qwen3Config(
    architectures=["Qwen3ForCausalLM"], hidden_size=2560, intermediate_size=9728, num_hidden_layers=36,
    num_attention_heads=32, num_key_value_heads=8, head_dim=128, vocab_size=151_936, tie_word_embeddings=True,
    max_position_embeddings=262_144, rope_parameters={"rope_type": "default", "rope_theta": 5e6},
)  # fmt: skip
WIDTHS = Widths(hidden=8, query=12, key_value=8, fused=20, ffn=10, num_heads=3, num_groups=1, head_dim=4, qk_norm=False)


def parameter(*shape: int, dtype: torch.dtype = BF16, shared: bool = False) -> Parameter:
    return Parameter("p", shape, dtype, shared)


def test_a_padded_buffer_by_hand():
    # Last first: 100 numbers at 0, 10 at 128; the bucket ends at 256 = 2 x 128: one of 100, one of 10.
    found = model_states([[parameter(10), parameter(100)]], num_ranks=2, distributed=True)
    assert found == [States(512, 1024, 400, 800), States(512, 1024, 40, 80)]


def test_the_plain_optimizer_has_all_on_every_rank():
    found = model_states([[parameter(10), parameter(100)]], num_ranks=2, distributed=False)
    assert found == [States(220, 440, 440, 880)] * 2


def test_fp32_weights_are_their_own_masters_and_have_a_buffer_of_their_own():
    found = model_states([[parameter(10), parameter(6, dtype=torch.float32)]], num_ranks=1, distributed=True)
    assert found == [States(128 * 2 + 128 * 4, 128 * 4 + 128 * 4, 40, 80 + 48)]


def test_a_shared_embedding_has_a_bucket_to_itself():
    # Buckets: 20 numbers -> 128; the embedding's 30 -> 128. Each data rank has half of each.
    found = model_states([[parameter(30, shared=True), parameter(20)]], num_ranks=2, distributed=True)
    assert found == [States(512, 1024, 200, 400), States(512, 1024, 0, 0)]


def test_ranges_cover_every_number_once():
    parameters = [parameter(n) for n in (1000, 64, 65, 3000, 1)]
    for ranks in (1, 3, 8, 64):
        found = model_states([parameters], ranks, distributed=True)
        assert sum(states.moments for states in found) == 8 * sum(p.numel for p in parameters)


@pytest.mark.parametrize("chunks", [None, 2, 3])
@pytest.mark.parametrize("pipeline", [2, 4])
def test_passes_in_flight_are_those_of_megatrons_schedule(pipeline, chunks):
    """Its warm-up, and the forward pass that comes before the first backward pass."""
    for stage in range(pipeline):
        group = SimpleNamespace(size=lambda: pipeline, rank=lambda stage=stage: stage)
        place = SimpleNamespace(pp_group=group, virtual_pipeline_model_parallel_size=chunks)
        _, _, warmup, _ = get_pp_rank_microbatches(64, chunks or 1, pipeline, p2p_communicator=place)
        parallel = ParallelConfig(pipeline=pipeline, virtual_pipeline=chunks)
        assert in_flight(parallel, stage) == warmup + 1


def test_layer_terms_by_hand():
    batch = Microbatch(tokens=16, itemsize=2, sequence_ranks=2, longest=16)
    terms = layer_terms(WIDTHS, batch, "transformer_engine", {})
    assert terms["attention norm"] == 8 * (2 * 8 * 2 + 4)  # split over two ranks
    assert terms["q, k, v"] == 16 * 20 * 2
    assert terms["rotated q and k, angles"] == 16 * (12 + 4 + 4 * 4) * 2
    assert terms["attention output"] == 16 * (12 * 2 + 3 * 4)
    assert terms["feed-forward"] == 16 * 5 * 10 * 2
    fused = layer_terms(WIDTHS, batch, "transformer_engine", {"bias_activation_fusion": True})
    assert fused["feed-forward"] == 16 * 3 * 10 * 2


def test_recompute_trades_layers_for_their_inputs():
    batch = Microbatch(tokens=16, itemsize=2, sequence_ranks=1, longest=16)
    chunk = Chunk((False,) * 6, first=False, last=False)
    layer = sum(layer_terms(WIDTHS, batch, "transformer_engine", {}).values())
    entry, angles = 16 * 8 * 2, 16 * 4 * 4

    def planned(**options):
        return chunk_bytes(chunk, WIDTHS, batch, "transformer_engine", options)

    assert planned() == (6 * layer, 0)
    full = {"recompute_granularity": "full", "recompute_num_layers": 2}
    assert planned(recompute_method="uniform", **full) == (3 * entry + angles, 2 * layer)
    assert planned(recompute_method="block", **full) == (2 * entry + 4 * layer + angles, layer)
    assert planned(recompute_granularity="selective") == (6 * (layer - 16 * 3 * 4), 16 * 3 * 4)


def test_cache_blocks_are_those_of_vllm():
    interface = pytest.importorskip("vllm.v1.kv_cache_interface")
    for tensor, heads in ((1, 8), (4, 2), (16, 1)):
        page = interface.FullAttentionSpec(block_size=32, num_kv_heads=heads, head_size=128, dtype=BF16).page_size_bytes
        assert block_bytes(QWEN3_4B, tensor, 32, BF16) == 36 * page
    assert block_bytes(QWEN3_4B, 1, 1, BF16) == 2 * 36 * 8 * 128 * 2  # 144 KiB a token


def test_engine_weights_are_the_models_own():
    # 36 layers of 100,925,440 and two head norms, two norms each; the embedding once; the final norm.
    numbers = 36 * (100_925_440 + 2 * 2560 + 2 * 128) + 151_936 * 2560 + 2560
    assert engine_weights(QWEN3_4B, 1, BF16) == 2 * numbers


def test_what_is_left_of_the_budget_is_cache():
    engine = EngineMemory(weights=100, workspace=50, block_bytes=10, block_size=4)
    assert engine.cached_tokens(100 + 50 + 39) == 12
    assert engine.cached_tokens(120) == 0


def recipe(**changes) -> Config:
    config = Config()
    config.model.path = config.data.train = "somewhere"
    config.parallel = ParallelConfig(tensor=2, sequence=True)
    config.megatron = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    for name, value in changes.items():
        setattr(config, name, value)
    return config


def total(plan, name: str) -> int:
    return sum(item.num_bytes for item in plan.worst.resident if item.name == name)


def test_states_of_the_papers_recipe():
    """Qwen3-4B, two Adam states over one model, tensor 2, 4 data ranks: 2 + 4 + (4 + 8 + 8) / 4 bytes a parameter."""
    plan = plan_memory(recipe(), QWEN3_4B, None, num_gpus=8)
    shard = total(plan, "actor: weights") // 2
    assert shard == pytest.approx(4.022e9 / 2, rel=1e-3)  # with norms on both ranks, and padding
    assert total(plan, "actor: gradients, fp32") == 4 * shard
    assert total(plan, "actor: master weights, fp32") == pytest.approx(4 * shard / 4, rel=1e-4)
    assert total(plan, "critic: Adam moments") == total(plan, "actor: Adam moments")
    assert total(plan, "actor: Adam moments") == pytest.approx(8 * shard / 4, rel=1e-4)


def test_a_critic_reads_a_reference_besides():
    config = recipe()
    config.sampling.response_budget = config.critic.max_tokens_per_microbatch = 50_000
    kept = [item for item in plan_memory(config, QWEN3_4B, None, 2).worst.phases["critic update"]]
    config.critic.use_references = False
    alone = [item for item in plan_memory(config, QWEN3_4B, None, 2).worst.phases["critic update"]]
    assert kept[0].num_bytes == pytest.approx(2 * alone[0].num_bytes, rel=1e-3)


def test_a_value_head_has_a_model_and_a_reference_model_no_gradients():
    config = recipe()
    config.critic.kind = "value_head"
    config.actor.reference_kl.coefficient = 0.1
    plan = plan_memory(config, QWEN3_4B, QWEN3_4B, num_gpus=2)
    names = [item.name for item in plan.worst.resident]
    assert "critic: weights" in names and "reference model: weights" in names
    assert not any(name.startswith("reference model: g") for name in names)


def test_the_first_of_two_stages_holds_two_microbatches():
    config = recipe(parallel=ParallelConfig(pipeline=2))
    first, last = plan_memory(config, QWEN3_4B, None, num_gpus=2).stages
    layers = [next(item for item in stage.phases["actor update"] if "layers" in item.name) for stage in (first, last)]
    assert "18 layers x 2" in layers[0].name and layers[0].num_bytes == 2 * layers[1].num_bytes


def question(config: Config, num_gpus: int = 8) -> Question:
    return Question(config, QWEN3_4B, None, num_gpus)


def test_advice_is_a_plan_that_was_made():
    asked = question(recipe(megatron={}))
    card = CARDS["141 GB"]
    assert asked.plan().problem(card) == "memory"
    best = changes(asked, card)[0]
    assert "recompute_granularity=full" in best.overrides and best.fits
    assert best.gain == question(recipe()).plan().spare(card) - asked.plan().spare(card)
    assert question(recipe()).plan().problem(card) is None


def test_changes_are_joined_until_they_fit():
    asked = question(recipe(megatron={}, parallel=ParallelConfig(tensor=2)))
    taken = together(asked, CARDS["80 GB"])
    assert len(taken) > 1 and taken[-1].fits
    assert taken[-1].question.plan().problem(CARDS["80 GB"]) is None


def test_with_offload_trainer_and_engine_take_turns():
    """The worse of the two moments counts: the trainer at its peak, or the engine beside what the trainer leaves."""
    card = CARDS["141 GB"]
    plans = {}
    for offload in ("none", "optimizer", "all"):
        config = recipe()
        config.run.offload, config.engine.gpu_memory_utilization = offload, 0.9
        plans[offload] = plan_memory(config, QWEN3_4B, None, 8)
    peak, engine = plans["none"].worst.peak_bytes, int(0.9 * card)
    assert plans["none"].spare(card) == card - peak - engine < 0
    weights = total(plans["none"], "actor: weights")
    assert plans["optimizer"].spare(card) == card - max(peak, weights + RESERVE + engine)
    assert plans["all"].spare(card) == card - max(peak, RESERVE + engine) > 0
    assert any("run.offload=all" in change.overrides and change.fits for change in changes(asked_of(0.9), card))


def asked_of(utilization: float) -> Question:
    config = recipe()
    config.engine.gpu_memory_utilization = utilization
    return question(config)


def test_no_advice_that_cannot_be_laid_out():
    overrides = [change.overrides for change in changes(question(recipe(), num_gpus=2), CARDS["80 GB"])]
    assert not any("parallel.tensor=4" in text for text in overrides)  # two GPUs only


def test_a_cache_too_small_for_one_request_does_not_fit():
    config = recipe()
    config.engine.gpu_memory_utilization = 0.12
    plan = plan_memory(config, QWEN3_4B, None, 8)
    assert plan.spare(CARDS["80 GB"]) > 0 and plan.problem(CARDS["80 GB"]) == "cache"


def test_the_shipped_recipe_fits_the_cards_it_names(tmp_path):
    QWEN3_4B.save_pretrained(tmp_path)
    path = Path(__file__).resolve().parents[2] / "examples" / "qwen3_4b_proofs.yaml"
    plan = read_question(load_config(path, [f"model.path={tmp_path}"]), 8).plan()
    assert plan.problem(CARDS["80 GB"]) is None, plan.spare(CARDS["80 GB"]) / GIB


@pytest.fixture
def files(tmp_path):
    QWEN3_4B.save_pretrained(tmp_path / "model")  # config.json alone
    path = tmp_path / "config.yaml"
    megatron = recipe().megatron
    path.write_text(yaml.safe_dump({"model": {"path": str(tmp_path / "model")}, "data": {"train": "-"},
                                    "parallel": {"tensor": 2, "sequence": True}, "megatron": megatron}))  # fmt: skip
    return path


def test_the_command_prints_tables_and_json(files, capsys):
    assert main([str(files), "--gpus", "8"]) == 0
    text = capsys.readouterr().out
    for words in ("actor: weights", "cards:", "141 GB", "144 KiB a token"):
        assert words in text
    assert main([str(files), "--gpus", "8", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["cards"]["141 GB"]["fits"] and found["stages"][0]["peak_bytes"] > 20 * GIB


def test_the_command_names_mistakes_and_misfits(files, capsys):
    assert main([str(files), "--gpus", "3"]) == 1
    assert "multiple" in capsys.readouterr().err
    assert main([str(files), "parallel.tensor=5"]) == 1
    assert "divisors of" in capsys.readouterr().err
    assert (
        main([str(files), "megatron.recompute_granularity=null", "parallel.tensor=1", "parallel.sequence=false"]) == 2
    )
    assert "what helps most" in capsys.readouterr().out


QWEN3_30B_A3B = Qwen3MoeConfig(
    architectures=["Qwen3MoeForCausalLM"], hidden_size=2048, intermediate_size=6144, moe_intermediate_size=768,
    num_hidden_layers=48, num_attention_heads=32, num_key_value_heads=4, head_dim=128, vocab_size=151_936,
    num_experts=128, num_experts_per_tok=8, norm_topk_prob=True, tie_word_embeddings=False,
    max_position_embeddings=262_144, rope_parameters={"rope_type": "default", "rope_theta": 1e7},
)  # fmt: skip


def test_experts_are_shared_out():
    """30.5 billion parameters; tensor 4, each expert whole on one of 8 ranks: 16 of 128 on each, in two copies."""
    config = recipe(parallel=ParallelConfig(tensor=4, sequence=True, expert=8, expert_tensor=1))
    plan = plan_memory(config, QWEN3_30B_A3B, None, num_gpus=16)
    experts = 48 * 128 * 3 * 2048 * 768
    dense = 48 * (2 * 2048 * 32 * 128 + 2 * 2048 * 4 * 128) + 2 * 151_936 * 2048
    router = 48 * 128 * 2048
    assert total(plan, "actor: weights") == pytest.approx(2 * (experts / 8 + dense / 4 + router), rel=1e-3)
    assert total(plan, "actor: Adam moments") == pytest.approx(8 * (experts / 16 + (dense / 4 + router) / 4), rel=1e-3)
    assert engine_weights(QWEN3_30B_A3B, 2, BF16) == pytest.approx(2 * ((experts + dense) / 2 + router), rel=1e-3)
    assert any("chosen equally often" in note for note in plan.notes)


def test_terms_of_experts_by_hand():
    widths = replace(WIDTHS, num_experts=4, chosen=2, expert_ffn=5, expert_ranks=2)
    batch = Microbatch(tokens=16, itemsize=2, sequence_ranks=2, longest=16)
    terms = layer_terms(widths, batch, "transformer_engine", {}, sparse=True)
    assert "feed-forward" not in terms
    every = 4 * (5 if version("megatron-core").startswith("0.16.") else 8)
    assert terms["router"] == 8 * (2 * (8 + 8) + every + 2 * 4)
    # 8 tokens on each of two ranks, two experts a token, each expert on both ranks: 32 copies on one.
    assert terms["experts' inputs"] == 32 * 8 * 2
    assert terms["experts"] == 32 * (6 * 5 * 2 + 4)
    chunk = Chunk((False, True), first=False, last=False)
    dense = sum(layer_terms(widths, batch, "transformer_engine", {}).values())
    assert chunk_bytes(chunk, widths, batch, "transformer_engine", {}) == (dense + sum(terms.values()), 0)


def test_as_few_gpus_as_the_layout_has():
    assert fewest_gpus(ParallelConfig(tensor=4, context=2, pipeline=3)) == 24
    assert fewest_gpus(ParallelConfig(tensor=4, expert=8, expert_tensor=1)) == 8
    assert fewest_gpus(ParallelConfig(tensor=3, expert=2)) == 6
