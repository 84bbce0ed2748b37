"""The fused policy loss on one GPU: checked at small sizes against materialised logits in float64, then timed.

usage: bench_chunk_loss_gpu.py [--tokens 4096 16384] [--hidden 2560] [--kinds ...] [--minutes 5] [--blocks]

naive     logits materialised, torch's log_softmax in fp32
tiled     kernels/chunk_loss.py with torch's operators
compiled  the same, with the passes over its tiles under torch.compile
liger     LigerFusedLinearGRPOLoss, where liger-kernel is installed; one advantage a sequence of 1024
triton    kernels/chunk_loss_triton.py; +entropy: an entropy bonus, +centering: 32 recorded tokens a position
gemms     the three matrix products alone, in the tiles' shapes: what any loss of this kind takes at least

Forward and backward in bf16. TFLOP/s counts the three products, 6 T V H, whatever a kind computes besides. Peak: memory
above the inputs and d(hidden), d(weight) in bf16. --blocks times the Triton product in other blocks, for a new chip.
--device cpu under TRITON_INTERPRET=1 is a dry run, and its numbers mean nothing.
"""

from __future__ import annotations

import argparse
import gc
import math
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_ac2.kernels.chunk_loss_backend import default_tile_bytes  # noqa: E402
from megatron_ac2.kernels.chunk_loss_tiled import VocabTile  # noqa: E402
from megatron_ac2.kernels.chunk_loss_walk import tile_rows  # noqa: E402
from tools.chunk_loss_inputs import Case  # noqa: E402

KINDS = ("gemms", "triton", "triton +entropy", "triton +centering", "tiled", "compiled", "naive", "liger")
GIB = 1 << 30
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
CHECKED = {"cuda": (300, 5000, 200), "cpu": (6, 70, 40)}  # T, V, H
BLOCKS = ((128, 256, 64, 8, 3), (128, 256, 64, 8, 4), (128, 128, 64, 8, 4), (128, 128, 64, 4, 3), (256, 128, 64, 8, 3))


