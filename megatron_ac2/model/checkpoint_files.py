"""The files of a checkpoint folder: which one is the latest, when one is complete, how the run's host state is stored.

root/latest                  the name of the newest complete checkpoint
root/step_000010/            complete: renamed to this name only when every file in it was on disk
    state.npz                host state, identity, optimizers' scalars: arrays, and a JSON tree that refers to them
    tensors/                 Megatron's distributed checkpoint
    files.json               size and CRC-32 of every other file
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
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from megatron_ac2.types import UserError

STATE_FILE = "state.npz"
TENSORS_FOLDER = "tensors"
FILES_FILE = "files.json"
_LATEST = "latest"
_TREE = "tree"
_ARRAY_KEY = "__array__"
_BLOCK = 16 * 2**20

log = logging.getLogger(__name__)


def write_state(path: Path, tree: Mapping[str, Any]) -> None:
    """Store a nested dict / list of JSON scalars and numpy arrays without pickle; tuples come back as lists.

    Raises TypeError naming the place of anything else (a tensor, an object array, a key that is not a string).
    """
    arrays: dict[str, np.ndarray] = {}
    text = json.dumps(_encode(tree, "state", arrays))
    with open(path, "wb") as file:
        np.savez(file, **{_TREE: np.frombuffer(text.encode(), dtype=np.uint8)}, **arrays)
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
        arrays[name] = node
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
    """The folder of the newest checkpoint, or None. Never one that is incomplete.

    Without a usable pointer (a crash between two renames), the newest complete folder.
    """
    root = Path(root)
    pointer = root / _LATEST
    folders = complete_folders(root)
    named = pointer.read_text().strip() if pointer.is_file() else None
    for step, folder in folders.items():
        if step_folder(root, step).name == named:
            return folder
    if named is not None:
        log.warning("%s names %r, which is no complete checkpoint; complete steps: %s", pointer, named, list(folders))
    return list(folders.values())[-1] if folders else None


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


def commit(root: Path, step: int, keep: int, checksums: Mapping[str, tuple[int, int]]) -> Path:
    """Make the written folder the latest checkpoint, then remove all but the newest `keep` up to `step`.

    `checksums`: {path in the folder: (size, CRC-32)} of its files, all on disk by now.
    """
    final = step_folder(root, step)
    writing, replaced = final.with_suffix(".tmp"), final.with_suffix(".old")
    with open(writing / FILES_FILE, "w") as file:
        json.dump(checksums, file, indent=1, sort_keys=True)
        _sync(file)
    for folder in (writing / TENSORS_FOLDER, writing):
        _sync_folder(folder)
    if final.exists():  # this step was saved before
        final.rename(replaced)
    writing.rename(final)
    _sync_folder(root)
    _point_to(root, final.name)
    if replaced.exists():
        _remove(replaced)
    older = [folder for other, folder in complete_folders(root).items() if other < step]
    for folder in older[: max(0, len(older) - (keep - 1))]:
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


def files_in(folder: Path) -> list[str]:
    """Every file of a checkpoint but the list of them, as sorted paths in the folder."""
    found = (path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    return sorted(name for name in found if name != FILES_FILE)


def checksums(folder: Path, names: Iterable[str]) -> dict[str, tuple[int, int]]:
    """{name: (size, CRC-32)}; waits until each file is on disk."""
    found = {}
    for name in names:
        with open(folder / name, "rb") as file:
            os.fsync(file.fileno())
            found[name] = _size_and_crc(file)
    return found


def listed_files(folder: Path) -> dict[str, tuple[int, int]]:
    """The list that `commit` wrote. Raises `UserError` if it is missing or damaged."""
    path = folder / FILES_FILE
    try:
        return {name: (int(size), int(crc)) for name, (size, crc) in json.loads(path.read_text()).items()}
    except FileNotFoundError:
        raise UserError(f"{path}: missing; {folder} is not a complete checkpoint") from None
    except (ValueError, TypeError, AttributeError) as error:
        raise UserError(f"{path}: damaged, cannot be read: {error}") from error


def damages(folder: Path, listed: Mapping[str, tuple[int, int]]) -> list[str]:
    """What is wrong with the listed files, as messages; reads all of them."""
    problems = []
    for name, (size, crc) in listed.items():
        path = folder / name
        if not path.is_file():
            problems.append(f"{path}: missing")
            continue
        with open(path, "rb") as file:
            found = _size_and_crc(file)
        if found != (size, crc):
            problems.append(f"{path}: damaged: found {found[0]} bytes, CRC-32 {found[1]}; saved were {size}, {crc}")
    return problems


def _size_and_crc(file: Any) -> tuple[int, int]:
    size = crc = 0
    while block := file.read(_BLOCK):
        size += len(block)
        crc = zlib.crc32(block, crc)
    return size, crc


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
