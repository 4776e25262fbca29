"""The packed linear layer equals the plain one, for every format, with and without bias, for any number of rows."""

import subprocess
import sys

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


MANY_LENGTHS = """
import os, torch
from kvmesh.model.linear import Linear

def resident():
    with open("/proc/self/statm") as pages:
        return int(pages.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

layers = [Linear(torch.zeros(rows, 576)) for rows in (960, 1024, 1536)]
x = torch.zeros(320, 576)
for length in range(1, 320):
    if length == 64:
        before = resident()
    for layer in layers:
        layer(x[:length])
print(resident() - before)
"""
"""Prints by how many bytes a process grows with inputs of lengths it has not met before."""


def test_inputs_of_ever_new_lengths_do_not_fill_the_memory() -> None:
    done = subprocess.run([sys.executable, "-c", MANY_LENGTHS], capture_output=True, text=True, timeout=60, check=True)
    assert int(done.stdout) < 256 << 20
