"""The checksum that compares the trainer's tensors with the engine's."""

from __future__ import annotations

import pytest
import torch

from megatron_ac2.engine.checksums import _factors, add, checksum

DTYPES = [torch.float32, torch.bfloat16]


def matrix(rows: int = 37, columns: int = 19, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(0)).to(dtype)


def test_matches_its_definition():
    tensor = torch.tensor([[1.0, -2.0], [0.5, 0.0]])
    bits = [[0x3F800000, 0xC0000000 - 2**32], [0x3F000000, 0]]
    rows, columns = _factors(0, 2, 1, tensor.device).tolist(), _factors(0, 2, 2, tensor.device).tolist()
    expected = sum(bits[n][k] * rows[n] * columns[k] for n in range(2) for k in range(2)) % 2**64
    assert checksum(tensor) == expected


@pytest.mark.parametrize("dtype", DTYPES)
def test_adds_up_over_blocks_of_columns(dtype):
    tensor = matrix(dtype=dtype)
    assert add(checksum(tensor[:, :7]), checksum(tensor[:, 7:], 7)) == checksum(tensor)
    assert checksum(tensor.t().contiguous().t()) == checksum(tensor)


def test_does_not_depend_on_the_block_size(monkeypatch):
    tensor = matrix()
    whole = checksum(tensor)
    monkeypatch.setattr("megatron_ac2.engine.checksums._BLOCK", 40)
    assert checksum(tensor) == whole


@pytest.mark.parametrize("dtype", DTYPES)
def test_any_single_bit_changes_it(dtype):
    tensor = matrix(6, 5, dtype)
    original = checksum(tensor)
    integers = torch.int32 if dtype == torch.float32 else torch.int16
    for position in range(tensor.numel()):
        changed = tensor.clone()
        changed.view(integers).view(-1)[position] ^= 1
        assert checksum(changed) != original


def test_swaps_change_it():
    tensor = matrix()
    assert checksum(tensor.flip(0)) != checksum(tensor)
    assert checksum(tensor.flip(1)) != checksum(tensor)
    square = matrix(8, 8)
    assert checksum(square.t()) != checksum(square)


@pytest.mark.parametrize("dtype", DTYPES)
def test_signed_zero_and_subnormals_count_as_zero(dtype):
    zero = torch.zeros(3, 2, dtype=dtype)
    small = torch.full((3, 2), torch.finfo(dtype).tiny / 4, dtype=dtype)
    assert checksum(-zero) == checksum(small) == checksum(zero) == 0


def test_one_dimension_is_one_column():
    vector = matrix(9, 1)[:, 0]
    assert checksum(vector) == checksum(vector[:, None])


def test_other_dtypes_are_refused():
    with pytest.raises(TypeError, match="float64"):
        checksum(torch.zeros(2, dtype=torch.float64))
