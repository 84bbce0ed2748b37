"""Linear layers that round as FP8 would, in one process: products and gradients, delayed scales, which layers."""

from __future__ import annotations

import os
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from transformers import Qwen3Config, Qwen3MoeConfig

from megatron_ac2.config_training import Fp8Config, ParallelConfig
from megatron_ac2.data.packing import longest, pack, plan_microbatches
from megatron_ac2.model.build import build_model, transformer_config
from megatron_ac2.model.fp8_linear import DelayedScales, EmulatedFp8, Fp8ColumnParallelLinear, Fp8RowParallelLinear
from megatron_ac2.parallel.topology import Topology, init_topology, shutdown
from megatron_ac2.types import PackedBatch, UserError
from tests.unit import fp8_double

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
RECIPES = ("delayed", "tensorwise", "blockwise", "mxfp8")


@pytest.fixture(scope="module")
def topology() -> Iterator[Topology]:
    environment = dict(os.environ)
    yield init_topology(ParallelConfig(), seed=0)
    shutdown()
    os.environ.clear()  # a world of one has set RANK and the like
    os.environ.update(environment)


def qwen3(**changes) -> Qwen3Config:
    sizes = dict(
        vocab_size=250, hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, architectures=["Qwen3ForCausalLM"], initializer_range=0.1,
        rope_parameters={"rope_type": "default", "rope_theta": 500.0},
    )  # fmt: skip
    return Qwen3Config(**{**sizes, **changes})


def layer_of(kind: type, topology: Topology, fp8: Fp8Config, sizes: tuple[int, int]) -> torch.nn.Module:
    config = transformer_config(qwen3(), ParallelConfig(), torch.float32)
    own = {"input_is_parallel": True} if kind is Fp8RowParallelLinear else {}
    torch.manual_seed(1)
    return kind(
        *sizes, config=config, init_method=torch.nn.init.normal_, bias=False, skip_bias_add=False,
        tp_group=topology.pg.tp, emulated=EmulatedFp8(fp8, topology.pg.tp_dp_cp), **own,
    )  # fmt: skip


def uneven(*shape: int, seed: int) -> torch.Tensor:
    """Rows and columns of very different sizes."""
    values = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return values * torch.logspace(-2, 1, shape[1]) * torch.logspace(-2, 2, shape[0])[:, None]


@pytest.mark.parametrize("kind", [Fp8ColumnParallelLinear, Fp8RowParallelLinear])
@pytest.mark.parametrize("recipe", ["tensorwise", "blockwise", "mxfp8"])
@pytest.mark.parametrize("form", ["e4m3", "hybrid"])
def test_products_are_those_of_rounded_operands(kind: type, recipe: str, form: str, topology: Topology) -> None:
    """Straight-through: what backward multiplies is rounded, and rounding itself has the gradient of the identity."""
    layer = layer_of(kind, topology, Fp8Config(recipe, emulate=True, format=form), (160, 96))
    inputs, gradient = uneven(144, 160, seed=2).requires_grad_(), uneven(144, 96, seed=3)
    output, _ = layer(inputs[:, None])
    output.backward(gradient[:, None])
    backward = E4M3 if form == "e4m3" else E5M2
    expected = fp8_double.linear(inputs.detach(), layer.weight.detach(), gradient, recipe, backward)
    for found, double in zip((output[:, 0], inputs.grad, layer.weight.grad), expected, strict=True):
        assert (found - double).norm() <= 1e-6 * double.norm()
    exact = inputs.double() @ layer.weight.double().T
    assert 1e-3 * exact.norm() < (output[:, 0] - exact).norm() < 0.1 * exact.norm()


