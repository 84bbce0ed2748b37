"""Every random draw is keyed by (seed, purpose, step, slot): with no global generator, a resumed run draws alike."""

from __future__ import annotations

import zlib

import numpy as np


def stream(seed: int, purpose: str, step: int, slot: int = 0) -> np.random.Generator:
    """A generator of its own for one purpose at one step; equal keys give equal draws on every rank."""
    return np.random.default_rng([seed, zlib.crc32(purpose.encode()), step, slot])


def request_seed(seed: int, purpose: str, step: int, slot: int) -> int:
    """A non-negative 31-bit seed for one engine request."""
    return int(stream(seed, purpose, step, slot).integers(0, 2**31 - 1))
