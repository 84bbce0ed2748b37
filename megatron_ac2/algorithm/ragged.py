"""Many token sequences as two flat arrays, so that a checkpoint holds a few arrays and not thousands."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatron_ac2.types import EMPTY_IDS


def join_ids(sequences: Sequence[np.ndarray]) -> dict[str, np.ndarray]:
    """Sequences int32[L_i] -> {"ids": int32[sum L_i], "lengths": int64[n]}."""
    lengths = np.array([len(ids) for ids in sequences], dtype=np.int64)
    return {"ids": np.concatenate([EMPTY_IDS, *sequences]).astype(np.int32), "lengths": lengths}


def split_ids(joined: dict[str, np.ndarray]) -> list[np.ndarray]:
    """The inverse of `join_ids`. Raises ValueError when the lengths do not add up: a damaged state."""
    ids = np.asarray(joined["ids"], dtype=np.int32)
    ends = np.cumsum(np.asarray(joined["lengths"], dtype=np.int64))
    total = int(ends[-1]) if len(ends) else 0
    if total != len(ids):
        raise ValueError(f"token ids: {len(ids)} stored, but their lengths add up to {total}")
    return [part.copy() for part in np.split(ids, ends[:-1])] if len(ends) else []
