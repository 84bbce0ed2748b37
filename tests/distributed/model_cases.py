"""One job, many models and layouts: forward and backward against transformers, value head against one
process, weights in and out.

usage: torchrun ... model_cases.py REFERENCE.pt SCRATCH_DIR MODEL_DIR ...
"""

from __future__ import annotations

import os
import sys
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from safetensors.torch import load_file

from megatron_ac2.model.build import build_model, check_layout, load_hf_config, padded_vocab_size
from megatron_ac2.model.chunks import chunks_of, gpt_models, joined
from megatron_ac2.model.data_parallel import wrap_ddp
from megatron_ac2.model.hf_weights import export_hf_weights, load_hf_weights, save_hf
from megatron_ac2.model.modules import TorchAttention
from megatron_ac2.parallel.collectives import all_ranks_agree, broadcast_object, gather_objects, reduce_scalars
from megatron_ac2.parallel.topology import Topology, init_topology
from megatron_ac2.types import UserError
from tests.distributed.groups import parallel_of, run_cases

LAYOUTS = {
    1: [(1, 1, False)],
    2: [(2, 1, False), (1, 2, False), (2, 1, True), (1, 2, False, 2)],
    4: [(2, 2, False), (1, 4, False), (2, 2, True), (2, 1, True), (2, 2, False, 2), (2, 2, True, 2)],
}


def run_packed(
    model: torch.nn.Module,
    microbatches: list[list[torch.Tensor]],
    cotangents: list[torch.Tensor] | None = None,
) -> list[torch.Tensor]:
    """Last-stage outputs [T, ...] of each packed microbatch; empty on the other stages.

    With `cotangents`, of the outputs' shapes, also the gradient of the mean over microbatches of their dot products.
    """
    outputs: list[torch.Tensor] = []

    def step(batches, stage):
        sequences, cotangent = next(batches)
        lengths = torch.tensor([0] + [len(ids) for ids in sequences])
        bounds = lengths.cumsum(0).to(torch.int32)
        longest = int(lengths.max())
        packed = PackedSeqParams(
            qkv_format="thd", cu_seqlens_q=bounds, cu_seqlens_kv=bounds, max_seqlen_q=longest, max_seqlen_kv=longest
        )
        ids = torch.cat(sequences)[None]
        positions = torch.cat([torch.arange(len(ids)) for ids in sequences])[None]
        output = stage(ids, positions, None, packed_seq_params=packed)

        def collect(result):
            outputs.append(result[0].detach().clone())
            loss = result.sum() * 0 if cotangent is None else (result[0] * cotangent).sum()
            return loss, torch.tensor(1), {}

        return output, collect

    with nullcontext() if cotangents else torch.no_grad():
        get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=[
                zip(microbatches, cotangents or [None] * len(microbatches), strict=True) for _ in chunks_of(model)
            ],
            model=chunks_of(model),
            num_microbatches=len(microbatches),
            seq_length=1,
            micro_batch_size=1,
            forward_only=cotangents is None,
        )
    return outputs


def full_logits(local: torch.Tensor, topology: Topology, vocab: int) -> torch.Tensor:
    pieces = [torch.empty_like(local) for _ in range(topology.tensor)]
    dist.all_gather(pieces, local, group=topology.pg.tp)
    return torch.cat(pieces, dim=-1)[:, :vocab]


def check_forward(model, reference, topology, key, vocab) -> None:
    outputs = run_packed(model, reference["microbatches"])
    assert len(outputs) == (len(reference["microbatches"]) if topology.is_last_stage else 0)
    for output, expected in zip(outputs, reference[key], strict=False):
        found = output[:, 0] if key == "values" else full_logits(output, topology, vocab)
        assert found.shape == expected.shape
        difference = (found - expected).abs().max().item()
        assert difference <= 1e-5, f"{key} differ by {difference}"


