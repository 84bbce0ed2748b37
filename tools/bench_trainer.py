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
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_ac2.config_training import OptimizerConfig, ParallelConfig  # noqa: E402
from megatron_ac2.data.packing import pack, plan_microbatches  # noqa: E402
from megatron_ac2.model.build import build_model, load_hf_config  # noqa: E402
from megatron_ac2.model.data_parallel import wrap_ddp  # noqa: E402
from megatron_ac2.model.hf_weights import load_hf_weights  # noqa: E402
from megatron_ac2.parallel.topology import init_topology, shutdown  # noqa: E402
from megatron_ac2.training import step  # noqa: E402
from megatron_ac2.training.optimizer import build_optimizer  # noqa: E402
from megatron_ac2.training.token_head import TokenHead, loss_rows, negative_log_likelihood  # noqa: E402

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
VOCAB = 49_152
# hidden, layers, feed-forward, heads, key-value heads; the embedding is tied
SIZES = {"17M": (256, 6, 768, 4, 2), "60M": (512, 12, 1536, 8, 4), "135M": (576, 30, 1536, 9, 3)}
CASES = {1: ("ours", "hf padded", "hf packed"), 2: ("ours dp2", "ours tp2", "hf padded dp2", "hf packed dp2")}
GIB = 1 << 30
_CLIP = 1.0


def hf_config(size: str) -> LlamaConfig:
    hidden, layers, ffn, heads, groups = SIZES[size]
    return LlamaConfig(
        vocab_size=VOCAB, hidden_size=hidden, num_hidden_layers=layers, intermediate_size=ffn,
        num_attention_heads=heads, num_key_value_heads=groups, head_dim=hidden // heads, tie_word_embeddings=True,
        max_position_embeddings=8192, rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
    )  # fmt: skip


def sequences(num_tokens: int) -> list[np.ndarray]:
    """Ragged, as an engine's chunks are: lengths between a sixteenth and a quarter of a step's tokens."""
    rng, found, left = np.random.default_rng(0), [], num_tokens
    while left > 0:
        length = min(left, int(rng.integers(num_tokens // 16, num_tokens // 4)))
        length = length if left - length >= num_tokens // 16 else left
        found.append(rng.integers(0, VOCAB, length))
        left -= length
    return found


class Ours:
    def __init__(self, folder: Path, dtype: torch.dtype, parallel: ParallelConfig, tokens: int):
        self.topology = init_topology(parallel, seed=0)
        config = load_hf_config(folder)
        self.model = wrap_ddp(build_model(config, self.topology, parallel, dtype, "hidden"), distributed_optimizer=True)
        load_hf_weights(self.model, config, self.topology, folder)
        self.head = TokenHead(self.model, self.topology, VOCAB, temperature=1.0)
        self.optimizer = build_optimizer(self.model, OptimizerConfig(lr=1e-5, grad_clip=_CLIP), dtype)
        own = share(sequences(tokens), self.topology.data_rank, self.topology.data)
        self.batch = pack(own, {}, [1] * len(own), step.token_alignment(self.topology), pad_id=0)

    def step(self) -> float:
        metrics = step.forward_backward(self.model, [self.batch], self.loss, self.topology)
        step.apply_step(self.optimizer, metrics)
        return metrics["loss"]

    def loss(self, output: torch.Tensor, batch: Any) -> step.Loss:
        rows = loss_rows(batch.loss_mask)
        found = self.head.loss(output, batch, rows, negative_log_likelihood(torch.ones(len(rows))))
        return found.loss, torch.tensor(len(rows)), {}


class HuggingFace:
    def __init__(self, folder: Path, dtype: torch.dtype, packed: bool, ranks: int, tokens: int):
        if ranks > 1:
            dist.init_process_group("gloo")
        rank = dist.get_rank() if ranks > 1 else 0
        self.ranks, everything = ranks, sequences(tokens)
        self.bare = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa")
        self.bare.train()
        self.model = torch.nn.parallel.DistributedDataParallel(self.bare) if ranks > 1 else self.bare
        self.optimizer = torch.optim.AdamW(self.bare.parameters(), lr=1e-5, weight_decay=0.0, fused=True)
        own = share(everything, rank, ranks)
        self.inputs = packed_inputs(own) if packed else padded_inputs(own)
        self.num_items = sum(len(ids) - 1 for ids in everything)

    def step(self) -> float:
        self.optimizer.zero_grad(set_to_none=True)
        # DDP averages over ranks what this loss has divided by the tokens of all of them.
        items = self.num_items / self.ranks
        loss = self.model(**self.inputs, use_cache=False, num_items_in_batch=items).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.bare.parameters(), _CLIP)
        self.optimizer.step()
        total = loss.detach().float()
        if self.ranks > 1:
            dist.all_reduce(total)
        return total.item() / self.ranks


def share(everything: list[np.ndarray], rank: int, ranks: int) -> list[np.ndarray]:
    plan = plan_microbatches([len(ids) for ids in everything], ranks, 1 << 30)
    return [everything[index] for index in plan[rank][0]]


def padded_inputs(own: list[np.ndarray]) -> dict[str, torch.Tensor]:
    longest = max(map(len, own))
    ids, mask = torch.zeros(len(own), longest, dtype=torch.long), torch.zeros(len(own), longest, dtype=torch.long)
    for row, sequence in enumerate(own):
        ids[row, : len(sequence)] = torch.from_numpy(sequence)
        mask[row, : len(sequence)] = 1
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def packed_inputs(own: list[np.ndarray]) -> dict[str, torch.Tensor]:
    ids = torch.from_numpy(np.concatenate(own))[None]
    positions = torch.cat([torch.arange(len(sequence)) for sequence in own])[None]
    return {"input_ids": ids, "position_ids": positions, "labels": ids.masked_fill(positions == 0, -100)}


def build_case(case: str, folder: Path, dtype: torch.dtype, tokens: int) -> Ours | HuggingFace:
    words = case.split()
    if words[0] == "hf":
        return HuggingFace(folder, dtype, words[1] == "packed", 2 if words[-1] == "dp2" else 1, tokens)
    return Ours(folder, dtype, ParallelConfig(tensor=2 if words[-1] == "tp2" else 1), tokens)


def run_case(case: str, folder: Path, dtype: str, arguments: argparse.Namespace) -> dict[str, float]:
    base = psutil.Process().memory_info().rss
    trainee = build_case(case, folder, DTYPES[dtype], arguments.tokens)
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


class PeakMemory:
    """The process's largest resident memory inside a `with` block, sampled."""

    def __enter__(self) -> PeakMemory:
        self.peak, self._done = psutil.Process().memory_info().rss, threading.Event()
        self._thread = threading.Thread(target=self._sample)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _sample(self) -> None:
        process = psutil.Process()
        while not self._done.wait(0.01):
            self.peak = max(self.peak, process.memory_info().rss)


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