def test_delayed_scales_hand_worked(topology: Topology) -> None:
    scales = DelayedScales(EmulatedFp8(Fp8Config("delayed", emulate=True, amax_history_len=2, margin=1), None))
    first = scales.round(torch.tensor([[1.03, 500.0, -14.0]]), "input", record=True)
    assert first.tolist() == [[1.0, 448.0, -14.0]]  # scale 1: saturates
    assert scales.scale.tolist() == pytest.approx([224 / 500, 1.0, 1.0])
    scales.round(torch.tensor([[7.0]]), "input", record=True)
    assert scales.scale[0] == pytest.approx(224 / 500) and scales.amax_history[0].tolist() == [500.0, 7.0]
    scales.round(torch.tensor([[3.5]]), "input", record=True)
    assert scales.scale[0] == 32.0  # 224 / 7: the 500 has left the window
    assert scales.round(torch.tensor([[14.1]]), "input", record=False).tolist() == [[14.0]]
    for says_nothing in (torch.zeros(2, 2), torch.zeros(0, 2)):
        scales.round(says_nothing, "input", record=True)
    assert scales.amax_history[0].tolist() == [7.0, 3.5]
    scales.round(torch.tensor([[torch.inf]]), "input", record=True)
    assert scales.scale[0] == 32.0
    scales.round(torch.tensor([[28672.0]]), "gradient", record=True)
    assert scales.scale.tolist() == [32.0, 1.0, 1.0]  # 57344 / 2 / 28672


def test_most_recent_forgets_at_once() -> None:
    fp8 = Fp8Config("delayed", emulate=True, amax_history_len=4, amax_algorithm="most_recent")
    scales = DelayedScales(EmulatedFp8(fp8, None))
    for amax in (500.0, 7.0):
        scales.round(torch.tensor([[amax]]), "weight", record=True)
    assert scales.scale.tolist() == [1.0, 64.0, 1.0]


def test_a_pass_without_gradients_leaves_delayed_scales_alone(topology: Topology) -> None:
    layer = layer_of(Fp8ColumnParallelLinear, topology, Fp8Config("delayed", emulate=True), (64, 32))
    inputs = uneven(16, 64, seed=2)[:, None]
    with torch.no_grad():
        before = layer(inputs)[0]
        assert torch.equal(layer(inputs)[0], before) and (layer.fp8.scale == 1).all()
    assert torch.equal(layer(inputs)[0], before)  # rounds under the old scales, and moves them
    with torch.no_grad():
        after = layer(inputs)[0]
    exact = inputs @ layer.weight.T
    assert (after - exact).norm() < (before - exact).norm()


@pytest.mark.parametrize("recipe", RECIPES)
def test_linear_layers_round_and_nothing_else_does(recipe: str, topology: Topology) -> None:
    fp8 = Fp8Config(recipe, emulate=True)
    if recipe != "delayed":
        fp8.keep_first_layers, fp8.keep_last_layers = 1, 2
    model = build_model(qwen3(), topology, ParallelConfig(), torch.float32, fp8=fp8)
    rounding = {n for n, m in model.named_modules() if isinstance(m, (Fp8ColumnParallelLinear, Fp8RowParallelLinear))}
    parts = ("self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc1", "mlp.linear_fc2")
    layers = range(4) if recipe == "delayed" else (1,)
    assert rounding == {f"decoder.layers.{layer}.{part}" for layer in layers for part in parts}
    plain = {n for n, m in model.named_modules() if type(m) in (ColumnParallelLinear, RowParallelLinear)}
    assert "output_layer" in plain and len(plain) == 1 + 4 * (4 - len(layers))
    assert [name for name, _ in model.named_buffers() if "fp8" in name] == [
        f"decoder.layers.{layer}.{part}.fp8.{buffer}"
        for layer in (layers if recipe == "delayed" else ())
        for part in (parts[1], parts[0], parts[2], parts[3])
        for buffer in ("scale", "amax_history")
    ]


def test_experts_round_and_their_router_does_not(topology: Topology) -> None:
    experts = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, norm_topk_prob=True)
    kind = {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe"}
    hf_config = Qwen3MoeConfig(**qwen3().to_dict() | experts | kind)
    parallel, fp8 = ParallelConfig(), Fp8Config("blockwise", emulate=True)
    model = build_model(hf_config, topology, parallel, torch.float32, seed=3, fp8=fp8)
    rounding = {n for n, m in model.named_modules() if isinstance(m, (Fp8ColumnParallelLinear, Fp8RowParallelLinear))}
    assert len(rounding) == 4 * (2 + 2 * 4) and "decoder.layers.0.mlp.experts.local_experts.3.linear_fc2" in rounding
    ids = torch.arange(3)[None]  # six places for four experts: some may have no token
    output = model(ids, ids, None)
    output.sum().backward()
    assert output.isfinite().all()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())
    with pytest.raises(UserError, match="fp8.recipe: found delayed.*experts: tensorwise, blockwise, mxfp8"):
        build_model(hf_config, topology, parallel, torch.float32, fp8=Fp8Config("delayed", emulate=True))


