"""Convert weights between a Hugging Face folder and a Megatron distributed checkpoint (torch_dist).

    python tools/convert_checkpoint.py to-megatron HF_FOLDER OUT --verify
    torchrun --nproc_per_node=4 tools/convert_checkpoint.py to-hf MEGATRON_FOLDER OUT --tensor 2 --pipeline 2

A torch_dist checkpoint has no layout of its own: --tensor, --pipeline, --virtual-pipeline, --expert say how the model
is cut while it is converted (one too large for one process), and the result loads into any other. The Megatron folder
also keeps config.json and the tokenizer in hf/, and what else is needed to come back in conversion.json, with the
Megatron-Core that wrote it: 0.16 and 0.19 read each other's. A conversion that fails leaves nothing at OUT.

--verify reads the result back. Every tensor must be equal bit for bit (after rounding, if --dtype asks for it), and on
a few tokens the logits those of transformers to the dtype's rounding; of a value head the values, against the trunk and
the head in plain torch.

Memory, measured with 270 MB of weights in one process, resident above its imports: 2.1 times the model's size either
way, with --verify 2.7 (to-megatron) and 3.3 (to-hf). One time is the model. Another is the source's mapped pages, which
the kernel may take back, or the tensors of the file that is being written, 4 GiB at most. --verify adds transformers'
model, on rank 0. With --tensor and --pipeline a process holds its share of the first.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from torch.distributed.checkpoint.api import CheckpointException
from transformers import PretrainedConfig

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_ac2.config_training import ParallelConfig  # noqa: E402
from megatron_ac2.model.build import build_model, check_layout, load_hf_config  # noqa: E402
from megatron_ac2.model.chunks import load_state, sharded_state  # noqa: E402
from megatron_ac2.model.hf_files import VALUE_HEAD_FILE, HfReader, copy_tokenizer  # noqa: E402
from megatron_ac2.model.hf_table import VALUE_HEAD  # noqa: E402
from megatron_ac2.model.hf_weights import export_hf_weights, load_hf_weights, save_hf  # noqa: E402
from megatron_ac2.parallel.collectives import barrier, gather_objects  # noqa: E402
from megatron_ac2.parallel.megatron_versions import (  # noqa: E402
    common_file_problems,
    installed,
    write_common_file,
)
from megatron_ac2.parallel.topology import Topology, init_topology, shutdown  # noqa: E402
from megatron_ac2.types import UserError  # noqa: E402
from tools.compare_logits import check_logits  # noqa: E402

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_NOTE = "conversion.json"
_HF = "hf"  # folder of config.json and the tokenizer inside a Megatron folder


@dataclass(frozen=True, slots=True)
class Source:
    """What is converted, and how it is cut on the way."""

    folder: Path
    hf_config: PretrainedConfig
    head: str  # "lm" | "value"
    value_outputs: int  # of a value head
    dtype: str
    rounded: bool  # the user asked for `dtype`, whatever the source's files hold
    parallel: ParallelConfig


def main(arguments: Sequence[str] | None = None) -> int:
    try:
        convert(arguments)
    except UserError as error:
        print(error, file=sys.stderr)
        return 1
    finally:
        shutdown()
    return 0


def convert(arguments: Sequence[str] | None = None) -> None:
    """One conversion in this process, after which another may follow. Raises `UserError`."""
    options = parse_arguments(arguments)
    source = read_source(options)
    topology = init_topology(source.parallel, seed=0)
    direction = to_megatron if options.direction == "to-megatron" else to_hf
    with staging(options.out, topology) as unfinished:
        difference = direction(source, topology, unfinished, options.verify)
    if topology.rank == 0:
        what = "values" if source.head == "value" else "logits"
        verified = f", verified bit for bit, {what} as transformers' to {difference:.0e}" if options.verify else ""
        print(f"{options.out}: written{verified}")


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("direction", choices=("to-megatron", "to-hf"))
    parser.add_argument("source", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--tensor", type=int, default=1)
    parser.add_argument("--pipeline", type=int, default=1)
    parser.add_argument("--virtual-pipeline", type=int, help="chunks of layers a pipeline rank; default: one")
    parser.add_argument("--expert", type=int, default=1, help="ranks that share out the experts")
    parser.add_argument("--expert-tensor", type=int, help="ranks that an expert is cut over; default: as --tensor")
    parser.add_argument("--dtype", choices=DTYPES, help="to-megatron: of the weights; default: as in the source")
    parser.add_argument("--verify", action="store_true", help="read the result back: bits, and logits")
    return parser.parse_args(arguments)


def read_source(arguments: argparse.Namespace) -> Source:
    """Find every mistake that the arguments and the source's small files can show. Raises `UserError`."""
    folder: Path = arguments.source
    if arguments.out.exists():
        raise UserError(f"{arguments.out}: exists already; remove it or give another folder")
    names = ("tensor", "pipeline", "virtual_pipeline", "expert", "expert_tensor")
    degrees = {name: getattr(arguments, name) for name in names}
    parallel = ParallelConfig(**degrees, sequence=arguments.tensor > 1)  # experts ask for it; weights are the same
    if arguments.direction == "to-megatron":
        hf_config = load_hf_config(folder)
        reader = HfReader(folder)
        head = "value" if (folder / VALUE_HEAD_FILE).is_file() else "lm"
        value_outputs = reader.shape(VALUE_HEAD)[0] if head == "value" else 1
        problems = []
        dtype = arguments.dtype or reader.dtype("model.embed_tokens.weight")
    else:
        note = read_note(folder)
        hf_config, head, dtype = load_hf_config(folder / _HF), note["head"], note["dtype"]
        value_outputs = note.get("value_outputs", 1)
        if arguments.dtype not in (None, dtype):
            raise UserError(f"--dtype: found {arguments.dtype}; to-hf keeps the source's {dtype}")
        problems = common_file_problems(folder, note.get("written_with", "another version of it"))
    problems += check_layout(hf_config, parallel)
    if dtype not in DTYPES:
        problems.append(f"{folder}: weights are {dtype}, accepted: {', '.join(DTYPES)}; give --dtype")
    if problems:
        raise UserError(problems)
    return Source(folder, hf_config, head, value_outputs, dtype, arguments.dtype is not None, parallel)


