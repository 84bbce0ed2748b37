"""What is in a checkpoint: step, identity, tensors, optimizers, the run's state, and whether its files are undamaged.

    python tools/inspect_checkpoint.py runs/ac2                             the latest of a run
    python tools/inspect_checkpoint.py runs/ac2/checkpoints/step_000010 --tensors

Reads no tensor into memory, needs no torchrun and no GPU. Also takes a folder of Megatron's torch_dist format, such as
tools/convert_checkpoint.py writes, which has tensors alone. Ends with 1 if a file is damaged or missing.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint import FileSystemReader, TensorStorageMetadata

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_ac2.model.checkpoint_files import STATE_FILE, TENSORS_FOLDER, latest, read_state  # noqa: E402
from megatron_ac2.model.checkpoint_manifest import FILES_FILE, damages, read_manifest  # noqa: E402
from megatron_ac2.types import UserError  # noqa: E402

_METADATA = ".metadata"
_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB")


@dataclass(frozen=True, slots=True)
class Tensor:
    """As stored: whole, whatever the layout that saved it. Megatron stacks the layers' tensors of one name."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    num_bytes: int


def find(path: Path) -> Path:
    """The checkpoint's folder that a user means by `path`. Raises `UserError` for none."""
    if any((path / name).is_file() for name in (FILES_FILE, STATE_FILE, _METADATA)):
        return path
    for root in (path / "checkpoints", path):
        if found := latest(root):
            return found
    files = ("a checkpoint", f"{STATE_FILE}, {FILES_FILE}"), ("a folder of Megatron's torch_dist format", _METADATA)
    accepted = "; ".join(f"{what} ({needs})" for what, needs in files)
    raise UserError(f"{path}: found no checkpoint; accepted: a run's folder that has one; {accepted}")


def stored_tensors(folder: Path) -> list[Tensor]:
    """In the order of their names, from the metadata alone."""
    try:
        metadata = FileSystemReader(folder).read_metadata()
    except Exception as error:
        raise UserError(f"{folder / _METADATA}: cannot be read: {type(error).__name__}: {error}") from error
    return [
        Tensor(name, tuple(entry.size), str(dtype).removeprefix("torch."), math.prod(entry.size) * dtype.itemsize)
        for name, entry in sorted(metadata.state_dict_metadata.items())
        if isinstance(entry, TensorStorageMetadata)
        for dtype in (entry.properties.dtype,)
    ]


def groups_of(state: Mapping[str, Any]) -> list[str]:
    """What tensors' names begin with: "model.actor", "optimizer.actor.critic.exp_avg"."""
    optimizers = state["optimizers"].items()
    kinds = [f"optimizer.{name}.{kind}" for name, optimizer in optimizers for kind in optimizer["kinds"]]
    return [*(f"model.{name}" for name in state["models"]), *kinds]


def tensor_lines(tensors: list[Tensor], groups: list[str], every: bool) -> Iterator[str]:
    if every:
        rows = [(t.name, "x".join(map(str, t.shape)) or "scalar", t.dtype, size(t.num_bytes)) for t in tensors]
    else:
        rows = []
        for group in [*groups, ""]:  # "": what no group claims
            mine = [t for t in tensors if next((g for g in groups if t.name.startswith(f"{g}.")), "") == group]
            if mine:
                numbers = f"{sum(math.prod(t.shape) for t in mine):,} numbers in {len(mine)} tensors"
                rows.append((group or "others", numbers, ", ".join(sorted({t.dtype for t in mine})), total(mine)))
    yield f"tensors: {len(tensors)}, {total(tensors)}"
    yield from table(rows)


def state_lines(state: Mapping[str, Any]) -> Iterator[str]:
    """Of what `save_checkpoint` keeps beside the tensors."""
    yield f"step: {state['step']}"
    yield "identity:"
    yield from table(list(state["identity"].items()))
    yield "optimizers:"
    scalars = [
        (f"{name}.{role}", values) for name, o in state["optimizers"].items() for role, values in o["scalars"].items()
    ]
    yield from table([(name, f"{v['num_steps']} steps", f"lr {v['lr']:.4g}") for name, v in scalars])
    yield "run:"
    yield from table([*run_rows(state["run"])])


def run_rows(run: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Of a training run's state; a part that another kind of run does not have is left out."""
    if stream := run.get("stream"):
        yield "problems", f"epoch {stream['epoch']}, {stream['position']} of {len(stream['order'])} taken"
    for name, kind in (("replay", "rollouts"), ("targets", "critic targets")):
        if part := run.get(name):
            yield name, f"{len(part['problem_ids'])} {kind}{versions(part['versions'])}"
    if part := run.get("references"):
        yield "references", f"of {len(part['problem_ids'])} problems"
    if part := run.get("readiness"):
        yield "readiness", f"{len(part['ready'])} problems ready, gate {'open' if part['opened'] else 'closed'}"
    if counters := run.get("counters"):
        yield "decoding", f"{counters['decoding_flops']:.4g} FLOPs, {counters['generated_tokens']:,} tokens generated"
    if "calibration" in run:
        yield "calibration", "fitted" if run["calibration"] else "none"


def versions(found: Any) -> str:
    return f" of policy versions {min(found)} to {max(found)}" if len(found) else ""


def total(tensors: list[Tensor]) -> str:
    return size(sum(t.num_bytes for t in tensors))


def size(num_bytes: float) -> str:
    unit = min(int(math.log(max(num_bytes, 1), 1024)), len(_UNITS) - 1)
    return f"{num_bytes / 1024**unit:.{1 if unit else 0}f} {_UNITS[unit]}"


def table(rows: list[tuple[str, ...]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*rows)]
    for row in rows:
        yield "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip()


def inspect(folder: Path, every_tensor: bool, hashes: bool) -> bool:
    """Print all; whether the files are undamaged. What is damaged is left out, and named at the end."""
    print(f"checkpoint: {folder}")
    if (folder / _METADATA).is_file():
        print("\n".join(tensor_lines(stored_tensors(folder), [], every_tensor)))
        print("files: not checked, for nothing lists them")
        return True
    manifest: dict[str, tuple[int, str]] = {}
    problems: list[str] = []
    try:
        manifest = read_manifest(folder)
        problems = damages(folder, manifest, hashes)
        state = read_state(folder / STATE_FILE)
        print("\n".join(state_lines(state)))
        print("\n".join(tensor_lines(stored_tensors(folder / TENSORS_FOLDER), groups_of(state), every_tensor)))
    except UserError as error:
        problems += [problem for problem in error.problems if problem not in problems]
    amount = f"{len(manifest)} files, {size(sum(num_bytes for num_bytes, _ in manifest.values()))}"
    print(f"files: {amount}, {'sizes and hashes' if hashes else 'sizes'} {'as saved' if not problems else 'DAMAGED'}")
    print("".join(f"  {problem}\n" for problem in problems), end="")
    return not problems


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path, help="a run's folder, a checkpoint's, or one in torch_dist format")
    parser.add_argument("--tensors", action="store_true", help="every tensor; otherwise sums by role and kind")
    parser.add_argument("--sizes-only", action="store_true", help="compare files' sizes, without reading them")
    arguments = parser.parse_args()
    try:
        return 0 if inspect(find(arguments.path), arguments.tensors, not arguments.sizes_only) else 1
    except UserError as error:
        print(error, file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
