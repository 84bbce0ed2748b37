"""Products by oneDNN against float64, in every form that the fused loss asks for, and when it is asked."""

from __future__ import annotations

import pytest
import torch

from megatron_ac2.kernels import onednn_products

LARGE = torch.empty(1024, 1024)  # the weight; 64 rows by it are just enough

can = pytest.mark.skipif(not onednn_products.suits(64, LARGE), reason="needs oneDNN and AVX-512")


@can
@pytest.mark.parametrize("rows,inner,columns", [(1, 1, 1), (7, 33, 5), (64, 128, 96), (129, 1000, 63)])
@pytest.mark.parametrize("left_turned", [False, True])
@pytest.mark.parametrize("right_turned", [False, True])
@pytest.mark.parametrize("with_bias", [False, True])
def test_equals_float64(rows, inner, columns, left_turned, right_turned, with_bias):
    generator = torch.Generator().manual_seed(rows)

    def matrix(height, width, is_turned):
        shape = (width, height) if is_turned else (height, width)
        found = torch.randn(shape, generator=generator)
        return found.t() if is_turned else found

    left, right = matrix(rows, inner, left_turned), matrix(inner, columns, right_turned)
    bias = torch.randn(columns, generator=generator) if with_bias else None
    exact = left.double() @ right.double() + (bias.double() if with_bias else 0.0)
    found = onednn_products.product(left, right, bias)
    assert found.dtype == torch.float32 and found.shape == (rows, columns)
    # The sums are of size inner^0.5; factors rounded to bf16 on the way would leave an error of 3e-3.
    assert ((found - exact).abs() / (inner**0.5 + 1)).max() < 1e-5


@can
def test_takes_large_products_of_fp32_on_a_cpu_alone(monkeypatch):
    assert not onednn_products.suits(63, LARGE)
    assert not onednn_products.suits(64, LARGE.bfloat16())
    assert not onednn_products.suits(64, LARGE.double())
    assert not onednn_products.suits(64, LARGE.to("meta"))
    with monkeypatch.context() as patch:
        patch.setattr(torch.backends.mkldnn, "enabled", False)
        assert not onednn_products.suits(64, LARGE)
    monkeypatch.setattr(torch.cpu, "_is_avx512_supported", lambda: False)
    assert not onednn_products.suits(64, LARGE)
