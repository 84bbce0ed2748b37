"""Checkpoint folders without Megatron: host state, the latest pointer, what is kept, a crash at every change."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from megatron_ac2.model import checkpoint_files as files
from megatron_ac2.model import checkpoint_manifest as manifests
from megatron_ac2.types import UserError

B2SUM = "5b44f0dccb663046ab4f6d9384e59064"
STATE = {
    "cursor": 7,
    "share": 0.25,
    "name": "run ü",
    "flags": [True, False, None],
    "empty": {},
    "nested": {"list": [{"ids": np.arange(5, dtype=np.int32)}, [np.zeros(0, np.float32)]]},
    "matrix": np.array([[1.5, np.nan], [np.inf, -0.0]], dtype=np.float64),
    "mask": np.array([True, False]),
}


def write(path: Path, tree: dict) -> None:
    files.write_state(path, files.pack_state(tree))


def save(root: Path, step: int, keep: int = 2, keep_every: int = 0) -> Path:
    folder = files.begin(root, step)
    write(folder / files.STATE_FILE, {"step": step})
    (folder / files.TENSORS_FOLDER / "weights").write_bytes(bytes([step]) * 100)
    return files.commit(root, step, keep, manifests.describe(folder, manifests.files_in(folder)), keep_every)


def damaged(folder: Path) -> list[str]:
    return manifests.damages(folder, manifests.read_manifest(folder))


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def test_state_comes_back_with_its_types(tmp_path: Path) -> None:
    write(tmp_path / "state.npz", STATE)
    found = files.read_state(tmp_path / "state.npz")
    assert {k: v for k, v in found.items() if k not in ("nested", "matrix", "mask")} == {
        k: v for k, v in STATE.items() if k not in ("nested", "matrix", "mask")
    }
    assert found["cursor"].__class__ is int and found["flags"][0] is True
    ids, empty = found["nested"]["list"][0]["ids"], found["nested"]["list"][1][0]
    assert ids.dtype == np.int32 and ids.tolist() == [0, 1, 2, 3, 4]
    assert empty.dtype == np.float32 and empty.shape == (0,)
    assert found["matrix"].tobytes() == STATE["matrix"].tobytes() and found["matrix"].shape == (2, 2)
    assert found["mask"].dtype == np.bool_


def test_numpy_scalars_and_tuples_become_json(tmp_path: Path) -> None:
    write(tmp_path / "state.npz", {"a": np.float32(0.5), "b": np.int64(3), "c": (1, np.True_)})
    assert files.read_state(tmp_path / "state.npz") == {"a": 0.5, "b": 3, "c": [1, True]}


def test_a_packed_state_is_a_copy(tmp_path: Path) -> None:
    """A save in the background writes it while training changes what it was made from."""
    tree = {"ids": np.arange(3), "views": [np.arange(6)[::2]], "count": 1}
    packed = files.pack_state(tree)
    tree["ids"][:] = -1
    tree["views"][0][:] = -1
    tree["count"] = 2
    files.write_state(tmp_path / "state.npz", packed)
    found = files.read_state(tmp_path / "state.npz")
    assert found["ids"].tolist() == [0, 1, 2] and found["views"][0].tolist() == [0, 2, 4] and found["count"] == 1


@pytest.mark.parametrize(
    ("value", "place"),
    [
        ({"a": [object()]}, r"state\.a\[0\]: found object"),
        ({"a": {3: 1}}, r"state\.a: found the key 3"),
        ({"a": np.array([None])}, r"state\.a: found ndarray"),
        ({"__array__": "a0"}, "state: found the key '__array__'"),
    ],
)
def test_what_cannot_be_stored_is_named(value: dict, place: str) -> None:
    with pytest.raises(TypeError, match=place):
        files.pack_state(value)


def test_damaged_state_is_named(tmp_path: Path) -> None:
    path = tmp_path / "state.npz"
    with pytest.raises(UserError, match=r"state\.npz: missing"):
        files.read_state(path)
    write(path, STATE)
    content = path.read_bytes()
    for broken in (content[: len(content) // 2], b"", b"no zip file"):
        path.write_bytes(broken)
        with pytest.raises(UserError, match=r"state\.npz: damaged"):
            files.read_state(path)


def test_latest_moves_and_only_the_newest_remain(tmp_path: Path) -> None:
    root = tmp_path / "run"
    assert files.latest(root) is None
    for step in (10, 20, 30, 40):
        assert save(root, step, keep=2) == files.latest(root) == root / f"step_{step:06d}"
    assert names(root) == ["latest", "step_000030", "step_000040"]
    save(root, 50, keep=1)
    assert names(root) == ["latest", "step_000050"]


def test_every_nth_stays_for_good(tmp_path: Path) -> None:
    for step in range(10, 90, 10):
        save(tmp_path, step, keep=2, keep_every=30)
    assert names(tmp_path) == ["latest", *(f"step_0000{step}" for step in (30, 60, 70, 80))]
    save(tmp_path, 90, keep=1, keep_every=30)
    assert names(tmp_path) == ["latest", *(f"step_0000{step}" for step in (30, 60, 90))]


def test_incomplete_folders_are_never_chosen_and_cleared_at_the_next_save(tmp_path: Path) -> None:
    save(tmp_path, 10)
    files.begin(tmp_path, 20)  # a crash while writing
    (tmp_path / "latest.tmp").write_text("step_0")
    (tmp_path / "step_000030").mkdir()  # not made by a save: it lists no files
    (tmp_path / "notes").mkdir()
    assert files.latest(tmp_path) == tmp_path / "step_000010"
    assert files.complete_folders(tmp_path) == {10: tmp_path / "step_000010"}
    save(tmp_path, 25)
    assert names(tmp_path) == ["latest", "notes", "step_000010", "step_000025", "step_000030"]


def test_a_pointer_to_nothing_falls_back_to_the_newest_complete(tmp_path: Path) -> None:
    save(tmp_path, 10)
    save(tmp_path, 20)
    shutil.rmtree(tmp_path / "step_000020")
    assert files.latest(tmp_path) == tmp_path / "step_000010"
    (tmp_path / "latest").unlink()
    assert files.latest(tmp_path) == tmp_path / "step_000010"


def test_the_pointer_decides_after_a_roll_back(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        save(tmp_path, step, keep=5)
    (tmp_path / "latest").write_text("step_000010\n")
    assert files.latest(tmp_path) == tmp_path / "step_000010"
    save(tmp_path, 20, keep=2)  # saved again, with the former one in its place
    assert files.latest(tmp_path) == tmp_path / "step_000020"
    assert names(tmp_path) == ["latest", "step_000010", "step_000020", "step_000030"]


class Crash(BaseException):
    pass


@pytest.mark.parametrize("again", [False, True])
def test_a_crash_at_any_moment_leaves_a_whole_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, again: bool
) -> None:
    """Stop before the n-th change of the folder, for every n; `again`: the step to save exists already."""
    survived = 0
    for moment in range(20):
        root = tmp_path / str(moment)
        if not again:
            save(root, 10)
        save(root, 20)
        left = [moment]

        def or_crash(original, left=left):
            def act(*args, **kwargs):
                if left[0] == 0:
                    raise Crash
                left[0] -= 1
                return original(*args, **kwargs)

            return act

        with monkeypatch.context() as patch:
            patch.setattr(Path, "rename", or_crash(Path.rename))
            patch.setattr(Path, "mkdir", or_crash(Path.mkdir))
            patch.setattr(files, "_remove", or_crash(files._remove))
            patch.setattr(files, "_sync", or_crash(files._sync))
            try:
                save(root, 20 if again else 30, keep=1 if again else 2)
                survived += 1
            except Crash:
                pass
        chosen = files.latest(root)
        assert chosen is not None and damaged(chosen) == []
        assert files.read_state(chosen / files.STATE_FILE)["step"] == int(chosen.stem[-6:])
        save(root, 40)
        assert all("." not in name for name in names(root)), names(root)
        assert files.latest(root) == root / "step_000040"
    assert 5 < survived < 15  # the moments tried reach from the first change to past the last one


def test_damage_names_the_file_and_what_was_found(tmp_path: Path) -> None:
    folder = save(tmp_path, 10)
    manifest = manifests.read_manifest(folder)
    assert set(manifest) == {"state.npz", "tensors/weights"} and manifests.damages(folder, manifest) == []
    # blake2b with a digest of 16 bytes, by coreutils: head -c 100 /dev/zero | tr '\\0' '\\n' | b2sum -l 128
    assert manifest["tensors/weights"] == (100, B2SUM)
    weights = folder / files.TENSORS_FOLDER / "weights"
    weights.write_bytes(weights.read_bytes()[:-1] + b"!")  # one byte, the same length
    (message,) = manifests.damages(folder, manifest)
    assert message.startswith(f"{weights}: damaged: found 100 bytes with blake2b-128 ") and B2SUM in message
    assert manifests.damages(folder, manifest, hashes=False) == []  # only a hash can tell
    weights.write_bytes(b"short")
    for hashes in (False, True):
        expected = [f"{weights}: damaged: found 5 bytes, saved were 100"]
        assert manifests.damages(folder, manifest, hashes) == expected
    weights.unlink()
    assert manifests.damages(folder, manifest) == [f"{weights}: missing"]


def test_a_damaged_list_of_files_is_named(tmp_path: Path) -> None:
    folder = save(tmp_path, 10)
    path = folder / manifests.FILES_FILE
    for content in ("{", "[]", '{"files": {}}', '{"hash": "blake2b-128", "files": {"a": 1}}'):
        path.write_text(content)
        with pytest.raises(UserError, match=r"files\.json: damaged"):
            manifests.read_manifest(folder)
    path.write_text('{"hash": "md5", "files": {}}')
    with pytest.raises(UserError, match=r"files\.json: found hashes of 'md5', accepted: 'blake2b-128'"):
        manifests.read_manifest(folder)
    path.unlink()
    with pytest.raises(UserError, match=r"files\.json: missing"):
        manifests.read_manifest(folder)


def test_the_latest_without_its_list_of_files_is_not_passed_over_in_silence(tmp_path: Path) -> None:
    whole, broken = save(tmp_path, 10), save(tmp_path, 20)
    (broken / manifests.FILES_FILE).unlink()
    with pytest.raises(UserError) as caught:
        files.latest(tmp_path)
    assert caught.value.problems[0] == f"{broken / 'files.json'}: missing"
    assert str(whole) in caught.value.problems[1] and f"remove {broken}" in caught.value.problems[1]
    shutil.rmtree(broken)  # as the message says
    assert files.latest(tmp_path) == whole


def test_the_way_out_leads_to_the_newest_that_is_whole(tmp_path: Path) -> None:
    first, second, third = (save(tmp_path, step, keep=3) for step in (10, 20, 30))
    (second / files.STATE_FILE).write_bytes(b"damage")
    assert files.way_out(third) == (
        f"the newest undamaged checkpoint is {first}; to go on from it remove {third}, {second}"
    )
    shutil.rmtree(first)
    assert "no undamaged checkpoint; start anew" in files.way_out(third)