def check_gradients(model, hf_config, reference, topology) -> None:
    """Gradients leave the model as its weights do: through the table of names, under their Hugging Face names."""
    padded = padded_vocab_size(hf_config, topology.tensor)
    width = padded // topology.tensor
    columns = slice(topology.tensor_rank * width, (topology.tensor_rank + 1) * width)
    cotangents = [F.pad(c, (0, padded - c.shape[1]))[:, columns] for c in reference["cotangents"]]
    model.zero_grad_buffer()
    run_packed(model, reference["microbatches"], cotangents)
    weights = {parameter: parameter.detach().clone() for parameter in model.parameters()}
    with torch.no_grad():
        for parameter in weights:
            parameter.copy_(parameter.main_grad)
        found = {name: tensor.clone() for name, tensor in export_hf_weights(model, hf_config, topology)}
        for parameter, weight in weights.items():
            parameter.copy_(weight)
    assert found.keys() == reference["gradients"].keys()
    for name, expected in reference["gradients"].items():
        assert expected.abs().max() > 0, name
        difference, largest = (found[name] - expected).abs().max().item(), expected.abs().max().item()
        assert difference <= 1e-5 * largest, f"{name}: gradients differ by {difference}, the largest is {largest}"


RECOMPUTE = {
    "full": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    "block": {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1},
    "selective": {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "mlp"]},
}


def check_recompute(hf_config, reference, topology, parallel, folder: Path) -> None:
    """Activations computed anew give the same gradients; that they are is seen by counting attentions."""
    attentions = []
    count = torch.nn.modules.module.register_module_forward_hook(
        lambda module, *_: attentions.append(module) if isinstance(module, TorchAttention) else None
    )
    expected = {"none": 1, "full": 2, "block": 1 + 1 / num_layers(topology, hf_config), "selective": 2}
    for name, times in expected.items():
        model = build_model(hf_config, topology, parallel, torch.float32, extra=RECOMPUTE.get(name))
        model = wrap_ddp(model, distributed_optimizer=False)
        load_hf_weights(model, hf_config, topology, folder)
        attentions.clear()
        check_gradients(model, hf_config, reference, topology)
        num_attentions = len({*attentions}) * len(reference["microbatches"])
        assert len(attentions) == round(times * num_attentions), (name, len(attentions), num_attentions)
    count.remove()


def num_layers(topology, hf_config) -> int:
    """That one chunk of the model has."""
    return hf_config.num_hidden_layers // topology.pipeline // (topology.virtual_pipeline or 1)


def check_export(model, hf_config, topology, folder: Path) -> None:
    stored = load_file(folder / "model.safetensors")
    names = []
    for name, tensor in export_hf_weights(model, hf_config, topology):
        names.append(name)
        assert tensor.shape == stored[name].shape and torch.equal(tensor, stored[name]), name
    assert len(names) == len(set(names)) and set(names) == set(stored)
    assert names.count("lm_head.weight") == (0 if hf_config.tie_word_embeddings else 1)


def check_save(
    model, hf_config, topology, parallel, folder: Path, scratch: Path, head: str, value_outputs: int = 1
) -> Path:
    layout = f"{parallel.tensor}_{parallel.pipeline}_{parallel.sequence}_{parallel.virtual_pipeline}"
    target = scratch / f"saved_{folder.name}_{head}_{value_outputs}_{layout}"
    before = [parameter.detach().clone() for parameter in model.parameters()]
    save_hf(model, hf_config, topology, target, tokenizer_from=folder)
    again = build_model(load_hf_config(target), topology, parallel, torch.float32, head, None, 99, value_outputs)
    load_hf_weights(again, hf_config, topology, target)
    for found, expected in zip(again.parameters(), before, strict=True):
        assert torch.equal(found, expected)
    leftovers = [path.name for path in scratch.iterdir() if path.name.startswith(".")]
    assert not leftovers, leftovers
    return target


def check_refusal(model, hf_config, topology, folder: Path, *expected: str) -> None:
    try:
        load_hf_weights(model, hf_config, topology, folder)
    except UserError as error:
        for words in expected:
            assert words in str(error), str(error)
    else:
        raise AssertionError(f"{folder} was accepted")


def check_failed_save(model, hf_config, topology, folder: Path, scratch: Path) -> None:
    """Rank 0 cannot write; every rank learns of it, and none is left waiting."""
    try:
        save_hf(model, hf_config, topology, scratch / "a_file" / "model", tokenizer_from=folder)
    except RuntimeError as error:
        assert "not written" in str(error), error
    else:
        raise AssertionError("saved below a file")


