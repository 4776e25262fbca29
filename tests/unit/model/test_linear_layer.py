"""The packed linear layer equals the plain one, for every format, with and without bias, for any number of rows."""

import pytest
import torch
from torch.nn import functional

from kvmesh.model.linear import Linear


@pytest.mark.parametrize("rows", [1, 3, 8, 65])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.05), (torch.float16, 0.01)])
def test_it_equals_torch(dtype: torch.dtype, tolerance: float, has_bias: bool, rows: int) -> None:
    generator = torch.Generator().manual_seed(rows)
    weight = torch.randn(37, 24, generator=generator).to(dtype)
    bias = torch.randn(37, generator=generator).to(dtype) if has_bias else None
    x = torch.randn(rows, 24, generator=generator).to(dtype)
    y = Linear(weight, bias)(x)
    expected = functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
    assert y.dtype == dtype
    assert (y - expected).abs().max() < tolerance * expected.abs().max()
