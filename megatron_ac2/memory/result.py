"""What a memory plan says: what lies on a GPU of each pipeline stage, what each phase adds, and which cards hold it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from megatron_ac2.memory.engine import EngineMemory
from megatron_ac2.perf import GIB

Basis = Literal["counted", "derived", "estimated", "assumed"]
# What a driver leaves to programs of cards sold as 80, 141 and 192 GB (H100, H200, B200).
CARDS = {"80 GB": int(79.1 * GIB), "141 GB": int(139.8 * GIB), "192 GB": int(178.3 * GIB)}


@dataclass(frozen=True, slots=True)
class Item:
    name: str
    num_bytes: int
    basis: Basis


@dataclass(frozen=True, slots=True)
class Stage:
    """One GPU of a pipeline stage, the fullest of its data ranks. `phases`: what each needs beside `resident`."""

    index: int
    resident: tuple[Item, ...]
    phases: Mapping[str, tuple[Item, ...]]

    @property
    def resident_bytes(self) -> int:
        return total(self.resident)

    @property
    def state_bytes(self) -> int:
        """Weights, gradients and optimizer states."""
        return sum(item.num_bytes for item in self.resident if item.basis == "counted")

    @property
    def worst_phase(self) -> str:
        return max(self.phases, key=lambda name: total(self.phases[name]))

    @property
    def peak_bytes(self) -> int:
        """Of the trainer, without the engine."""
        return self.resident_bytes + total(self.phases[self.worst_phase])

    def bytes_beside_engine(self, offload: str) -> int:
        """What of `resident` stays on the device while the engine runs, by run.offload."""
        return total([item for item in self.resident if _stays(item, offload)])


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    stages: tuple[Stage, ...]
    engine: EngineMemory
    utilization: float  # of a card, that the engine may use
    offload: str  # none: the engine keeps its memory while the trainer works; else the two take turns
    longest: int  # tokens of the longest request, without its prompt
    notes: tuple[str, ...]

    @property
    def worst(self) -> Stage:
        return max(self.stages, key=lambda stage: stage.peak_bytes)

    def engine_bytes(self, card: int) -> int:
        return int(card * self.utilization)

    def spare(self, card: int) -> int:
        """Bytes left on a card at the worst moment of the worst stage; below 0: missing."""
        if self.offload == "none":
            return card - self.worst.peak_bytes - self.engine_bytes(card)
        beside = max(stage.bytes_beside_engine(self.offload) for stage in self.stages)
        return card - max(self.worst.peak_bytes, beside + self.engine_bytes(card))

    def cached_tokens(self, card: int) -> int:
        return self.engine.cached_tokens(self.engine_bytes(card))

    def problem(self, card: int) -> str | None:
        """Why the plan does not fit on a card; None if it does."""
        if self.spare(card) < 0:
            return "memory"
        return "cache" if self.cached_tokens(card) < self.longest else None


def _stays(item: Item, offload: str) -> bool:
    """Weights are there until run.offload is all; what is not counted is nobody's to move."""
    return offload == "none" or item.basis != "counted" or (offload == "optimizer" and item.name.endswith(": weights"))


def as_dict(plan: MemoryPlan) -> dict[str, Any]:
    """For --json: bytes."""
    return {
        "stages": [
            {
                "stage": stage.index,
                "resident": [asdict(item) for item in stage.resident],
                "phases": {name: [asdict(item) for item in items] for name, items in stage.phases.items()},
                "peak_bytes": stage.peak_bytes,
                "peak_phase": stage.worst_phase,
            }
            for stage in plan.stages
        ],
        "worst_stage": plan.worst.index,
        "engine": asdict(plan.engine),
        "gpu_memory_utilization": plan.utilization,
        "cards": {
            name: {
                "bytes": card, "spare_bytes": plan.spare(card), "cached_tokens": plan.cached_tokens(card),
                "fits": plan.problem(card) is None,
            }
            for name, card in CARDS.items()
        },
        "notes": list(plan.notes),
    }  # fmt: skip


def total(items: Iterable[Item]) -> int:
    return sum(item.num_bytes for item in items)
