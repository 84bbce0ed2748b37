"""Reading and writing Hugging Face folders."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_ac2.model.hf_files import HfFolderWriter, HfReader, copy_tokenizer
from megatron_ac2.types import UserError

TENSORS = {f"layer.{i}.weight": torch.arange(12.0).reshape(4, 3) + i for i in range(5)}  # 48 bytes each


def write(folder: Path, max_file_bytes: int = 1 << 30) -> Path:
    with HfFolderWriter(folder, max_file_bytes) as writer:
        for name, tensor in TENSORS.items():
            writer.add(name, tensor)
        writer.add_value_head("value_head.weight", torch.ones(1, 3))
        writer.commit()
    return folder


@pytest.mark.parametrize(("max_file_bytes", "num_files"), [(1 << 30, 1), (100, 3), (1, 5)])
def test_what_is_written_is_read(tmp_path: Path, max_file_bytes: int, num_files: int):
    folder = write(tmp_path / "model", max_file_bytes)
    assert len(list(folder.glob("model*.safetensors"))) == num_files
    assert (folder / "model.safetensors.index.json").is_file() == (num_files > 1)
    reader = HfReader(folder)
    assert reader.names == {*TENSORS, "value_head.weight"}
    for name, tensor in TENSORS.items():
        assert torch.equal(reader.read(name), tensor)
        assert reader.dtype(name) == "float32" and reader.shape(name) == (4, 3)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_ranges_end_where_the_tensor_does(tmp_path: Path):
    reader = HfReader(write(tmp_path / "model"))
    full = TENSORS["layer.0.weight"]
    assert torch.equal(reader.read_range("layer.0.weight", 0, 1, 3), full[1:3])
    assert torch.equal(reader.read_range("layer.0.weight", 1, 1, 2), full[:, 1:2])
    assert torch.equal(reader.read_range("layer.0.weight", 0, 3, 6), full[3:])
    assert reader.read_range("layer.0.weight", 0, 4, 8).shape == (0, 3)


def test_a_fingerprint_tells_weights_apart_and_not_places(tmp_path: Path):
    for max_file_bytes in (1 << 30, 100):
        folder = write(tmp_path / f"model_{max_file_bytes}", max_file_bytes)
        found = HfReader(folder).fingerprint()
        assert found.startswith(f"{sum(file.stat().st_size for file in folder.glob('*.safetensors'))} bytes, ")
        folder.rename(tmp_path / f"moved_{max_file_bytes}")
        folder = tmp_path / f"moved_{max_file_bytes}"
        assert HfReader(folder).fingerprint() == found
        file = max(folder.glob("model*.safetensors"))
        trained = {name: tensor + 1e-3 for name, tensor in load_file(file).items()}
        save_file(trained, file, metadata={"format": "pt"})
        assert HfReader(folder).fingerprint() != found


def test_a_fingerprint_reads_little_of_a_large_file_and_finds_training(tmp_path: Path):
    torch.manual_seed(0)
    weight = torch.randn(2048, 1024)
    save_file({"weight": weight}, tmp_path / "model.safetensors")
    found = HfReader(tmp_path).fingerprint()
    weight[::20] *= 1.01  # one row in twenty
    save_file({"weight": weight}, tmp_path / "model.safetensors")
    assert HfReader(tmp_path).fingerprint() != found


def test_failed_write_leaves_the_old_folder(tmp_path: Path):
    folder = write(tmp_path / "model")
    with pytest.raises(OSError, match="disk"), HfFolderWriter(folder) as writer:
        writer.add("other", torch.zeros(2))
        raise OSError("disk full")
    assert torch.equal(load_file(folder / "model.safetensors")["layer.1.weight"], TENSORS["layer.1.weight"])
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_finished_write_replaces_the_old_folder(tmp_path: Path):
    folder = write(tmp_path / "model", 1)
    with HfFolderWriter(folder) as writer:
        writer.add("other", torch.zeros(2))
        writer.commit()
    assert HfReader(folder).names == {"other"}
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_tensor_is_written_as_it_was_when_added(tmp_path: Path):
    live = torch.zeros(3)
    with HfFolderWriter(tmp_path / "model") as writer:
        writer.add("live", live)
        live += 1
        writer.commit()
    assert HfReader(tmp_path / "model").read("live").tolist() == [0, 0, 0]


def test_copy_tokenizer(tmp_path: Path):
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir(), target.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "vocab.json", "pytorch_model.bin"):
        (source / name).write_text(name)
    copy_tokenizer(source, target)
    assert {path.name for path in target.iterdir()} == {"tokenizer.json", "tokenizer_config.json", "vocab.json"}


def test_folder_mistakes(tmp_path: Path):
    with pytest.raises(UserError, match="found neither"):
        HfReader(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"not safetensors at all")
    with pytest.raises(UserError, match="cannot be read as safetensors"):
        HfReader(tmp_path)
    folder = write(tmp_path / "model", 1)
    next(iter(folder.glob("model-00002*"))).unlink()
    with pytest.raises(UserError, match="named by model.safetensors.index.json, but not there"):
        HfReader(folder)
    save_file({"a": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match="b: missing"):
        HfReader(tmp_path).read("b")


def index(folder: Path, name: object) -> str:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(UserError) as caught:
        HfReader(folder)
    (problem,) = caught.value.problems
    return problem


@pytest.mark.parametrize("name", ["../model.safetensors", "/etc/hostname", "", "sub/../../x", 7, None, ["x"], {}])
def test_an_index_names_files_of_its_own_folder_only(tmp_path: Path, name: object):
    save_file({"a": torch.zeros(1)}, tmp_path / "model.safetensors")
    (tmp_path / "inner").mkdir()
    problem = index(tmp_path / "inner", name)
    assert problem.startswith(f"{tmp_path / 'inner' / 'model.safetensors.index.json'}: weight_map: found ")
    assert problem.endswith("; accepted: files inside the folder")


@pytest.mark.parametrize("name", ["gone", "a\0b", "a\nb", "\ud800", "x" * 9999, "."])
def test_an_index_that_names_what_is_no_file(tmp_path: Path, name: str):
    problem = index(tmp_path, name)
    assert problem.endswith("named by model.safetensors.index.json, but not there")
    assert len(problem.splitlines()) == 1 and len(problem.encode()) < 300


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"weight_map": []}', '{"weight_map": "x"}'])
def test_an_index_without_a_map(tmp_path: Path, content: str):
    file = tmp_path / "model.safetensors.index.json"
    file.write_text(content)
    with pytest.raises(UserError) as caught:
        HfReader(tmp_path)
    assert caught.value.problems[0].startswith(f"{file}: ")


@pytest.mark.parametrize("damage", ["cut", "empty", "length", "text", "folder"])
def test_damaged_weights(tmp_path: Path, damage: str):
    file = write(tmp_path / "model") / "model.safetensors"
    content = file.read_bytes()
    file.unlink()
    if damage == "folder":
        file.mkdir()
    else:
        length = (2**60).to_bytes(8, "little")
        file.write_bytes({"cut": content[:-1], "empty": b"", "length": length + content[8:], "text": b"words"}[damage])
    with pytest.raises(UserError) as caught:
        HfReader(tmp_path / "model")
    (problem,) = caught.value.problems
    said = f"{file.parent}: found neither" if damage == "folder" else f"{file}: cannot be read as safetensors: "
    assert problem.startswith(said)


def test_a_header_tells_shape_and_type(tmp_path: Path):
    save_file({"a": torch.zeros(2, 3, dtype=torch.bfloat16), "b": torch.tensor(1.0)}, tmp_path / "model.safetensors")
    reader = HfReader(tmp_path)
    assert (reader.shape("a"), reader.stored_dtype("a")) == ((2, 3), "BF16")
    assert (reader.shape("b"), reader.stored_dtype("b")) == ((), "F32")
    assert reader.file("a") == tmp_path / "model.safetensors"
