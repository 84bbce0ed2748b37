"""The memory that a process holds at the most while something runs."""

from __future__ import annotations

import threading

import psutil

GIB = 1 << 30


def resident_bytes() -> int:
    return psutil.Process().memory_info().rss


class PeakMemory:
    """The process's largest resident memory inside a `with` block, sampled every 5 ms: `peak`, in bytes."""

    def __enter__(self) -> PeakMemory:
        self.peak, self._done = resident_bytes(), threading.Event()
        self._thread = threading.Thread(target=self._sample)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._done.wait(0.005):
            self.peak = max(self.peak, resident_bytes())