def check(device: str) -> bool:
    """Loss and gradients of every fused kind against float64, in several tiles."""
    shape = CHECKED[device]
    print(f"T, V, H = {shape}: relative error against float64", flush=True)
    passed = True
    for dtype, tolerance in TOLERANCE.items():
        for kind in ("tiled", "triton", "triton +entropy", "triton +centering"):
            case = Case(kind, shape, dtype, device)
            loss = case.fused(tile_bytes=shape[0] // 3 * (case.vocab + 1) * dtype.itemsize)
            loss.backward()
            hidden, weight = (x.detach().double().requires_grad_() for x in (case.hidden, case.weight))
            exact = case.naive(hidden, weight)
            exact.backward()
            pairs = ((loss, exact), (case.hidden.grad, hidden.grad), (case.weight.grad, weight.grad))
            errors = [((a.double() - b).norm() / b.norm()).item() for a, b in pairs]
            # The loss is a sum of terms of both signs: of torch's bf16 logits there is little left.
            wrong = not all(error < tolerance for error in errors[1:] + errors[: case.backend == "triton"])
            passed &= not wrong
            name = str(dtype).removeprefix("torch.")
            print(
                f"  {name:9s}{kind:18s} loss {errors[0]:.1e}  d(hidden) {errors[1]:.1e}  d(weight) {errors[2]:.1e}"
                + ("  TOO LARGE" if wrong else ""),
                flush=True,
            )
    return passed


def seconds_of(function: Callable[[], object], repeats: int, device: str) -> float:
    """The best of `repeats`, after one that compiles and warms up."""
    best = math.inf
    for attempt in range(repeats + 1):
        synchronize(device)
        start = time.perf_counter()
        function()
        synchronize(device)
        if attempt:
            best = min(best, time.perf_counter() - start)
    return best


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def gemm_seconds(case: Case, repeats: int, device: str) -> float:
    rows = min(case.tokens, tile_rows(case.vocab, case.weight.dtype, default_tile_bytes(case.weight.device)))
    hidden, weight = case.hidden.detach()[:rows], case.weight.detach()
    logits, to_hidden, to_weight = hidden @ weight.t(), torch.empty_like(hidden), torch.empty_like(weight)

    def products() -> None:
        torch.mm(hidden, weight.t(), out=logits)
        torch.mm(logits, weight, out=to_hidden)
        torch.mm(logits.t(), hidden, out=to_weight)

    return seconds_of(products, repeats, device) * case.tokens / rows


def measure(kind: str, shape: tuple[int, int, int], repeats: int, device: str) -> str:
    """A line of the table."""
    case = Case(kind, shape, torch.bfloat16, device)
    function = case.function(kind)

    def step() -> None:
        case.hidden.grad = case.weight.grad = None
        function().backward()

    peak = math.nan
    if kind == "gemms":
        seconds = gemm_seconds(case, repeats, device)
    else:
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            base = torch.cuda.memory_allocated() + 2 * (case.weight.numel() + case.hidden.numel())
        seconds = seconds_of(step, repeats, device)
        if device == "cuda":
            peak = (torch.cuda.max_memory_allocated() - base) / GIB
    rate = 6 * math.prod(shape) / seconds / 1e12
    return f"{1e3 * seconds:9.1f} ms {rate:7.1f} TFLOP/s" + ("" if math.isnan(peak) else f" {peak:8.2f} GiB")


def attempt(kind: str, shape: tuple[int, int, int], repeats: int, device: str) -> str:
    """`measure`, or why there is no number."""
    if kind == "liger" and find_spec("liger_kernel") is None:
        return "not installed"
    plain = VocabTile._exponentiate, VocabTile._entropy_gradient
    if kind == "compiled":
        VocabTile._exponentiate, VocabTile._entropy_gradient = (torch.compile(x, dynamic=False) for x in plain)
    try:
        return measure(kind, shape, repeats, device)
    except torch.OutOfMemoryError:
        return "out of memory"
    except Exception as error:  # of a compiler or of another's library: the other kinds still count
        return f"failed: {type(error).__name__}: {str(error).splitlines()[0][:80] if str(error) else ''}"
    finally:
        VocabTile._exponentiate, VocabTile._entropy_gradient = plain


def sweep_blocks(shape: tuple[int, int, int], repeats: int, device: str) -> None:
    from megatron_ac2.kernels.chunk_loss_triton import Blocks, TritonTile

    case = Case("triton", shape, torch.bfloat16, device)
    rows = min(case.tokens, tile_rows(case.vocab, torch.bfloat16, default_tile_bytes(case.weight.device)))
    hidden, weight = case.hidden.detach()[:rows], case.weight.detach()
    for numbers in BLOCKS:
        tile = TritonTile(weight, case.vocab, 1.0, rows, Blocks(*numbers))
        try:
            seconds = seconds_of(lambda: tile.refill(hidden, case.proximal[:rows]), repeats, device)  # noqa: B023
        except Exception as error:  # too large for the chip
            print(f"  {numbers}: {type(error).__name__}: {str(error).splitlines()[0][:80]}", flush=True)
            continue
        rate = 2 * rows * case.vocab * shape[2] / seconds / 1e12
        print(f"  tokens, vocabulary, hidden, warps, stages {numbers}: {rate:7.1f} TFLOP/s", flush=True)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096, 16384])
    parser.add_argument("--hidden", type=int, default=2560)
    parser.add_argument("--vocab", type=int, default=151_936)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--repeats", type=int, default=3, help="the best of so many, after one that warms up")
    parser.add_argument("--minutes", type=float, default=5.0, help="no case is begun after 80 %% of these")
    parser.add_argument("--blocks", action="store_true", help="time the Triton product in several blocks too")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    return parser.parse_args()


def main() -> int:
    arguments = parse()
    start = time.monotonic()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        print("bench_chunk_loss_gpu.py needs a CUDA device, and torch sees none", file=sys.stderr)
        return 2
    if find_spec("triton") is None:
        print("bench_chunk_loss_gpu.py needs triton, which is not installed", file=sys.stderr)
        return 2
    name = torch.cuda.get_device_name() if arguments.device == "cuda" else "cpu, a dry run"
    print(f"{name}, torch {torch.__version__}", flush=True)
    passed = check(arguments.device)
    for tokens in arguments.tokens:
        shape = (tokens, arguments.vocab, arguments.hidden)
        print(f"T, V, H = {shape}, bf16, forward and backward", flush=True)
        for kind in arguments.kinds:
            late = time.monotonic() - start > 48 * arguments.minutes
            found = "no time left" if late else attempt(kind, shape, arguments.repeats, arguments.device)
            print(f"  {kind:18s} {found}", flush=True)
    if arguments.blocks:
        sweep_blocks((arguments.tokens[0], arguments.vocab, arguments.hidden), arguments.repeats, arguments.device)
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
