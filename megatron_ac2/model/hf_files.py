"""Hugging Face model folders: read tensors lazily from safetensors, write a folder that appears whole or not at all."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path, PurePath
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from megatron_ac2.data.json_text import read_object, reason, shown
from megatron_ac2.types import UserError

VALUE_HEAD_FILE = "value_head.safetensors"
_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_TOKENIZER_FILES = (
    "tokenizer*", "vocab.*", "merges.txt", "special_tokens_map.json", "added_tokens.json", "chat_template*",
    "generation_config.json",
)  # fmt: skip
_MAX_FILE_BYTES = 4 * 1024**3
_SAMPLES, _SAMPLE_BYTES = 64, 4096  # of each file, for a fingerprint


class HfReader:
    """The tensors of a folder by name. Raises `UserError` if there are none, or a file is missing or damaged."""

    def __init__(self, path: str | Path):
        self.folder = Path(path)
        self._handles: dict[Path, Any] = {}
        self._files: dict[str, Path] = {}
        for file in self._weight_files():
            for name in self._open(file).keys():  # noqa: SIM118  (not a dict)
                self._files[name] = file

    @property
    def names(self) -> set[str]:
        return set(self._files)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._slice(name).get_shape())

    def dtype(self, name: str) -> str:
        """As torch calls it: "bfloat16"."""
        return str(self._slice(name)[:1].dtype).removeprefix("torch.")

    def stored_dtype(self, name: str) -> str:
        """As the file's header calls it, and of any rank: "BF16"."""
        return str(self._slice(name).get_dtype())

    def file(self, name: str) -> Path:
        return self._files[name]

    def read(self, name: str) -> torch.Tensor:
        return self._slice(name)[:]

    def read_range(self, name: str, dim: int, start: int, end: int) -> torch.Tensor:
        """Rows (dim 0) or columns (dim 1) `start` to `end`, and nothing else, from the disk; past the end: fewer."""
        lazy = self._slice(name)
        end = min(end, self.shape(name)[dim])
        if start >= end:
            return lazy[:0]
        return lazy[start:end] if dim == 0 else lazy[:, start:end]

    def fingerprint(self) -> str:
        """From sizes and sampled bytes, wherever the folder is: other weights have another. A change to a small part
        of a large file may go unseen."""
        digest, total = hashlib.sha256(), 0
        for file in sorted({*self._files.values()}):
            size = file.stat().st_size
            total += size
            digest.update(f"{file.name} {size}".encode())
            with open(file, "rb") as opened:
                for index in range(_SAMPLES):
                    opened.seek(index * max(size - _SAMPLE_BYTES, 0) // (_SAMPLES - 1))
                    digest.update(opened.read(_SAMPLE_BYTES))
        return f"{total} bytes, {digest.hexdigest()[:16]}"

    def _slice(self, name: str) -> Any:
        if name not in self._files:
            raise UserError(f"{name}: missing in {self.folder}")
        return self._open(self._files[name]).get_slice(name)

    def _open(self, file: Path) -> Any:
        if file not in self._handles:
            try:
                self._handles[file] = safe_open(str(file), framework="pt", device="cpu")
            except (OSError, SafetensorError, ValueError, MemoryError) as error:
                raise UserError(f"{file}: cannot be read as safetensors: {reason(error)}") from error
        return self._handles[file]

    def _weight_files(self) -> list[Path]:
        index, single = self.folder / _INDEX, self.folder / _SINGLE
        if os.path.isfile(index):
            files = self._indexed_files(index)
        elif os.path.isfile(single):
            files = [single]
        else:
            raise UserError(f"{self.folder}: found neither {_SINGLE} nor {_INDEX}; only safetensors are read")
        value_head = self.folder / VALUE_HEAD_FILE
        return files + ([value_head] if value_head.is_file() else [])

    def _indexed_files(self, index: Path) -> list[Path]:
        weight_map = read_object(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise UserError(f"{index}: weight_map: found {shown(weight_map)}; accepted: an object, tensor -> file name")
        names = list(weight_map.values())
        odd = [name for name in names if not _is_inside(name)]
        problems = [f"{index}: weight_map: found {shown(name)}; accepted: files inside the folder" for name in odd]
        named = sorted({name for name in names if _is_inside(name)})
        problems += [
            f"{self.folder}/{named_plainly(name)}: named by {_INDEX}, but not there"
            for name in named
            if not os.path.isfile(self.folder / name)
        ]
        if problems:
            raise UserError(list(dict.fromkeys(problems)))
        return [self.folder / name for name in named]


def named_plainly(name: str) -> str:
    """A name out of a file, for a message: whoever wrote the file may have called it anything."""
    return name if name.isprintable() and 0 < len(name) <= 200 else shown(name)


def _is_inside(name: Any) -> bool:
    if not isinstance(name, str) or not name:
        return False
    path = PurePath(name)
    return not path.is_absolute() and ".." not in path.parts


class HfFolderWriter:
    """Write a model folder under a temporary name; `commit` gives it its own. Leaving without it removes everything."""

    def __init__(self, path: str | Path, max_file_bytes: int = _MAX_FILE_BYTES):
        self.path = Path(path)
        self.folder = self.path.parent / f".{self.path.name}.unfinished"
        self._max_file_bytes = max_file_bytes
        self._pending: dict[str, torch.Tensor] = {}
        self._pending_bytes = 0
        self._total_bytes = 0
        self._names_of_file: list[list[str]] = []

    def __enter__(self) -> HfFolderWriter:
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def add(self, name: str, tensor: torch.Tensor) -> None:
        size = tensor.numel() * tensor.element_size()
        if self._pending and self._pending_bytes + size > self._max_file_bytes:
            self._write_pending()
        self._pending[name] = tensor.detach().to("cpu", copy=True).contiguous()
        self._pending_bytes += size

    def add_value_head(self, name: str, tensor: torch.Tensor) -> None:
        save_file({name: tensor.detach().cpu().contiguous()}, self.folder / VALUE_HEAD_FILE)

    def commit(self) -> None:
        """Finish the files, then put the folder in place of whatever stood there."""
        self._write_pending()
        self._name_files()
        replaced = self.path.parent / f".{self.path.name}.replaced"
        shutil.rmtree(replaced, ignore_errors=True)
        if self.path.exists():
            self.path.rename(replaced)
        self.folder.rename(self.path)
        shutil.rmtree(replaced, ignore_errors=True)

    def _write_pending(self) -> None:
        if not self._pending:
            return
        file = self.folder / f"part-{len(self._names_of_file)}.safetensors"
        save_file(self._pending, file, metadata={"format": "pt"})
        self._names_of_file.append(list(self._pending))
        self._total_bytes += self._pending_bytes
        self._pending, self._pending_bytes = {}, 0

    def _name_files(self) -> None:
        count = len(self._names_of_file)
        if count == 1:
            (self.folder / "part-0.safetensors").rename(self.folder / _SINGLE)
            return
        weight_map = {}
        for part, names in enumerate(self._names_of_file):
            file_name = f"model-{part + 1:05d}-of-{count:05d}.safetensors"
            (self.folder / f"part-{part}.safetensors").rename(self.folder / file_name)
            weight_map.update(dict.fromkeys(names, file_name))
        index = {"metadata": {"total_size": self._total_bytes}, "weight_map": weight_map}
        (self.folder / _INDEX).write_text(json.dumps(index, indent=2))


def copy_tokenizer(source: str | Path, target: str | Path) -> None:
    """Copy the tokenizer's files and the generation defaults, as far as there are any."""
    for pattern in _TOKENIZER_FILES:
        for file in Path(source).glob(pattern):
            shutil.copy(file, Path(target) / file.name)
