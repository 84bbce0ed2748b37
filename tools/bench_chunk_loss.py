"""The fused policy loss beside what it replaces: time and peak memory of forward and backward, a fresh process a case.

usage: bench_chunk_loss.py [--tokens 1024 4096 16384] [--hidden 1024 2560] [--dtypes bf16 fp32] [--threads 2]

naive    logits materialised, torch's log_softmax in fp32
twin     logits materialised, kernels/vocab_logprobs.py
tiled    kernels/chunk_loss.py with torch's operators; +entropy: an entropy bonus, +centering: 32 recorded tokens,
         bf16 grad: d(weight) accumulated in the weight's own bf16
liger    LigerFusedLinearGRPOLoss(compiled=False), where liger-kernel is installed; one advantage a sequence of 256
gemms    the three matrix products alone, in the tiles' shapes: W X^T, P W, P^T X; the faster of torch's and oneDNN's

Peak: the process's resident memory above its inputs, sampled; "beyond": less d(weight) and d(hidden) as they were
accumulated. Error of d(weight): against float64, on every 997th row. Not run: a case that would not fit in memory.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import psutil
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_ac2.algorithm.objective_parts import PolicyObjective  # noqa: E402
from megatron_ac2.kernels import onednn_products  # noqa: E402
from megatron_ac2.kernels.chunk_loss_backend import default_tile_bytes  # noqa: E402
from megatron_ac2.kernels.chunk_loss_tiled import BLOCK_ROWS  # noqa: E402
from megatron_ac2.kernels.chunk_loss_walk import tile_rows  # noqa: E402
from megatron_ac2.kernels.vocab_logprobs import TokenLogprobs  # noqa: E402
from tools.chunk_loss_inputs import Case  # noqa: E402
from tools.peak_memory import GIB, PeakMemory, resident_bytes  # noqa: E402

KINDS = ("gemms", "tiled", "tiled +entropy", "tiled +centering", "tiled bf16 grad", "naive", "twin", "liger")
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
VOCAB = 151_936
SEQUENCE = 256
TILE_BYTES = default_tile_bytes(torch.device("cpu"))


def weight_error(case: Case) -> float:
    """Relative error of d(weight) on some of its rows, against float64 from the same inputs."""
    rows = torch.arange(0, VOCAB, 997)
    exact = torch.zeros(len(rows), case.weight.shape[1], dtype=torch.float64)
    weight = case.weight.detach().float()
    for start in range(0, case.tokens, 128):
        part = slice(start, min(start + 128, case.tokens))
        hidden = case.hidden.detach()[part].float()
        probabilities = (hidden @ weight.t()).double().softmax(1)
        current = probabilities.gather(1, case.labels[part, None])[:, 0].log().requires_grad_()
        loss, _ = case.evaluate(TokenLogprobs(current, torch.zeros_like(current), None), part)
        (slope,) = torch.autograd.grad(loss, current)
        picked = (rows[None] == case.labels[part, None]).double() - probabilities[:, rows]
        exact += (picked * slope[:, None]).t() @ hidden.double()
    return ((case.weight.grad[rows].double() - exact).norm() / exact.norm()).item()


def run_case(kind: str, tokens: int, hidden: int, dtype_name: str, repeats: int, with_error: bool) -> dict[str, float]:
    dtype = DTYPES[dtype_name]
    case = Case(kind, (tokens, VOCAB, hidden), dtype, "cpu", SEQUENCE)
    if kind == "gemms":
        return {"seconds": gemm_seconds(case, repeats)}
    function = case.function(kind)
    gc.collect()
    base = resident_bytes()
    with PeakMemory() as memory:
        seconds = timed(lambda: step(case, function), repeats)
    peak = memory.peak - base
    wide = kind.startswith("tiled") and not kind.endswith("grad") and tokens > tile_rows(VOCAB, dtype, TILE_BYTES)
    gradients = case.weight.numel() * (4 if wide else dtype.itemsize) + case.hidden.numel() * dtype.itemsize
    found = {"seconds": seconds, "peak": peak / GIB, "beyond": (peak - gradients) / GIB}
    if with_error and case.objective == PolicyObjective():
        found["error"] = weight_error(case)
    return found


def step(case: Case, function: Callable[[], Tensor]) -> None:
    case.hidden.grad = case.weight.grad = None
    function().backward()


def gemm_seconds(case: Case, repeats: int) -> float:
    """Of the products of all tokens, measured on one tile: by torch, and by oneDNN's blocks where those suit."""
    rows = min(case.tokens, tile_rows(VOCAB, case.weight.dtype, TILE_BYTES))
    hidden, weight = case.hidden.detach()[:rows], case.weight.detach()
    tile, to_hidden, to_weight = weight @ hidden.t(), torch.empty_like(hidden), torch.empty_like(weight)
    products = [
        [lambda: torch.mm(weight, hidden.t(), out=tile)],
        [lambda: torch.mm(tile.t(), weight, out=to_hidden)],
        [lambda: torch.mm(tile, hidden, out=to_weight)],
    ]
    blocks = [slice(start, start + BLOCK_ROWS["cpu"]) for start in range(0, VOCAB, BLOCK_ROWS["cpu"])]
    if onednn_products.suits(rows, weight[blocks[0]]):
        product = onednn_products.product
        products[0].append(lambda: deque((product(weight[block], hidden.t()) for block in blocks), 0))
        products[1].append(lambda: deque((product(tile[block].t(), weight[block]) for block in blocks), 0))
        products[2].append(lambda: deque((product(tile[block], hidden) for block in blocks), 0))
    return sum(min(timed(way, repeats + 2) for way in ways) for ways in products) * case.tokens / rows


