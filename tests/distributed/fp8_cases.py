"""One job of 2 ranks: emulated FP8 in several layouts against every rank on its own. float64, so that a
sum in another order does not round to another code.

usage: torchrun ... fp8_cases.py SCRATCH_DIR
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import Qwen3Config

from megatron_ac2.config_training import Fp8Config, ParallelConfig
from megatron_ac2.model.build import build_model, padded_vocab_size
from megatron_ac2.model.checkpoint_tensors import copy_to_host, load_model, write_tensors
from megatron_ac2.model.data_parallel import wrap_ddp
from megatron_ac2.model.hf_weights import export_hf_weights
from megatron_ac2.parallel.topology import Topology, init_topology, shutdown
from tests.distributed.fp8_context import check_context
from tests.distributed.groups import leave_groups
from tests.distributed.model_cases import full_logits, run_packed

# Two tensor ranks' shares are whole blocks of 128: so are a key-value group's rows, and gate and up channels.
MODEL = Qwen3Config(
    vocab_size=250, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=64, initializer_range=0.1, architectures=["Qwen3ForCausalLM"],
    tie_word_embeddings=False, rope_parameters={"rope_type": "default", "rope_theta": 500.0},
)  # fmt: skip
RECIPES = ("none", "delayed", "tensorwise", "blockwise", "mxfp8")
NUM_PASSES = 3  # delayed scales move
LAYOUTS = {"tp2": (2, 1, False), "tp2_sp": (2, 1, True), "pp2": (1, 2, False)}
Result = tuple[list[torch.Tensor], dict[str, torch.Tensor], dict[str, torch.Tensor]]


def batches(topology: Topology) -> tuple[list[list[torch.Tensor]], list[torch.Tensor]]:
    """Two microbatches of 256 tokens, and cotangents of this rank's logits; the last 40 positions carry no loss."""
    generator = torch.Generator().manual_seed(7)
    microbatches = [
        [torch.randint(0, 250, (length,), generator=generator) for length in lengths]
        for lengths in ((150, 66, 40), (216, 40))
    ]
    width = padded_vocab_size(MODEL, topology.tensor) // topology.tensor
    cotangents = []
    for _ in microbatches:
        cotangent = torch.zeros(256, topology.tensor * width, dtype=torch.float64)
        cotangent[:216, :250] = torch.randn(216, 250, generator=generator, dtype=torch.float64) / 50
        cotangents.append(cotangent[:, topology.tensor_rank * width :][:, :width])
    return microbatches, cotangents


def run(recipe: str, layout: tuple[int, int, bool]) -> Result:
    """Logits of the last pass (last stage), gradients by Hugging Face name, delayed scales of this rank's layers."""
    parallel = ParallelConfig(*layout)
    topology = init_topology(parallel, seed=0, timeout_minutes=2)
    fp8 = Fp8Config(recipe, emulate=recipe != "none", amax_history_len=2)
    model = wrap_ddp(build_model(MODEL, topology, parallel, torch.float64, seed=3, fp8=fp8), False)
    fill(model.module, topology)
    microbatches, cotangents = batches(topology)
    for _ in range(NUM_PASSES):
        model.zero_grad_buffer()
        outputs = run_packed(model, microbatches, cotangents)
    logits = [full_logits(output, topology, 250) for output in outputs]
    scales = {name: buffer.clone() for name, buffer in model.module.named_buffers() if "fp8" in name}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.main_grad)
    gradients = {name: tensor.clone() for name, tensor in export_hf_weights(model, MODEL, topology)}
    leave_groups()
    return logits, gradients, scales


def fill(model: torch.nn.Module, topology: Topology) -> None:
    """The same model in every layout: each parameter is drawn in full and under its own name, then cut."""
    first_layer = model.decoder.layers[0].layer_number - 1
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            parts = name.split(".")
            if "layers" in parts:
                parts[2] = str(int(parts[2]) + first_layer)
            parameter.copy_(cut(".".join(parts), parameter, topology))