def check_collectives(topology: Topology) -> None:
    rank, size = topology.rank, topology.world_size
    assert gather_objects({"rank": rank}) == [{"rank": other} for other in range(size)]
    assert broadcast_object("from 1" if rank == 1 else None, source=1) == "from 1"
    assert reduce_scalars({"b": 2.0, "a": float(rank)}) == {"a": size * (size - 1) / 2, "b": 2.0 * size}
    assert reduce_scalars({"a": rank}, op="max") == {"a": size - 1.0}
    assert reduce_scalars({"a": rank}, op="min") == {"a": 0.0} and reduce_scalars({}) == {}
    all_ranks_agree({"steps": [1, 2]}, "steps")
    try:
        all_ranks_agree(max(rank, 1), "streak")  # rank 0 and 1 agree
        assert size == 2
    except RuntimeError as error:
        assert size == 4 and str(error).startswith("streak: ranks [2, 3]"), error


def check_model(
    hf_config, topology, parallel, reference, folder: Path, scratch: Path
) -> tuple[torch.nn.Module, Path]:  # fmt: skip
    """A policy and a value head against `reference`; weights in and out. The policy, and where the value head is."""
    model = wrap_ddp(build_model(hf_config, topology, parallel, torch.float32), distributed_optimizer=False)
    load_hf_weights(model, hf_config, topology, folder)
    check_forward(model, reference, topology, "logits", hf_config.vocab_size)
    check_gradients(model, hf_config, reference, topology)
    check_export(model, hf_config, topology, folder)
    check_save(joined(gpt_models(model)), hf_config, topology, parallel, folder, scratch, "lm")
    critic = build_model(hf_config, topology, parallel, torch.float32, head="value", seed=5)
    load_hf_weights(critic, hf_config, topology, folder)
    check_forward(critic, reference, topology, "values", hf_config.vocab_size)
    return model, check_save(critic, hf_config, topology, parallel, folder, scratch, "value")


def run_layout(layout: tuple, reference, folder: Path, scratch: Path) -> None:
    parallel = parallel_of(*layout)
    topology = init_topology(parallel, seed=0, timeout_minutes=2)
    hf_config = load_hf_config(folder)
    reference = reference[folder.name]
    model, saved = check_model(hf_config, topology, parallel, reference, folder, scratch)
    if folder.name == "untied":
        check_recompute(hf_config, reference, topology, parallel, folder)
        check_two_hot(hf_config, topology, parallel, folder, scratch, saved)
        odd_names, odd_shape = scratch / "odd_names", scratch / "odd_shape"
        check_refusal(model, hf_config, topology, odd_names, "model.norm.weight: missing", "surprise.weight: found")
        check_failed_save(model, hf_config, topology, folder, scratch)
        if topology.world_size > 1:
            check_collectives(topology)
        check_refusal(model, hf_config, topology, odd_shape, "model.layers.3.self_attn.k_proj.weight: found shape")
    if folder.name == "qwen2_untied":
        check_refusal(
            model, hf_config, topology, scratch / "odd_biases",
            "model.layers.1.self_attn.q_proj.bias: missing", "model.layers.0.self_attn.o_proj.bias: found",
        )  # fmt: skip


def check_two_hot(hf_config, topology, parallel, folder: Path, scratch: Path, one_output: Path) -> None:
    two_hot = build_model(hf_config, topology, parallel, torch.float32, "value", seed=5, value_outputs=11)
    load_hf_weights(two_hot, hf_config, topology, folder)
    check_save(two_hot, hf_config, topology, parallel, folder, scratch, "value", 11)
    check_refusal(
        two_hot, hf_config, topology, one_output,
        "critic.head", "shape (1, 64) (bce or mse)", "accepted: shape (11, 64) (two_hot)",
    )  # fmt: skip


def main() -> None:
    reference_file, scratch, *folders = map(Path, sys.argv[1:])
    reference = torch.load(reference_file)
    cases = {}
    for layout in LAYOUTS[int(os.environ["WORLD_SIZE"])]:
        for folder in folders:
            if not check_layout(load_hf_config(folder), parallel_of(*layout)):
                cases[f"{folder.name} {layout}"] = partial(run_layout, layout, reference, folder, scratch)
    run_cases(cases)


if __name__ == "__main__":
    main()