def read_note(folder: Path) -> dict[str, Any]:
    if not (folder / _NOTE).is_file():
        raise UserError(f"{folder}: no {_NOTE} in it; to-hf reads what to-megatron wrote")
    return json.loads((folder / _NOTE).read_text())


@contextmanager
def staging(out: Path, topology: Topology) -> Iterator[Path]:
    """A folder beside `out` to write into: it becomes `out` if every rank gets through, and is removed otherwise."""
    unfinished = out.parent / f".{out.name}.converting"
    if topology.rank == 0:
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
    barrier()
    try:
        yield unfinished
        barrier()
        if topology.rank == 0:
            unfinished.rename(out)
        barrier()
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def to_megatron(source: Source, topology: Topology, out: Path, verify: bool) -> float:
    """What `verified` returns; nan without `verify`."""
    model = new_model(source, topology)
    load_hf_weights(model, source.hf_config, topology, source.folder)
    dist_checkpointing.save(sharded_model(model, topology), str(out))
    if topology.rank == 0:
        write_common_file(out, {})  # a model has nothing beside its tensors
        note = {
            "head": source.head, "value_outputs": source.value_outputs, "dtype": source.dtype,
            "written_with": installed(),
        }  # fmt: skip
        source.hf_config.save_pretrained(out / _HF)
        copy_tokenizer(source.folder, out / _HF)
        (out / _NOTE).write_text(json.dumps(note))
    barrier()
    del model
    return verified(load_megatron(source, topology, out), source, topology, source.folder) if verify else math.nan


def to_hf(source: Source, topology: Topology, out: Path, verify: bool) -> float:
    """What `verified` returns; nan without `verify`."""
    model = load_megatron(source, topology, source.folder)
    save_hf(model, source.hf_config, topology, out, tokenizer_from=source.folder / _HF)
    return verified(model, source, topology, out) if verify else math.nan


def verified(model: torch.nn.Module, source: Source, topology: Topology, folder: Path) -> float:
    """How far the model's logits are from transformers' of `folder`. Raises `UserError` for other bits, or logits."""
    check_against_files(model, source, topology, folder)
    return check_logits(model, source.hf_config, topology, folder, DTYPES[source.dtype], source.head)


def new_model(source: Source, topology: Topology) -> torch.nn.Module:
    return build_model(
        source.hf_config, topology, source.parallel, DTYPES[source.dtype], source.head,
        value_outputs=source.value_outputs,
    )  # fmt: skip


def load_megatron(source: Source, topology: Topology, folder: Path) -> torch.nn.Module:
    model = new_model(source, topology)
    try:
        loaded = dist_checkpointing.load(sharded_model(model, topology), str(folder))
    except (Exception, CheckpointException) as error:  # the latter is a BaseException only
        reason = str(error).strip().splitlines()[-1:] or [type(error).__name__]  # before it stand other ranks' traces
        raise UserError(f"{folder}: cannot be loaded as a Megatron checkpoint: {reason[0]}") from error
    load_state(model, loaded["model"])
    return model


def sharded_model(model: torch.nn.Module, topology: Topology) -> dict[str, object]:
    return {"model": sharded_state(model, {"dp_cp_group": topology.pg.dp_cp})}


def check_against_files(model: torch.nn.Module, source: Source, topology: Topology, folder: Path) -> None:
    """Every full tensor of the model against the folder's files. Raises `UserError` on every rank."""
    reader = HfReader(folder)
    problems = []
    for name, tensor in export_hf_weights(model, source.hf_config, topology):
        if topology.rank == 0 and not same_bits(tensor.cpu(), reader.read(name), source.rounded):
            problems.append(f"{name}: {folder} holds other values than the converted model")
    problems = gather_objects(problems)[0]
    if problems:
        raise UserError(problems)


def same_bits(found: torch.Tensor, expected: torch.Tensor, rounded: bool) -> bool:
    expected = expected.to(found.dtype) if rounded else expected
    if found.dtype != expected.dtype or found.shape != expected.shape:
        return False
    return torch.equal(found.contiguous().view(torch.uint8), expected.contiguous().view(torch.uint8))


if __name__ == "__main__":
    sys.exit(main())
