"""The files of a checkpoint folder: which one is the latest, when one is complete, how the run's host state is stored.

root/latest                  the name of the newest complete checkpoint
root/step_000010/            complete: renamed to this name only when every file in it was on disk
    state.npz                host state, identity, optimizers' scalars: arrays, and a JSON tree that refers to them
    tensors/                 Megatron's distributed checkpoint
    files.json               size and hash of every other file (checkpoint_manifest.py)
root/step_000020.tmp/        being written or removed; after a crash the next save clears it away
root/step_000010.old/        the same step saved again: complete, and counts until step_000010 is there again
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from megatron_ac2.model.checkpoint_manifest import FILES_FILE, Manifest, damages, read_manifest, write_manifest
from megatron_ac2.types import UserError

STATE_FILE = "state.npz"
TENSORS_FOLDER = "tensors"
_LATEST = "latest"
_TREE = "tree"
_ARRAY_KEY = "__array__"

log = logging.getLogger(__name__)


def pack_state(tree: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """A copy of a nested dict / list of JSON scalars and numpy arrays, for `write_state`.

    Raises TypeError naming the place of anything else (a tensor, an object array, a key that is not a string).
    """
    arrays: dict[str, np.ndarray] = {}
    text = json.dumps(_encode(tree, "state", arrays))
    return {_TREE: np.frombuffer(text.encode(), dtype=np.uint8), **arrays}


def write_state(path: Path, packed: Mapping[str, np.ndarray]) -> None:
    """Store what `pack_state` has made, without pickle; tuples come back as lists."""
    with open(path, "wb") as file:
        np.savez(file, **packed)
        _sync(file)


def read_state(path: Path) -> dict[str, Any]:
    """What `write_state` stored. Raises `UserError` naming a file that is missing or damaged."""
    try:
        with np.load(path, allow_pickle=False) as arrays:
            tree = json.loads(arrays[_TREE].tobytes().decode())
            return _decode(tree, arrays)
    except FileNotFoundError:
        raise UserError(f"{path}: missing") from None
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise UserError(f"{path}: damaged, cannot be read: {error}") from error


def _encode(node: Any, place: str, arrays: dict[str, np.ndarray]) -> Any:
    if isinstance(node, np.ndarray) and not node.dtype.hasobject:
        name = f"a{len(arrays)}"
        arrays[name] = node.copy()
        return {_ARRAY_KEY: name}
    if isinstance(node, Mapping):
        odd = [key for key in node if not isinstance(key, str) or key == _ARRAY_KEY]
        if odd:
            raise TypeError(f"{place}: found the key {odd[0]!r}, accepted: strings other than {_ARRAY_KEY!r}")
        return {key: _encode(value, f"{place}.{key}", arrays) for key, value in node.items()}
    if isinstance(node, list | tuple):
        return [_encode(value, f"{place}[{index}]", arrays) for index, value in enumerate(node)]
    if isinstance(node, np.bool_ | np.integer | np.floating):
        return node.item()
    if node is None or isinstance(node, bool | int | float | str):
        return node
    raise TypeError(f"{place}: found {type(node).__name__}, accepted: dict, list, JSON scalars, arrays of numbers")


def _decode(node: Any, arrays: Mapping[str, np.ndarray]) -> Any:
    if isinstance(node, dict):
        if node.keys() == {_ARRAY_KEY}:
            return arrays[node[_ARRAY_KEY]]
        return {key: _decode(value, arrays) for key, value in node.items()}
    if isinstance(node, list):
        return [_decode(value, arrays) for value in node]
    return node


def step_folder(root: Path, step: int) -> Path:
    return root / f"step_{step:06d}"


def complete_folders(root: Path) -> dict[int, Path]:
    """{step: folder} of the complete checkpoints, ascending."""
    found = {}
    # Sorted so that step_X comes after step_X.old, and counts.
    for path in sorted(root.iterdir(), reverse=True) if root.is_dir() else ():
        match = re.fullmatch(r"step_(\d{6,})(\.old)?", path.name)
        if match and (path / FILES_FILE).is_file():
            found[int(match[1])] = path
    return dict(sorted(found.items()))


def latest(root: str | Path) -> Path | None:
    """The folder of the newest checkpoint, or None. Never one that a crash has left incomplete.

    Without a usable pointer (a crash between two renames, a folder that was removed), the newest complete folder.
    Raises `UserError` for a pointer to a folder that is there but lacks the list of its files: no crash leaves that.
    """
    root = Path(root)
    pointer = root / _LATEST
    folders = complete_folders(root)
    named = pointer.read_text().strip() if pointer.is_file() else None
    for step, folder in folders.items():
        if step_folder(root, step).name == named:
            return folder
    if named and (root / named).is_dir():
        raise UserError([f"{root / named / FILES_FILE}: missing", way_out(root / named)])
    if named is not None:
        log.warning("%s names %r, which is no complete checkpoint; complete steps: %s", pointer, named, list(folders))
    return list(folders.values())[-1] if folders else None


def way_out(damaged: Path) -> str:
    """How to go on without a damaged checkpoint, as a message. Reads the others until it finds one that is whole."""
    useless = [damaged]
    for folder in reversed(complete_folders(damaged.parent).values()):
        if folder != damaged and is_whole(folder):
            return (
                f"the newest undamaged checkpoint is {folder}; to go on from it remove {', '.join(map(str, useless))}"
            )
        useless += [folder] * (folder != damaged)
    return f"{damaged.parent}: no undamaged checkpoint; start anew with run.resume=false, or in another run.dir"


def is_whole(folder: Path) -> bool:
    try:
        return not damages(folder, read_manifest(folder))
    except UserError:
        return False


def begin(root: Path, step: int) -> Path:
    """Clear away what crashes have left, and make the empty folder to write `step` into."""
    root.mkdir(parents=True, exist_ok=True)
    for replaced in root.glob("step_*.old"):
        if not replaced.with_suffix("").exists():  # a crash before its successor took its place
            replaced.rename(replaced.with_suffix(""))
    for path in root.iterdir():
        if re.fullmatch(rf"step_\d+\.(tmp|old)|{_LATEST}\.tmp", path.name):
            _remove(path)
    folder = step_folder(root, step).with_suffix(".tmp")
    (folder / TENSORS_FOLDER).mkdir(parents=True)
    return folder


def commit(root: Path, step: int, keep: int, manifest: Manifest, keep_every: int = 0) -> Path:
    """Make the written folder the latest checkpoint, then remove all but the newest `keep` up to `step`.

    Those of steps that are multiples of `keep_every` (0: none) stay for good. `manifest` lists all files of the
    folder, all on disk by now.
    """
    final = step_folder(root, step)
    writing, replaced = final.with_suffix(".tmp"), final.with_suffix(".old")
    write_manifest(writing, manifest)
    for folder in (writing / TENSORS_FOLDER, writing):
        _sync_folder(folder)
    if final.exists():  # this step was saved before
        final.rename(replaced)
    writing.rename(final)
    _sync_folder(root)
    _point_to(root, final.name)
    if replaced.exists():
        _remove(replaced)
    older = [other for other in complete_folders(root) if other < step]
    for other in older[: max(0, len(older) - (keep - 1))]:
        if keep_every and other % keep_every == 0:
            continue
        folder = step_folder(root, other)
        doomed = folder.rename(folder.with_suffix(".tmp"))  # half removed, it must not pass for a complete one
        _remove(doomed)
    return final


def _point_to(root: Path, name: str) -> None:
    temporary = root / f"{_LATEST}.tmp"
    with open(temporary, "w") as file:
        file.write(name + "\n")
        _sync(file)
    temporary.rename(root / _LATEST)
    _sync_folder(root)


def _remove(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink()


def _sync(file: Any) -> None:
    file.flush()
    os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
