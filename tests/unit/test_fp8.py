"""The section fp8: Megatron's fields, refusals, alignment."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from transformers import Qwen3Config

from megatron_ac2.config_training import Fp8Config, ParallelConfig
from megatron_ac2.model import fp8 as fp8_training
from megatron_ac2.model.build import transformer_config
from megatron_ac2.model.fp8 import RECIPES, fp8_problems, megatron_fields, token_multiple, why_unsupported
from megatron_ac2.training.step import token_alignment
from megatron_ac2.types import UserError


def qwen3(**changes) -> Qwen3Config:
    sizes = dict(
        vocab_size=250, hidden_size=64, intermediate_size=192, num_hidden_layers=6, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, architectures=["Qwen3ForCausalLM"],
        rope_parameters={"rope_type": "default", "rope_theta": 500.0},
    )  # fmt: skip
    return Qwen3Config(**{**sizes, **changes})


def problems_of(fp8: Fp8Config, layout: tuple[int, int] = (1, 1), extra: dict | None = None, **sizes) -> list[str]:
    return fp8_problems(fp8, qwen3(**sizes), ParallelConfig(*layout), extra or {})


@pytest.fixture
def able(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if this machine ran every recipe."""
    monkeypatch.setattr(fp8_training, "why_unsupported", lambda recipe: None)


@pytest.mark.parametrize(
    ("recipe", "fields"),
    [
        ("delayed", {"fp8": "hybrid", "fp8_amax_history_len": 1024, "fp8_amax_compute_algo": "max", "fp8_margin": 0}),
        ("tensorwise", {"fp8": "hybrid"}),
        ("blockwise", {"fp8": "e4m3"}),
        ("mxfp8", {"fp8": "e4m3"}),
    ],
)
def test_a_recipe_becomes_megatrons_fields(recipe: str, fields: dict, able: None) -> None:
    config = transformer_config(qwen3(), ParallelConfig(), torch.bfloat16, fp8=Fp8Config(recipe=recipe))
    for name, value in {"fp8_recipe": recipe, "first_last_layers_bf16": False, **fields}.items():
        assert getattr(config, name) == value, name


def test_every_switch_reaches_megatron(able: None) -> None:
    fp8 = Fp8Config(recipe="tensorwise", format="e4m3", keep_first_layers=2, keep_last_layers=0)
    config = transformer_config(qwen3(), ParallelConfig(1, 2), torch.bfloat16, fp8=fp8)
    assert (config.fp8, config.first_last_layers_bf16) == ("e4m3", True)
    assert (config.num_layers_at_start_in_bf16, config.num_layers_at_end_in_bf16) == (2, 0)
    delayed = Fp8Config(recipe="delayed", margin=1, amax_history_len=16, amax_algorithm="most_recent")
    fields = megatron_fields(delayed)
    assert (fields["fp8_margin"], fields["fp8_amax_history_len"]) == (1, 16)
    assert fields["fp8_amax_compute_algo"] == "most_recent"


def test_an_emulated_recipe_leaves_megatrons_fields_alone() -> None:
    assert megatron_fields(Fp8Config(recipe="mxfp8", emulate=True)) == megatron_fields(Fp8Config()) == {}
    config = transformer_config(qwen3(), ParallelConfig(), torch.float32, fp8=Fp8Config("tensorwise", emulate=True))
    assert config.fp8 is None


@pytest.mark.parametrize("recipe", RECIPES)
def test_without_transformer_engine_it_is_refused(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp8_training, "has_transformer_engine", lambda: False)
    with pytest.raises(UserError, match=f"fp8.recipe: found {recipe}; needs Transformer Engine.*accepted here: none"):
        transformer_config(qwen3(), ParallelConfig(), torch.bfloat16, fp8=Fp8Config(recipe=recipe))


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("fp8", "hybrid", "set fp8.recipe"),
        ("fp8", None, "set fp8.recipe"),
        ("fp8_recipe", "mxfp8", "set fp8.recipe"),
        ("first_last_layers_bf16", True, "set fp8.recipe"),
        ("fp8_param", True, "not supported"),
        ("fp8_dot_product_attention", True, "not supported"),
        ("fp4", "e2m1", "not supported"),
    ],
)
def test_the_open_section_does_not_quantise(field: str, value: object, words: str) -> None:
    with pytest.raises(UserError, match=f"megatron.{field}: found {value!r}.*{words}"):
        transformer_config(qwen3(), ParallelConfig(), torch.bfloat16, {field: value})


def engine_that_says(monkeypatch: pytest.MonkeyPatch, module: str, **answers: tuple[bool, str]) -> None:
    """A Transformer Engine whose checks give `answers`, and a GPU to ask about."""
    for name in ("transformer_engine", "transformer_engine.pytorch", module):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    for name, answer in answers.items():
        monkeypatch.setattr(sys.modules[module], name, lambda answer=answer: answer, raising=False)
    monkeypatch.setattr(fp8_training, "has_transformer_engine", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)


