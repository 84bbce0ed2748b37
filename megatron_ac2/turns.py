"""Trainer and engine take turns on the device (run.offload): while one works, the other keeps out of the way.

With `none` both stay, and nothing here does anything. Else the engine sleeps while the trainer computes, and what
run.offload names of the trainer waits in host memory while the engine runs. On CPU the engine cannot sleep; the
trainer's part is moved there too.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from megatron_ac2.engine.engine import ColocatedEngine
from megatron_ac2.training.offload import Offload


class Turns:
    """Every method is a collective and may be called whoever's turn it is."""

    def __init__(self, offload: Offload, engine: ColocatedEngine):
        self._offload = offload
        self._engine = engine

    def train(self, publish_follows: bool = False) -> None:
        """The trainer's turn. Where new weights are published before the engine runs again, it keeps none of its own:
        only `publishing` may then end the turn."""
        if self._offload.is_on:
            self._engine.sleep(level=2 if publish_follows else 1)
            self._offload.come_back()

    def generate(self) -> None:
        """The engine's turn, with the weights that it has."""
        if self._offload.is_on:
            self._offload.leave()
            self._engine.wake()

    @contextmanager
    def visiting(self) -> Iterator[None]:
        """The trainer's turn, inside of the engine's."""
        self.train()
        try:
            yield
        finally:
            self.generate()

    def before_publish(self) -> None:
        """All that the weights on their way to the engine do not need leaves the device."""
        if self._offload.is_on:
            self._offload.leave(but=("actor",))

    def after_publish(self) -> None:
        """The engine has the weights, and takes memory for its KV cache next."""
        if self._offload.is_on:
            self._offload.leave()
