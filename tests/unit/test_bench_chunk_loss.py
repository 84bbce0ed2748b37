"""The benchmark of the fused loss: every kind computes the same loss, and rounds are put together as it says."""

from __future__ import annotations

import pytest

from tools import bench_chunk_loss
from tools.bench_chunk_loss import KINDS, fastest, refusal, run_case


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "liger"])
@pytest.mark.parametrize("dtype,tolerance", [("fp32", 1e-5), ("bf16", 1e-2)])
def test_every_kind_is_measured_and_right(monkeypatch, kind, dtype, tolerance):
    monkeypatch.setattr(bench_chunk_loss, "VOCAB", 3000)  # four of its rows are compared
    if refusal(kind, 40, 16, dtype):
        assert (kind, dtype) == ("tiled bf16 grad", "fp32")
        return
    found = run_case(kind, 40, 16, dtype, 0, True)
    assert found["seconds"] > 0
    if kind != "gemms":
        assert found["peak"] >= found["beyond"]
    if kind in ("tiled", "tiled bf16 grad", "naive", "twin"):
        assert found["error"] < tolerance


def test_of_rounds_the_fastest_counts_with_the_most_memory():
    rounds = [{"seconds": 2.0, "peak": 3.0, "beyond": 1.0}, "killed", {"seconds": 1.0, "peak": 2.0, "beyond": 1.5}]
    assert fastest(rounds) == {"seconds": 1.0, "peak": 3.0, "beyond": 1.5}
    assert fastest([{"seconds": 2.0}, {"seconds": 1.5}]) == {"seconds": 1.5}
    assert fastest(["needs 41 GiB", "needs 41 GiB"]) == "needs 41 GiB"