def with_outlier(model: torch.nn.Module) -> torch.nn.Module:
    """The padding token's activations, once normalised, are the largest of all."""
    with torch.no_grad():
        model.embedding.word_embeddings.weight[249] = 10 * torch.eye(64)[5]
    return model


def forward(model: torch.nn.Module, batch: PackedBatch) -> torch.Tensor:
    bounds, size = batch.cu_seqlens, batch.max_seq_len
    packed = PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=bounds, cu_seqlens_kv=bounds, max_seqlen_q=size, max_seqlen_kv=size
    )
    return model(batch.token_ids, batch.position_ids, None, packed_seq_params=packed)


def run_padded(recipe: str, topology: Topology, batch: PackedBatch, num_tokens: int) -> list[torch.Tensor]:
    """Logits [num_tokens, V] of the real tokens and all gradients, of a loss that covers them alone. float64: a row's
    sums may be done in another order."""
    fp8 = Fp8Config(recipe, emulate=True)
    model = with_outlier(build_model(qwen3(), topology, ParallelConfig(), torch.float64, seed=3, fp8=fp8))
    for _ in range(2):  # the second under delayed scales that have seen the padding
        model.zero_grad()
        logits = forward(model, batch)[0, :num_tokens]
        cotangent = torch.randn(logits.shape, generator=torch.Generator().manual_seed(4), dtype=logits.dtype)
        (logits * cotangent).sum().backward()
    return [logits.detach(), torch.cat([parameter.grad.flatten() for parameter in model.parameters()])]


@pytest.mark.parametrize("recipe", RECIPES)
def test_padding_disturbs_no_scale(recipe: str, topology: Topology) -> None:
    """Other lengths of padding, the same logits and gradients. Blocks too: repeats are prefixes of one another, so that
    the last block with a real token holds the same ones. Padding tokens in their place move per-tensor scales."""
    sequences = [np.arange(length) % 249 for length in (140, 30, 36)]
    batches = {align: pack(sequences, {}, [1] * 3, align, pad_id=249) for align in (256, 384, 512)}
    assert [batch.token_ids.shape[1] for batch in batches.values()] == [256, 384, 512]
    found = {align: run_padded(recipe, topology, batch, 206) for align, batch in batches.items()}
    for align in (384, 512):
        for values, expected in zip(found[align], found[256], strict=True):
            assert (values - expected).norm() <= 1e-6 * expected.norm()
    batches[256].token_ids[0, 206:] = 249
    logits, gradients = run_padded(recipe, topology, batches[256], 206)
    if recipe in ("delayed", "tensorwise"):
        assert (logits - found[256][0]).norm() > 1e-3 * found[256][0].norm()
    else:  # a block's scale is a row's or, for the weight gradient, a few tokens'
        assert (logits - found[256][0]).norm() <= 1e-6 * found[256][0].norm()


def test_an_empty_microbatch_disturbs_no_scale(topology: Topology) -> None:
    """It repeats a real sequence of the pass. The padding token in its place would move the scales of inputs."""
    sequences = [np.arange(length) % 249 for length in (30, 140, 36)]
    (plan,) = plan_microbatches(list(map(len, sequences)), 1, 180)
    real = [pack([sequences[i] for i in indices], {}, [1] * len(indices), 16, pad_id=249) for indices in plan]
    assert len(real) == 2
    for filler, moves in ((longest(sequences), False), (None, True)):
        model = build_model(
            qwen3(), topology, ParallelConfig(), torch.float64, seed=3, fp8=Fp8Config("delayed", emulate=True)
        )
        for _ in range(4):  # until scales have settled, from 1
            settled = input_scales(with_outlier(model), real)
        found = input_scales(model, [pack([], {}, [], 16, pad_id=249, filler=filler)])
        if moves:
            assert (found < 0.9 * settled).any()
        else:
            torch.testing.assert_close(found, settled, rtol=1e-6, atol=0)


def input_scales(model: torch.nn.Module, batches: list[PackedBatch]) -> torch.Tensor:
    """Of every layer after a pass over the batches; float64, so that a row's sums may be done in another order."""
    for batch in batches:
        forward(model, batch).sum().mul(0).backward()
    return torch.stack([module.scale[0] for module in model.modules() if isinstance(module, DelayedScales)])
