"""The whole story on one CPU machine: inputs, supervised start, critic warm-up, AC2 on torchrun ranks, a picture.

`python -m megatron_ac2.quickstart [--dir runs/quickstart] [--ranks 2] [section.field=value ...]` (run from a checkout:
it reads `examples/quickstart/`). Overrides go to the training stage. A stage whose output exists is not run again.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from megatron_ac2.plots import plot_runs

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples" / "quickstart"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, default=Path("runs/quickstart"))
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("overrides", nargs="*")
    arguments = parser.parse_args()
    run, console = arguments.dir, Console()
    inputs, start, reader, critic = run / "inputs", run / "start", run / "reader", run / "critic"
    stages = [
        ("problems, tokenizer, untrained model", inputs / "worked.jsonl",
         [sys.executable, str(ROOT / "tools" / "prepare_quickstart.py"), "--learnable", "--out", str(inputs)]),
        ("supervised start on flawed worked solutions", start / "config.json",
         torchrun(arguments.ranks, "megatron_ac2.sft", EXAMPLES / "sft.yaml", f"run.dir={run / 'sft'}",
                  f"model.path={inputs / 'base'}", f"sft.data={inputs / 'worked.jsonl'}", f"sft.out={start}")),
        ("critic warm-up: is everything right so far?", reader / "config.json",
         torchrun(arguments.ranks, "megatron_ac2.sft", EXAMPLES / "critic_reads.yaml", f"run.dir={run / 'reader_sft'}",
                  f"model.path={start}", f"sft.data={inputs / 'worked.jsonl'}", f"sft.out={reader}")),
        ("critic warm-up: what is that worth?", critic / "config.json",
         torchrun(arguments.ranks, "megatron_ac2.sft", EXAMPLES / "critic_values.yaml", f"run.dir={run / 'critic_sft'}",
                  f"model.path={reader}", f"sft.data={inputs / 'worked.jsonl'}", f"sft.out={critic}")),
        ("AC2", None,
         torchrun(arguments.ranks, "megatron_ac2.train", EXAMPLES / "train.yaml", f"run.dir={run}",
                  f"model.path={start}", f"critic.path={critic}", f"data.train={inputs / 'train.jsonl'}",
                  f"data.validation={inputs / 'validation.jsonl'}", *arguments.overrides)),
    ]  # fmt: skip
    for title, output, command in stages:
        if output is not None and output.exists():
            console.print(f"[bold]{title}[/]: {output} is there, skipped")
            continue
        console.rule(f"[bold]{title}")
        started = time.monotonic()
        code = subprocess.run(command, env=environment()).returncode
        if code:
            console.print(f"[red]{title} failed[/] (exit status {code})")
            return code
        console.print(f"{title}: {time.monotonic() - started:.0f} s")
    plot_runs([run], run / "curves.png")
    report(run, console)
    return 0


def torchrun(ranks: int, module: str, *arguments: object) -> list[str]:
    """One machine's torchrun command line."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    return [*launcher, "-m", module, *map(str, arguments)]


def environment() -> dict[str, str]:
    """One thread a rank: two ranks on two cores fight over more, and torch's pools slow each other 10x.

    Libraries' warnings about each other's deprecated calls would bury the progress.
    """
    quiet = {"PYTHONWARNINGS": "ignore", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    return {**os.environ, **quiet, "OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1", "PYTHONPATH": str(ROOT)}


def report(run: Path, console: Console) -> None:
    """What a newcomer wants to know, from the run's own metrics file."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    scored = [row for row in rows if "evaluation/mean" in row]
    first, last = scored[0], scored[-1]
    final = [row for row in rows if "perf/decoding_flops" in row][-1]  # the last row holds the last evaluation alone
    table = Table(title="quickstart", show_header=False)
    for name, row in (("before", first), ("after", last)):
        table.add_row(
            f"validation mean@k {name} (step {row['step']})",
            f"{row['evaluation/mean']:.3f} ± {row['evaluation/mean_se']:.3f}",
        )
    table.add_row("decoding FLOPs", f"{final['perf/decoding_flops']:.3g}")
    table.add_row("ready fraction of sampled problems", f"{final.get('readiness/ready_fraction', 0.0):.2f}")
    for role in ("actor", "critic"):
        if tokens := rows[0].get(f"start/{role}_sft_tokens"):
            table.add_row(f"supervised tokens before it, {role}", f"{tokens:,.0f}")
    table.add_row("picture", str(run / "curves.png"))
    console.print(table)


if __name__ == "__main__":
    sys.exit(main())