def timed(function: Callable[[], object], repeats: int) -> float:
    """The best of `repeats`, after a first one; of 0, the first one."""
    seconds = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        function()
        seconds.append(time.perf_counter() - start)
    return min(seconds[1:] or seconds)


def refusal(kind: str, tokens: int, hidden: int, dtype_name: str) -> str | None:
    """Why the case is not run."""
    if kind == "liger" and find_spec("liger_kernel") is None:
        return "not installed"
    if kind == "tiled bf16 grad" and dtype_name != "bf16":
        return "-"
    size = DTYPES[dtype_name].itemsize
    logits = tokens * VOCAB * {"naive": size * 2 + 12, "twin": size * 2}.get(kind, 0)
    needed = logits + VOCAB * hidden * (2 * size + 8) + 2 * GIB
    if needed > psutil.virtual_memory().available:
        return f"needs {needed / GIB:.0f} GiB"
    return None


def in_fresh_process(arguments: argparse.Namespace, *case: object) -> dict[str, float] | str:
    command = [sys.executable, __file__, "--case", json.dumps(case), "--threads", str(arguments.threads)]
    command += ["--repeats", str(arguments.repeats), *(["--errors"] if arguments.errors else [])]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        return (done.stderr.strip().splitlines() or [f"ended with code {done.returncode}"])[-1][:80]
    return json.loads(done.stdout.splitlines()[-1])


def line(kind: str, found: dict[str, float] | str, gemms: float | None) -> str:
    if isinstance(found, str):
        return f"  {kind:18s} {found}"
    text = f"  {kind:18s} {found['seconds']:8.2f} s"
    if gemms and kind != "gemms":
        text += f"  {100 * gemms / found['seconds']:4.0f} % of the GEMMs' rate"
    if "peak" in found:
        text += f"  peak {found['peak']:6.2f} GiB, beyond gradients {found['beyond']:6.2f}"
    return text + (f"  d(weight) error {found['error']:.1e}" if "error" in found else "")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 4096, 16384])
    parser.add_argument("--hidden", type=int, nargs="+", default=[1024, 2560])
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeats", type=int, default=1, help="the best of so many, after one that warms up")
    parser.add_argument("--rounds", type=int, default=3, help="over all kinds, of which each kind's best counts")
    parser.add_argument("--errors", action="store_true", help="the error of d(weight) too; slow")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    arguments = parse()
    torch.set_num_threads(arguments.threads)
    if arguments.case:
        print(json.dumps(run_case(*json.loads(arguments.case), arguments.repeats, arguments.errors)))
        return
    print(f"torch {torch.__version__}, {arguments.threads} threads, V {VOCAB}, best of {arguments.rounds} rounds of "
          f"{max(arguments.repeats, 1)}", flush=True)  # fmt: skip
    for tokens, hidden, dtype in itertools.product(arguments.tokens, arguments.hidden, arguments.dtypes):
        print(f"T {tokens}, H {hidden}, {dtype}", flush=True)
        found = [compare(arguments, number, tokens, hidden, dtype) for number in range(arguments.rounds)]
        best = {kind: fastest([each[kind] for each in found]) for kind in arguments.kinds}
        gemms = best.get("gemms")
        for kind in arguments.kinds:
            print(line(kind, best[kind], gemms["seconds"] if isinstance(gemms, dict) else None), flush=True)


def compare(arguments: argparse.Namespace, number: int, *size: object) -> dict[str, dict[str, float] | str]:
    """Every kind once: of a machine that is fast and slow by turns, rounds show each kind its best minutes."""
    found = {}
    for kind in arguments.kinds:
        print(f"  round {number + 1} of {arguments.rounds}: {kind}", file=sys.stderr, flush=True)
        found[kind] = refusal(kind, *size) or in_fresh_process(arguments, kind, *size)
    return found


def fastest(found: list[dict[str, float] | str]) -> dict[str, float] | str:
    """The round of least time, with the most memory of any."""
    measured = [each for each in found if not isinstance(each, str)]
    if not measured:
        return found[0]
    most = {name: max(each[name] for each in measured) for name in ("peak", "beyond") if name in measured[0]}
    return min(measured, key=lambda each: each["seconds"]) | most


if __name__ == "__main__":
    main()
