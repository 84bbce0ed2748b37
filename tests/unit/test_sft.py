"""The supervised stage refuses what a training run with the same model, layout and FP8 recipe would refuse."""

from __future__ import annotations

import pytest
import torch
from transformers import Qwen3Config

from megatron_ac2.config import ModelConfig
from megatron_ac2.config_file import load_config
from megatron_ac2.config_training import Fp8Config, ParallelConfig
from megatron_ac2.sft import SftConfig, StageConfig, stage_problems
from megatron_ac2.types import UserError

MODEL = Qwen3Config(
    vocab_size=250, hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=2, head_dim=32, architectures=["Qwen3ForCausalLM"],
)  # fmt: skip


def problems_of(
    fp8: Fp8Config, dtype: str = "float32", layout: tuple[int, ...] = (1, 1), head: str = "lm", **megatron: object
) -> list[str]:
    config = SftConfig(
        model=ModelConfig("m", dtype), parallel=ParallelConfig(*layout), fp8=fp8, sft=StageConfig("d", "o", head),
        megatron=megatron,
    )  # fmt: skip
    return stage_problems(config, MODEL, world_size=2)


@pytest.mark.parametrize("recipe", ["none", "delayed", "tensorwise", "blockwise", "mxfp8"])
def test_emulated_recipes_run_on_cpu(recipe: str) -> None:
    if torch.cuda.is_available():
        pytest.skip("emulation is for machines without a GPU")
    assert problems_of(Fp8Config(recipe, emulate=recipe != "none"), layout=(2, 1)) == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_recipes_need_transformer_engine_and_a_gpu() -> None:
    (problem,) = problems_of(Fp8Config("tensorwise"), "bfloat16")
    assert problem.startswith("fp8.recipe: found tensorwise; needs ")
    assert problem.endswith("accepted here: none, or fp8.emulate true, which rounds as it would")


@pytest.mark.parametrize(
    ("fp8", "dtype", "starts"),
    [
        (Fp8Config("e4m3"), "bfloat16", ["fp8.recipe: found 'e4m3', accepted: none, delayed"]),
        (Fp8Config("mxfp8"), "float32", ["fp8.recipe: found 'mxfp8', needs model.dtype bfloat16"]),
        (Fp8Config(emulate=True), "float32", ["fp8.emulate: found True, but fp8.recipe is none"]),
        (Fp8Config("delayed", True, margin=-1, keep_first_layers=1), "half",
         ["model.dtype: found 'half'", "fp8.margin: found -1", "fp8.keep_first_layers: found 1"]),
    ],
)  # fmt: skip
def test_impossible_values_are_named_by_the_trainers_checks(fp8: Fp8Config, dtype: str, starts: list[str]) -> None:
    found = problems_of(fp8, dtype)
    assert len(found) == len(starts), found
    assert all(problem.startswith(start) for problem, start in zip(found, starts, strict=True)), found


def test_layout_model_and_head_are_checked_together() -> None:
    fp8 = Fp8Config("delayed", emulate=torch.cuda.is_available() is False, keep_last_layers=0)
    found = problems_of(fp8, layout=(3, 1), head="values", recompute_granularity="full", no_such_field=1)
    for start in (
        "sft.head: found 'values'", "parallel.tensor x parallel.pipeline", "parallel.tensor: found 3, model has 4",
        "megatron.no_such_field", "megatron.recompute_granularity: found 'full', but under fp8.recipe delayed",
    ):  # fmt: skip
        assert sum(problem.startswith(start) for problem in found) == 1, (start, found)


def test_the_section_is_read_from_a_file(tmp_path) -> None:
    path = tmp_path / "sft.yaml"
    path.write_text("model: {path: m}\nsft: {data: d, out: o}\nfp8: {recipe: blockwise, emulate: true}\n")
    assert load_config(path, ["fp8.keep_last_layers=2"], SftConfig).fp8 == Fp8Config("blockwise", True, "auto", 0, 2)


def test_its_own_numbers_choices_and_folder_are_checked(tmp_path) -> None:
    path = tmp_path / "sft.yaml"
    path.write_text("model: {path: m}\nsft: {data: d, out: o}\n")
    overrides = ["sft.log_every=0", "sft.optimizer.lr=.nan", "sft.labels=right", "run.seed=-1", "sft.out=''"]
    with pytest.raises(UserError) as caught:
        load_config(path, overrides, SftConfig)
    named = [problem.partition(":")[0] for problem in caught.value.problems]
    assert named == ["run.seed", "sft.out", "sft.labels", "sft.optimizer.lr", "sft.log_every"]
    config = load_config(path, [f"sft.out={path}/o"], SftConfig)
    assert f"sft.out: found {path}/o, but {path} is not a folder" in stage_problems(config, MODEL, world_size=1)
