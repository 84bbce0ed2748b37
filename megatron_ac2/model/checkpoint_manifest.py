"""The list of a checkpoint's files with the size and hash of each: whether one is complete, and undamaged."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from megatron_ac2.types import UserError

FILES_FILE = "files.json"
_HASH = "blake2b-128"
_new_hash = partial(hashlib.blake2b, digest_size=16)  # of those in hashlib the fastest where the CPU has no SHA unit

Manifest = Mapping[str, tuple[int, str]]  # path in the folder -> (size in bytes, hex digest)


def files_in(folder: Path) -> list[str]:
    """Every file of a checkpoint but the list of them, as sorted paths in the folder."""
    found = (path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    return sorted(name for name in found if name != FILES_FILE)


def describe(folder: Path, names: Iterable[str]) -> dict[str, tuple[int, str]]:
    """Size and hash of the files as they can be read back; waits until each is on disk."""
    found = {}
    for name in names:
        with open(folder / name, "rb") as file:
            os.fsync(file.fileno())
            found[name] = (os.fstat(file.fileno()).st_size, _digest(file))
    return found


def write_manifest(folder: Path, manifest: Manifest) -> None:
    with open(folder / FILES_FILE, "w") as file:
        json.dump({"hash": _HASH, "files": manifest}, file, indent=1, sort_keys=True)
        file.flush()
        os.fsync(file.fileno())


def read_manifest(folder: Path) -> dict[str, tuple[int, str]]:
    """Raises `UserError` if the list is missing or damaged."""
    path = folder / FILES_FILE
    try:
        content = json.loads(path.read_text())
        if content["hash"] != _HASH:
            raise UserError(f"{path}: found hashes of {content['hash']!r}, accepted: {_HASH!r}")
        return {name: (int(size), str(digest)) for name, (size, digest) in content["files"].items()}
    except FileNotFoundError:
        raise UserError(f"{path}: missing; {folder} is not a complete checkpoint") from None
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise UserError(f"{path}: damaged, cannot be read: {error}") from error


def damages(folder: Path, manifest: Manifest, hashes: bool = True) -> list[str]:
    """What is wrong with the listed files, as messages. `hashes` reads all of them; else only sizes are compared."""
    problems = []
    for name, (size, digest) in manifest.items():
        path = folder / name
        if not path.is_file():
            problems.append(f"{path}: missing")
        elif (found := path.stat().st_size) != size:
            problems.append(f"{path}: damaged: found {found} bytes, saved were {size}")
        elif hashes and (content := _digest_of(path)) != digest:
            problems.append(f"{path}: damaged: found {size} bytes with {_HASH} {content}, saved was {digest}")
    return problems


def _digest_of(path: Path) -> str:
    with open(path, "rb") as file:
        return _digest(file)


def _digest(file: Any) -> str:
    return hashlib.file_digest(file, _new_hash).hexdigest()