@pytest.mark.parametrize("module", ["transformer_engine.pytorch.quantization", "transformer_engine.pytorch.fp8"])
def test_transformer_engine_decides_what_the_gpu_can(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hopper: per-tensor and block scaling, no MXFP8. Its checks moved to another module in 2.9."""
    reason = "Device compute capability 10.0 or higher required for MXFP8 execution."
    engine_that_says(
        monkeypatch, module, check_fp8_support=(True, ""), check_fp8_block_scaling_support=(True, ""),
        check_mxfp8_support=(False, reason),
    )  # fmt: skip
    monkeypatch.setattr(fp8_training, "is_te_min_version", lambda version: True)
    assert [why_unsupported(recipe) for recipe in RECIPES] == [None, None, None, reason]
    (problem,) = problems_of(Fp8Config("mxfp8"))
    assert problem == f"fp8.recipe: found mxfp8; {reason}; accepted here: none, delayed, tensorwise, blockwise"


def test_an_old_transformer_engine_lacks_recipes(monkeypatch: pytest.MonkeyPatch) -> None:
    engine_that_says(monkeypatch, "transformer_engine.pytorch.fp8", check_fp8_support=(True, ""))
    monkeypatch.setattr(fp8_training, "is_te_min_version", lambda version: version == "1.0")
    assert why_unsupported("delayed") is None
    assert why_unsupported("blockwise") == "needs Transformer Engine 2.3.0 or newer"
    monkeypatch.setattr(fp8_training, "is_te_min_version", lambda version: True)
    assert why_unsupported("mxfp8") == "needs a Transformer Engine that has check_mxfp8_support"


def test_emulation_is_for_machines_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    assert problems_of(Fp8Config("mxfp8", emulate=True)) == []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert "fp8.emulate: found true" in problems_of(Fp8Config("mxfp8", emulate=True))[0]


def test_shares_of_weights_that_no_gemm_takes(able: None) -> None:
    """Tensor degree 2: 192 / 2 = 96 feed-forward channels are 3 x 32; 4: 48 are 3 x 16."""
    assert problems_of(Fp8Config("mxfp8"), (2, 1)) == problems_of(Fp8Config("tensorwise"), (4, 1)) == []
    (problem,) = problems_of(Fp8Config("mxfp8"), (4, 1))
    assert "a rank's share of the feed-forward channels is 48, and its GEMMs take multiples of 32" in problem
    assert len(problems_of(Fp8Config("tensorwise"), head_dim=6, hidden_size=72)) == 2  # and 4 x 6; 8 x 6 fits
    assert problems_of(Fp8Config("mxfp8", emulate=True), hidden_size=72) == problems_of(Fp8Config(), hidden_size=72)


def test_kept_layers_must_fit_a_stage(able: None) -> None:
    assert problems_of(Fp8Config("tensorwise", keep_first_layers=3, keep_last_layers=3), (1, 2)) == []
    (problem,) = problems_of(Fp8Config("tensorwise", keep_last_layers=4), (1, 2))
    assert problem == "fp8.keep_last_layers: found 4, a pipeline stage has 3 layers; accepted: up to that"


def test_recompute_under_moving_scales_is_refused() -> None:
    full = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    (problem,) = problems_of(Fp8Config("delayed", emulate=True), extra=full)
    assert problem.startswith("megatron.recompute_granularity: found 'full'")
    assert problems_of(Fp8Config("tensorwise", emulate=True), extra=full) == []


def test_another_amax_group_than_the_emulations_is_refused() -> None:
    (problem,) = problems_of(Fp8Config("delayed", emulate=True), extra={"tp_only_amax_red": True})
    assert problem.startswith("megatron.tp_only_amax_red: found True")
    assert problems_of(Fp8Config("tensorwise", emulate=True), extra={"tp_only_amax_red": True}) == []


@pytest.mark.parametrize(
    ("recipe", "multiple"), [("none", 1), ("delayed", 16), ("tensorwise", 16), ("blockwise", 128), ("mxfp8", 32)]
)
def test_alignment_is_owned_by_one_function(recipe: str, multiple: int) -> None:
    fp8 = Fp8Config(recipe)
    assert token_multiple(fp8) == multiple
    on_cpu, on_gpu = (SimpleNamespace(tensor=4, context=2, on_cpu=on_cpu) for on_cpu in (True, False))
    assert token_alignment(on_cpu, fp8) == 4 * 2 * multiple
    assert token_alignment(on_gpu, fp8) == 4 * 2 * max(multiple, 16)
