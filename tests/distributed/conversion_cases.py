"""Many conversions one after another in the same processes: models and layouts in turns, each back to the same bits.

usage: torchrun ... conversion_cases.py SCRATCH_DIR MODEL_DIR ...
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedObject
from safetensors.torch import load_file

from megatron_ac2.config_training import ParallelConfig
from megatron_ac2.model.build import build_model, check_layout, load_hf_config
from megatron_ac2.model.hf_weights import load_hf_weights
from megatron_ac2.parallel.topology import init_topology, shutdown
from megatron_ac2.types import UserError
from tests.distributed.groups import leave_groups
from tools.compare_logits import check_logits
from tools.convert_checkpoint import convert

LAYOUTS = {
    1: [()],
    2: [("--tensor", 2), ("--pipeline", 2), ("--pipeline", 2, "--virtual-pipeline", 2), ("--expert", 2)],
}


def fits(folder: Path, layout: tuple) -> bool:
    """Whether the model can be cut so; experts go with a layout of their own."""
    words = [str(word).removeprefix("--").replace("-", "_") for word in layout]
    degrees = {name: int(degree) for name, degree in zip(words[::2], words[1::2], strict=True)}
    parallel = ParallelConfig(**degrees, sequence=degrees.get("tensor", 1) > 1)
    return not check_layout(load_hf_config(folder), parallel)


def round_trip(folder: Path, there: tuple, back: tuple, scratch: Path) -> None:
    """Each way in another layout, verified by the tool, and the files compared here."""
    megatron, hf = scratch / "megatron", scratch / "hf"
    for arguments in (("to-megatron", folder, megatron, *there), ("to-hf", megatron, hf, *back)):
        convert([*map(str, arguments), "--verify"])
        leave_groups()
    if dist.get_rank() == 0:
        assert_same(hf, folder)
        shutil.rmtree(megatron)
        shutil.rmtree(hf)
        print("passed", folder.name, there, back, flush=True)
    dist.barrier()


def assert_same(found_folder: Path, folder: Path) -> None:
    for file in folder.glob("*.safetensors"):
        found, expected = load_file(found_folder / file.name), load_file(file)
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name


def check_a_newer_megatrons_folder(folder: Path, scratch: Path) -> None:
    """Megatron 0.19 puts what 0.16 writes into common.pt among the tensors: the tool adds the file, so that both read
    the folder. One that lacks it is refused by name where it is needed."""
    save, megatron, hf = dist_checkpointing.save, scratch / "newer", scratch / "newer_hf"

    def newer_save(state: dict, path: str) -> None:
        state["common_state"] = ShardedObject("common_state", {}, (1,), (0,), replica_id=dist.get_rank())
        save(state, path)
        if dist.get_rank() == 0:
            (Path(path) / "common.pt").unlink(missing_ok=True)

    with mock.patch.object(dist_checkpointing, "save", newer_save):
        convert(["to-megatron", str(folder), str(megatron)])
    leave_groups()
    convert(["to-hf", str(megatron), str(hf)])
    if dist.get_rank() == 0:
        assert_same(hf, folder)
        (megatron / "common.pt").unlink()
    leave_groups()
    try:
        convert(["to-hf", str(megatron), str(scratch / "refused")])
    except UserError as error:
        assert f"{megatron}: no common.pt" in str(error) and "written with megatron-core 0.1" in str(error), error
    else:
        assert hasattr(dist_checkpointing.serialization, "load_common")  # 0.19 does without
        leave_groups()


def check_it_can_fail(folder: Path) -> None:
    """Two norms' weights changed places: the logits say so. Untouched, they agree far below what is accepted."""
    topology = init_topology(ParallelConfig(), seed=0)
    hf_config = load_hf_config(folder)
    model = build_model(hf_config, topology, ParallelConfig(), torch.float32)
    load_hf_weights(model, hf_config, topology, folder)
    assert check_logits(model, hf_config, topology, folder, torch.float32, "lm") < 1e-5
    layers = model.decoder.layers
    with torch.no_grad():
        first, second = layers[0].input_layernorm.weight, layers[1].input_layernorm.weight
        kept = first.clone()
        first.copy_(second)
        second.copy_(kept)
    try:
        check_logits(model, hf_config, topology, folder, torch.float32, "lm")
    except UserError as error:
        assert "logits: Megatron's differ" in str(error), error
    else:
        raise AssertionError("swapped norms were not noticed")
    leave_groups()


def main() -> None:
    scratch, *folders = map(Path, sys.argv[1:])
    layouts = LAYOUTS[int(os.environ["WORLD_SIZE"])]
    for there, back in zip(layouts, [*layouts[1:], layouts[0]], strict=True):
        for folder in folders:
            if fits(folder, there) and fits(folder, back):
                round_trip(folder, there, back, scratch)
    check_a_newer_megatrons_folder(folders[0], scratch)
    check_it_can_fail(folders[0])
    shutdown()
    print("done", flush=True)


if __name__ == "__main__":
    main()
