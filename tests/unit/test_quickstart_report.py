from __future__ import annotations

import io
import json
from pathlib import Path

from rich.console import Console

from megatron_ac2.quickstart import report


def test_report_reads_steps_and_evaluations_from_their_own_rows(tmp_path: Path) -> None:
    """The last row of a run is an evaluation without a step."""
    rows = [
        {"step": 0, "evaluation/mean": 0.25, "evaluation/mean_se": 0.01, "perf/decoding_flops": 1e9},
        {"step": 1, "perf/decoding_flops": 3.5e9, "readiness/ready_fraction": 0.75},
        {"step": 2, "evaluation/mean": 0.5, "evaluation/mean_se": 0.02},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    console = Console(file=io.StringIO(), width=200)
    report(tmp_path, console)
    text = console.file.getvalue()
    for part in ("(step 0)", "0.250 ± 0.010", "(step 2)", "0.500 ± 0.020", "3.5e+09", "0.75"):
        assert part in text
