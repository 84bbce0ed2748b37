from __future__ import annotations

from tools import bench_grading


def test_it_compares_and_measures(capsys):
    bench_grading.main(["--answers", "10", "--datasets", "chain_sum"])
    lines = capsys.readouterr().out.splitlines()
    assert [line[:26].strip() for line in lines[2:5]] == ["math-verify", "chain_sum", "math-verify, 200k letters"]
    assert all(len(line.split()) >= 4 for line in lines[2:5]) and lines[5].endswith(" ms")
