"""A training step beside Hugging Face transformers': forward, backward, clipping, AdamW; a fresh process a case.

    python tools/bench_trainer.py [--sizes 17M 60M] [--dtypes fp32 bf16] [--ranks 1 2] [--threads 1]

ours     Megatron model, packed sequences, fused output layer and loss, Megatron's AdamW; bf16 with fp32 master weights
hf       transformers' model of the same weights, its own loss, sdpa, torch's fused AdamW; bf16 is pure bf16. "padded":
         one batch [sequences, longest] with its mask; "packed": one row, position_ids mark the sequences
tp2/dp2  two ranks with as many threads each; hf's two ranks are DDP

The same ragged sequences and next-token loss for all; each line's first loss is printed, they agree to rounding. Wall
time is the best of --repeats steps after a first one. CPU time, user + system, is the mean over the same steps, summed
over ranks: on a machine that others use, compare that; final figures need a quiet one. Memory is a rank's, above what
it held after its imports, sampled while it steps.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_ac2.parallel.topology import shutdown  # noqa: E402
from tools.peak_memory import GIB, PeakMemory, resident_bytes  # noqa: E402
from tools.trainees import DTYPES, SIZES, VOCAB, build_trainee, hf_config  # noqa: E402

CASES = {1: ("ours", "hf padded", "hf packed"), 2: ("ours dp2", "ours tp2", "hf padded dp2", "hf packed dp2")}


def run_case(case: str, folder: Path, dtype: str, arguments: argparse.Namespace) -> dict[str, float]:
    base = resident_bytes()
    trainee = build_trainee(case, folder, DTYPES[dtype], arguments.tokens)
    if arguments.profile:
        return profile(trainee.step)
    first = trainee.step()
    with PeakMemory() as memory:
        start = os.times()
        seconds = [timed(trainee.step) for _ in range(arguments.repeats)]
        user, system = os.times().user - start.user, os.times().system - start.system
    found = torch.tensor([user, system, memory.peak - base], dtype=torch.float64)
    if dist.is_initialized():
        gathered = [torch.zeros_like(found) for _ in range(dist.get_world_size())]
        dist.all_gather(gathered, found)
        found = torch.cat([sum(gathered)[:2], torch.stack(gathered).amax(0)[2:]])
    user, system, peak = found.tolist()
    each = {"user": user / arguments.repeats, "system": system / arguments.repeats}
    return {"seconds": min(seconds), **each, "peak": peak / GIB, "loss": first}


def profile(function: Callable[[], object]) -> dict[str, float]:
    function()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
        function()
        function()
    print(seen.key_averages().table(sort_by="self_cpu_time_total", row_limit=30, max_name_column_width=60))
    return {}


def timed(function: Callable[[], object]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def in_fresh_process(case: str, folder: Path, dtype: str, arguments: argparse.Namespace) -> dict[str, float] | str:
    ranks = 2 if case.endswith("2") else 1
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    command = [
        *(launcher if ranks > 1 else [sys.executable]),
        __file__,
        "--case",
        json.dumps([case, str(folder), dtype]),
    ]
    for name in ("tokens", "repeats", "threads"):
        command += [f"--{name}", str(getattr(arguments, name))]
    threads = str(arguments.threads)
    env = os.environ | {"OMP_NUM_THREADS": threads, "TORCHDYNAMO_DISABLE": "1", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        return (done.stderr.strip().splitlines() or [f"ended with code {done.returncode}"])[-1][:100]
    return json.loads(lines[0])


def report(results: dict[str, dict[str, float] | str], tokens: int) -> None:
    """Each case, and ours against the better of transformers' two ways."""
    measured = {case: found for case, found in results.items() if not isinstance(found, str)}
    hf = [found for case, found in measured.items() if case.startswith("hf")]
    for case, found in results.items():
        if isinstance(found, str):
            print(f"  {case:14s} {found}", flush=True)
            continue
        rate, wall = tokens / found["seconds"], found["seconds"]
        line = (
            f"  {case:14s} {rate:8.0f} tokens/s  step {wall:7.3f} s  CPU {found['user']:7.3f} + {found['system']:.3f} s"
        )
        line += f"  peak {found['peak']:5.2f} GiB  loss {found['loss']:.4f}"
        if case.startswith("ours") and hf:
            wall = min(other["seconds"] for other in hf) / found["seconds"]
            cpu = min(other["user"] for other in hf) / found["user"]
            line += f"  {wall:.2f}x hf by the clock, {cpu:.2f}x by user CPU time"
        print(line, flush=True)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=["17M", "60M"])
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=["fp32", "bf16"])
    parser.add_argument("--ranks", nargs="+", type=int, choices=CASES, default=[1, 2])
    parser.add_argument("--tokens", type=int, default=2048, help="of a step, over all ranks")
    parser.add_argument("--threads", type=int, default=1, help="of each rank")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--profile", choices=CASES[1], help="print where one case's step spends its time, and stop")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    arguments = parse()
    torch.set_num_threads(arguments.threads)
    if arguments.case:
        case, folder, dtype = json.loads(arguments.case)
        found = run_case(case, Path(folder), dtype, arguments)
        if int(os.environ.get("RANK", "0")) == 0:
            print(json.dumps(found), flush=True)
        shutdown()
        return
    print(f"torch {torch.__version__}, {arguments.threads} thread(s) a rank, vocabulary {VOCAB}, {arguments.tokens} "
          f"tokens a step, best of {arguments.repeats}", flush=True)  # fmt: skip
    with tempfile.TemporaryDirectory() as scratch:
        for size in arguments.sizes:
            folder = Path(scratch) / size
            torch.manual_seed(0)
            LlamaForCausalLM(hf_config(size)).save_pretrained(folder)
            for dtype in arguments.dtypes:
                print(f"{size}, {dtype}", flush=True)
                if arguments.profile:
                    run_case(arguments.profile, folder, dtype, arguments)
                    return
                for ranks in arguments.ranks:
                    results = {case: in_fresh_process(case, folder, dtype, arguments) for case in CASES[ranks]}
                    report(results, arguments.tokens)


if __name__ == "__main__":
    main()
