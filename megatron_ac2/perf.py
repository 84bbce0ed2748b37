"""What a step costs: seconds by phase, tokens per second, decoding FLOPs, memory."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import psutil
import torch

from megatron_ac2.architecture import sparse_layers

GIB = 1024**3


@dataclass(frozen=True, slots=True)
class DecodingCost:
    """FLOPs of decoding (docs/ALGORITHM.md §5): `per_token` (A) for each token fed back into the model, and
    `per_attended` (B) for each pair of such a token and a position that it attends to.

    A = 2 [L (h n_q d + 2 h n_kv d + n_q d h + 3 h f) + h V], B = 4 L n_q d. In a layer of e experts of f' channels, of
    which each token takes k, 3 h f is k 3 h f' + h e: what it uses, and the router.
    """

    per_token: int
    per_attended: int

    @classmethod
    def of(cls, hf_config: Any) -> DecodingCost:
        """From a Hugging Face config of a decoder with grouped-query attention and gated feed-forwards or experts."""
        layers, hidden, num_heads = hf_config.num_hidden_layers, hf_config.hidden_size, hf_config.num_attention_heads
        head_dim = getattr(hf_config, "head_dim", None) or hidden // num_heads
        num_kv_heads = getattr(hf_config, "num_key_value_heads", None) or num_heads
        query = hidden * num_heads * head_dim
        key_and_value = 2 * hidden * num_kv_heads * head_dim
        output = num_heads * head_dim * hidden
        num_sparse = sum(sparse_layers(hf_config))
        feed_forward = (layers - num_sparse) * 3 * hidden * hf_config.intermediate_size
        if num_sparse:
            used = hf_config.num_experts_per_tok * 3 * hidden * hf_config.moe_intermediate_size
            feed_forward += num_sparse * (used + hidden * hf_config.num_experts)
        logits = hidden * hf_config.vocab_size
        return cls(
            per_token=2 * (layers * (query + key_and_value + output) + feed_forward + logits),
            per_attended=4 * layers * num_heads * head_dim,
        )

    def flops(self, num_context: int, num_new: int) -> int:
        """One request: `num_context` prompt and prefix tokens, `num_new` generated ones. Exact, in integers.

        F = A m + B (m p + m (m + 1) / 2) with m = max(n - 1, 0): the first new token comes out of the prefill, which
        does not count, and the i-th token fed back attends to p + i positions.
        """
        fed_back = max(num_new - 1, 0)
        attended = fed_back * num_context + fed_back * (fed_back + 1) // 2
        return self.per_token * fed_back + self.per_attended * attended

    def total(self, lengths: Iterable[tuple[int, int]]) -> int:
        """Sum over requests of (num_context, num_new): each request's own lengths, never means."""
        return sum(self.flops(int(num_context), int(num_new)) for num_context, num_new in lengths)


def gib(num_bytes: float) -> str:
    return f"{num_bytes / GIB:.1f} GiB" if num_bytes >= GIB else f"{num_bytes / GIB * 1024:.0f} MiB"


class PhaseTimer:
    """Seconds by phase of one step.

        timer = PhaseTimer(show=writer.phase)
        with timer.phase("sample"): ...
        writer.write(step, timer.metrics()); timer.reset()

    A phase entered twice adds up. Waits for the device at a phase's end, so that its time is its own.
    """

    def __init__(self, show: Callable[[str], AbstractContextManager] | None = None):
        self._show = show or (lambda name: nullcontext())
        self.reset()

    def reset(self) -> None:
        self._start = time.perf_counter()
        self.seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            with self._show(name):
                yield
                if torch.cuda.is_available():
                    torch.cuda.synchronize()
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

    def tokens_per_second(self, num_tokens: int, *phases: str) -> float:
        """Over the seconds of these phases together; nan if none of them ran."""
        seconds = sum(self.seconds.get(phase, 0.0) for phase in phases)
        return num_tokens / seconds if seconds > 0 else math.nan

    def metrics(self) -> dict[str, float]:
        """`time/<phase>` for each phase since the reset, and `time/step` for the whole time since then."""
        return {f"time/{name}": value for name, value in self.seconds.items()} | {
            "time/step": time.perf_counter() - self._start
        }


def memory_metrics() -> dict[str, float]:
    """GiB in use: of this rank's device, by all of its processes, where there is CUDA; else of this process."""
    if not torch.cuda.is_available():
        return {"perf/process_memory_gib": psutil.Process().memory_info().rss / GIB}
    used, total = device_memory(torch.cuda.current_device())
    return {
        "perf/device_memory_gib": used / GIB,
        "perf/device_memory_share": used / total,
        "perf/trainer_peak_memory_gib": torch.cuda.max_memory_allocated() / GIB,
    }


def device_memory(index: int) -> tuple[int, int]:
    """(used, total) bytes of a CUDA device by NVML, which unlike torch also sees the engine's own allocations."""
    import pynvml

    pynvml.nvmlInit()
    try:
        # By UUID: NVML does not follow CUDA_VISIBLE_DEVICES.
        handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(index).uuid}")
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
    finally:
        pynvml.nvmlShutdown()
    return int(memory.used), int(memory.total)
