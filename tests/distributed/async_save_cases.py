"""One job of two ranks: checkpoints that are written while training goes on.

usage: torchrun ... async_save_cases.py MODEL_DIR SCRATCH_DIR
"""

from __future__ import annotations

import functools
import json
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import FileSystemWriter

from megatron_ac2.model.checkpoint import CheckpointSaver, Kept, latest, load_checkpoint, save_checkpoint
from megatron_ac2.types import UserError
from tests.distributed.checkpoint_cases import (
    DP2,
    IDENTITY,
    PP2,
    TP2,
    Trainee,
    assert_refused,
    assert_traces,
    assert_weights,
    stored_tensors,
)
from tests.distributed.groups import run_cases

LAYOUTS = (
    (TP2, True, torch.float32),
    (DP2, True, torch.bfloat16),
    (DP2, False, torch.bfloat16),
    (PP2, False, torch.float32),
)


@contextmanager
def write_data(replacement, rank: int | None = None) -> Iterator[None]:
    """torch's writer replaced on `rank`, or on both."""
    original = FileSystemWriter.write_data
    if rank in (None, dist.get_rank()):
        FileSystemWriter.write_data = lambda *arguments: replacement(original, *arguments)
    try:
        yield
    finally:
        FileSystemWriter.write_data = original


def training_meanwhile_case(folder: Path, scratch: Path) -> None:
    """Two steps are taken before a byte is written; what is then written are the weights of the save, bit for bit."""
    for layout, distributed, dtype in LAYOUTS:
        what = f"{layout} distributed={distributed} {dtype}"
        root, go_on = scratch / what.replace(" ", ""), threading.Event()
        trainee = Trainee(folder, layout, distributed, dtype)
        trainee.train(0, 2)
        parts = ({"m": trainee.model}, {"m": trainee.optimizer})
        save_checkpoint(root / "blocking", 2, *parts, {"ids": np.arange(3)}, 1, IDENTITY)
        saver = CheckpointSaver(root / "async", Kept(1))
        state = {"ids": np.arange(3)}

        def when_told(original, *arguments, go_on=go_on):
            assert go_on.wait(60)
            return original(*arguments)

        with write_data(when_told):
            saver.save(2, *parts, state, IDENTITY)
            state["ids"][:] = -1
            trace = trainee.train(2, 5)  # over the training groups, while the writers wait in theirs
            assert latest(root / "async") is None
            go_on.set()
            assert saver.wait() == latest(root / "async") == root / "async" / "step_000002"
        assert saver.wait() is None
        if dist.get_rank() == 0:
            found, expected = (stored_tensors(latest(root / name)) for name in ("async", "blocking"))
            assert found.keys() == expected.keys(), what
            assert all(torch.equal(found[key], expected[key]) for key in expected), what
        other = Trainee(folder, layout, distributed, dtype, seed=31, weights=False)
        found = load_checkpoint(root / "async", {"m": other.model}, {"m": other.optimizer}, IDENTITY)
        assert found["ids"].tolist() == [0, 1, 2]
        assert_traces(other.train(2, 5), trace, 0, what)
        assert_weights(other.weights(), trainee.weights(), 0, what)


def failure_case(folder: Path, scratch: Path) -> None:
    """A save that fails in the background fails the next one, or the end of the run, on every rank."""

    def full(original, *arguments):
        raise OSError(28, "No space left on device")

    trainee = Trainee(folder, DP2, True)
    root = scratch / "failure"
    parts = ({"m": trainee.model}, {"m": trainee.optimizer}, {}, IDENTITY)
    saver = CheckpointSaver(root, Kept(2))
    saver.save(1, *parts)
    saver.wait()
    for attempt in (lambda: saver.save(3, *parts), saver.wait):
        with write_data(full, rank=1):
            saver.save(2, *parts)
            words = (f"checkpoint of step 2 in {root}: not saved", "cannot be written", "No space left")
            assert_refused(attempt, RuntimeError, *words)
        assert latest(root).name == "step_000001"
    saver.save(2, *parts)
    saver.save(3, *parts)
    assert saver.wait() == latest(root) == root / "step_000003"
    assert sorted(path.name for path in root.iterdir()) == ["latest", "step_000002", "step_000003"]
    assert_refused(lambda: saver.save(4, *parts[:2], {"x": {1}}, IDENTITY), RuntimeError, "state.run.x")
    blocking = CheckpointSaver(root, Kept(1, every=2), asynchronous=False)
    with write_data(full, rank=1):
        assert_refused(lambda: blocking.save(4, *parts), RuntimeError, "step 4", "No space left")
    blocking.save(4, *parts)
    assert sorted(path.name for path in root.iterdir()) == ["latest", "step_000002", "step_000004"]


def verification_case(folder: Path, scratch: Path) -> None:
    """A wrong hash is found where hashes are compared; the newest whole checkpoint is named, and is loaded next."""
    trainee = Trainee(folder, TP2, True)
    parts = ({"m": trainee.model}, {"m": trainee.optimizer})
    root = scratch / "verification"
    for step in (1, 2):
        save_checkpoint(root, step, *parts, {"step": step}, 2, IDENTITY)
    first, second = root / "step_000001", root / "step_000002"
    if dist.get_rank() == 0:
        content = json.loads((second / "files.json").read_text())
        size, digest = content["files"]["tensors/common.pt"]
        content["files"]["tensors/common.pt"] = [size, digest[::-1]]
        (second / "files.json").write_text(json.dumps(content))
    dist.barrier()
    words = (str(second / "tensors/common.pt"), digest[::-1] if dist.get_rank() == 0 else "blake2b-128", str(first))
    assert_refused(lambda: load_checkpoint(root, *parts, IDENTITY), UserError, *words, f"remove {second}")
    assert load_checkpoint(root, *parts, IDENTITY, verify=False) == {"step": 2}
    if dist.get_rank() == 0:
        for path in sorted(second.rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()
        second.rmdir()
    dist.barrier()
    assert load_checkpoint(root, *parts, IDENTITY) == {"step": 1}


def main() -> None:
    folder, scratch = map(Path, sys.argv[1:])
    cases = (training_meanwhile_case, failure_case, verification_case)
    run_cases({case.__name__: functools.partial(case, folder, scratch) for case in cases})


if __name__ == "__main__":
    main()
