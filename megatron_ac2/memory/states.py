"""Bytes of weights, gradients and optimizer states on a rank: Megatron's buffers with their padding, to the byte.

Megatron's DDP lays a model's gradients (fp32) end to end in one buffer a parameter dtype, last parameter first. With
the distributed optimizer the weights lie in such a buffer too, parameters start at multiples of 64 numbers, buckets end
at multiples of 128 and of the data-parallel degree, and each data rank keeps optimizer states for an equal range of
every bucket (megatron/core/distributed/param_and_grad_buffer.py). A shared embedding has a bucket to itself. Experts
have buffers of their own, over the ranks that hold the same ones.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields

import torch

from megatron_ac2.memory.shapes import Parameter

_PARAMETER_ALIGNMENT = 64
_BUCKET_ALIGNMENT = 128
_FP32 = 4


@dataclass(frozen=True, slots=True)
class States:
    """Bytes on one rank. `moments` is one Adam's two; `master` the fp32 copy of half-precision weights."""

    weights: int = 0
    gradients: int = 0
    master: int = 0
    moments: int = 0

    def __add__(self, other: States) -> States:
        return States(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(States)))


@dataclass(frozen=True, slots=True)
class Bucket:
    """Numbers [start, end) of each parameter in it, and the bucket's length with its padding."""

    ranges: tuple[tuple[int, int], ...]
    length: int


def model_states(
    chunks: Sequence[Sequence[Parameter]], num_ranks: int, distributed: bool, tensor: int = 1, expert_ranks: int = 1
) -> list[States]:
    """What each of a pipeline stage's `num_ranks` ranks holds of its models, trained.

    Blocks of `tensor` ranks hold a copy of the model, its experts left out; blocks of `expert_ranks` (expert degree
    times expert-tensor degree) a copy of all experts.
    """
    total = [States()] * num_ranks
    for parameters in chunks:
        for dtype, expert in dict.fromkeys((parameter.dtype, parameter.expert) for parameter in parameters):
            own = [p for p in parameters if (p.dtype, p.expert) == (dtype, expert)]
            block = expert_ranks if expert else tensor
            found = _buffer_states(own, dtype, num_ranks // block, distributed)
            total = [before + found[rank // block] for rank, before in enumerate(total)]
    return total


def weight_bytes(parameters: Iterable[Parameter]) -> int:
    """Of a model that is not trained: no buffers, no padding."""
    return sum(parameter.numel * parameter.dtype.itemsize for parameter in parameters)


def _buffer_states(
    parameters: Sequence[Parameter], dtype: torch.dtype, data_ranks: int, distributed: bool
) -> list[States]:
    if not distributed:
        count = sum(parameter.numel for parameter in parameters)
        length, owned = count, [count] * data_ranks
    else:
        buckets = list(_buckets(parameters, data_ranks))
        length = sum(bucket.length for bucket in buckets)
        owned = [sum(counts) for counts in zip(*(_owned(bucket, data_ranks) for bucket in buckets), strict=True)]
    has_master = dtype != torch.float32
    return [
        States(length * dtype.itemsize, length * _FP32, count * _FP32 * has_master, count * 2 * _FP32)
        for count in owned
    ]


def _buckets(parameters: Sequence[Parameter], data_ranks: int) -> Iterator[Bucket]:
    ranges: list[tuple[int, int]] = []
    end = 0

    def close() -> Bucket:
        return Bucket(tuple(ranges), _round_up(end, math.lcm(data_ranks, _BUCKET_ALIGNMENT)))

    for parameter in reversed(parameters):
        if parameter.shared_embedding and ranges:
            yield close()
            ranges, end = [], 0
        start = _round_up(end, _PARAMETER_ALIGNMENT)
        end = start + parameter.numel
        ranges.append((start, end))
        if parameter.shared_embedding:
            yield close()
            ranges, end = [], 0
    if ranges:
        yield close()


def _owned(bucket: Bucket, data_ranks: int) -> list[int]:
    """Numbers of parameters, padding left out, in each data rank's equal range of the bucket."""
    width = bucket.length // data_ranks
    counts = [0] * data_ranks
    for start, end in bucket.ranges:
        for rank in range(start // width, -(-end // width)):
            counts[rank] += min(end, (rank + 1) * width) - max(start, rank * width)
    return counts


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