def cut(name: str, parameter: torch.Tensor, topology: Topology) -> torch.Tensor:
    seed = sum(ord(letter) * 31**place for place, letter in enumerate(name)) % 2**31
    generator = torch.Generator().manual_seed(seed)
    dim = getattr(parameter, "partition_dim", -1) if getattr(parameter, "tensor_model_parallel", False) else -1
    shape = [size * (topology.tensor if place == dim else 1) for place, size in enumerate(parameter.shape)]
    full = torch.randn(shape, generator=generator, dtype=torch.float64)
    full = 1 + 0.1 * full if full.dim() == 1 else 0.1 * full
    if dim < 0 or topology.tensor == 1:
        return full
    if "linear_fc1" in name:  # gate and up channels, each cut
        gate, up = (half.chunk(topology.tensor)[topology.tensor_rank] for half in full.chunk(2))
        return torch.cat([gate, up])
    return full.chunk(topology.tensor, dim=dim)[topology.tensor_rank]


def assert_close(found: Result, expected: Result, limit: float, what: str) -> float:
    """Relative Frobenius differences within `limit`; the largest one."""
    logits = list(zip(found[0], expected[0], strict=False))  # none on the first of two stages
    pairs = [*logits, *((found[1][name], gradient) for name, gradient in expected[1].items())]
    assert found[1].keys() == expected[1].keys()
    worst = max(((a - b).norm() / b.norm()).item() for a, b in pairs)
    assert worst <= limit, f"{what}: off by {worst}, accepted {limit}"
    return worst


def changes(found: Result, expected: Result) -> list[float]:
    """Relative Frobenius differences of the logits, by microbatch."""
    return [((a - b).norm() / b.norm()).item() for a, b in zip(found[0], expected[0], strict=True)]


def check_resharding(folder: Path) -> None:
    """Delayed scales and their history are part of a checkpoint: TP 2 goes on as PP 2 and as one process."""
    saved = None
    for layout in ((2, 1, False), (1, 2, False), (1, 1, False)):
        parallel = ParallelConfig(*layout)
        topology = init_topology(parallel, seed=0, timeout_minutes=2)
        fp8 = Fp8Config("delayed", emulate=True, amax_history_len=2)
        model = wrap_ddp(build_model(MODEL, topology, parallel, torch.float64, seed=sum(layout), fp8=fp8), False)
        microbatches, cotangents = batches(topology)
        if saved is None:
            fill(model.module, topology)
            run_packed(model, microbatches, cotangents)
            write_tensors(copy_to_host({"actor": model}, {}), folder, None)
        else:
            load_model("actor", model, folder)
        run_packed(model, microbatches, cotangents)  # the scales move on, from where they were
        logits = [full_logits(output, topology, 250) for output in run_packed(model, microbatches)]
        saved = saved or logits
        for found, expected in zip(logits, saved, strict=False):
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
        leave_groups()


def assert_scales(found: Result, expected: Result, what: str) -> None:
    """One scale over tensor and data ranks, equal to one process's; a stage's layers are numbered from 0."""
    assert len(found[2]) in (len(expected[2]), len(expected[2]) // 2) and found[2], what
    offset = 1 if len(found[2]) < len(expected[2]) and dist.get_rank() == 1 else 0
    for name, buffer in found[2].items():
        parts = name.split(".")
        parts[2] = str(int(parts[2]) + offset)
        torch.testing.assert_close(buffer, expected[2][".".join(parts)], rtol=1e-6, atol=0, msg=f"{what} {name}")


def main() -> None:
    exact = run("none", (1, 1, False))
    for recipe in RECIPES:
        alone = exact if recipe == "none" else run(recipe, (1, 1, False))
        found = {name: run(recipe, layout) for name, layout in LAYOUTS.items()}
        assert_close(found["pp2"], alone, 1e-6, f"{recipe} pp2")
        assert_close(found["tp2_sp"], found["tp2"], 1e-6, f"{recipe} tp2 with and without sequence parallel")
        if recipe == "tensorwise":  # a scale a shard: as in Transformer Engine, another degree rounds otherwise
            worst = max(changes(found["tp2"], alone))
            assert 1e-3 < worst < 0.3, worst
        else:
            worst = assert_close(found["tp2"], alone, 1e-6, f"{recipe} tp2")
        if recipe == "delayed":
            for name in LAYOUTS:
                assert_scales(found[name], alone, f"{recipe} {name}")
        if recipe != "none":
            assert all(1e-3 < value < 0.3 for value in changes(alone, exact)), (recipe, changes(alone, exact))
        if dist.get_rank() == 0:
            print("passed", recipe, f"{worst:.1e}", flush=True)
    check_context(MODEL, fill)
    check_resharding(Path(sys.argv[1]))
    shutdown()
    print("done", flush=True)


if __name__ == "__main__":
    main()
