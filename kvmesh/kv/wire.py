"""Numbers of KV from the format of one memory into that of a frame, and from a frame into that of another memory.

Called by the pool where the two differ. Casts round to nearest; into fp16 what is out of its range becomes ±65504, also
the infinities. Two formats are quantised: each block of tokens of each head (K and V apart) has one scale, symmetric, from
the largest magnitude m in it:

    int8  scale = m / 127; a value is off by at most m / 254
    fp8   scale = m / 448, values in e4m3; a value x is off by at most max(|x| / 16, m / 448 / 1024)

and in both by one rounding of the formats of either memory. A block of zeros arrives as zeros, and so does one whose m is
below 2^-119 (int8: its scale would not be a normal number). A block that holds a NaN or an infinity arrives as NaN whole: what
was no number must not arrive as one. Knows no page, no room and no header.
"""

import ctypes
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from kvmesh.kv.layout import SCALE_BYTES, DTypeName, WireName, is_dtype

TORCH_DTYPES: dict[DTypeName, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

LARGEST: dict[WireName, float] = {"int8": 127.0, "fp8": 448.0}
"""The largest magnitude of a quantised number; the scale maps a block's own largest to it."""
SMALLEST_BLOCK = 2.0**-119
"""A block whose largest magnitude is below it is a block of zeros."""
FP16_LARGEST = 65504.0
PART = 1 << 14
"""Numbers that one call of torch gets: below 32,768 it starts no threads, which the model's own would have to share."""


def encode(values: Tensor, wire: WireName, into: memoryview, block_tokens: int) -> None:
    """Write `values` to `into` as a payload.

    Args:
        values: [L, 2, H, T, D] without gaps, on the CPU.
        into: exactly the payload.
        block_tokens: tokens that share a scale, where `wire` is quantised.
    """
    if is_dtype(wire):
        _cast(values.view(-1), torch.frombuffer(into, dtype=TORCH_DTYPES[wire]))
        return
    for part, scales, numbers in _blocks(values, into, block_tokens):
        _quantise(part, scales, numbers, wire)


def decode(
    payload: memoryview, wire: WireName, shape: tuple[int, int, int, int, int], block_tokens: int, dtype: DTypeName
) -> Tensor:
    """The numbers of a payload as a tensor of `shape` in `dtype`, on the CPU.

    Args:
        payload: may be read-only; it is not kept.
        shape: [L, 2, H, T, D].
    """
    out = torch.empty(shape, dtype=TORCH_DTYPES[dtype])
    if is_dtype(wire):
        _cast(torch.frombuffer(readable(payload), dtype=TORCH_DTYPES[wire]), out.view(-1))
        return out
    for part, scales, numbers in _blocks(out, readable(payload), block_tokens):
        _restore(numbers, scales, part, wire)
    return out


def _blocks(values: Tensor, payload: memoryview, block_tokens: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Values [n, numbers of a block] as views, n blocks at once, each with its scales [n, 1] and its bytes in the payload."""
    rows, width = values.flatten(0, 2).flatten(1), block_tokens * values.shape[4]
    num_blocks = -(-rows.shape[1] // width)
    scale_bytes = len(rows) * num_blocks * SCALE_BYTES
    scales = torch.frombuffer(payload, dtype=torch.float32, count=len(rows) * num_blocks).view(len(rows), num_blocks, 1)
    numbers = torch.frombuffer(payload, dtype=torch.int8, offset=scale_bytes).view(rows.shape)
    whole, step = rows.shape[1] // width, max(1, PART // width)
    for row, row_scales, row_numbers in zip(rows, scales, numbers, strict=True):
        for block in range(0, whole, step):
            count = min(step, whole - block)
            taken = slice(block * width, (block + count) * width)
            yield (
                row[taken].view(count, width),
                row_scales[block : block + count],
                row_numbers[taken].view(count, width),
            )
        if whole < num_blocks:  # the last one is shorter
            yield row[None, whole * width :], row_scales[whole:], row_numbers[None, whole * width :]


def _quantise(values: Tensor, scales: Tensor, numbers: Tensor, wire: WireName) -> None:
    exact = values.float()
    largest = exact.abs().amax(1, keepdim=True)
    sound = largest <= torch.finfo(torch.float32).max  # no NaN, no infinity
    if not bool(sound.all()):
        exact = torch.where(sound, exact, 0.0)
    used = largest >= SMALLEST_BLOCK
    scales.copy_(torch.where(used, largest / LARGEST[wire], 0.0))
    scaled = exact / torch.where(used & sound, scales, torch.inf)
    scales.masked_fill_(~sound, torch.nan)
    if wire == "int8":
        numbers.copy_(scaled.round_())
    else:
        numbers.view(torch.float8_e4m3fn).copy_(scaled)


def _restore(numbers: Tensor, scales: Tensor, values: Tensor, wire: WireName) -> None:
    if wire == "int8":
        restored = numbers.float() * scales
    else:
        # torch's own cast from e4m3 is slow (a twentieth). Its bits are those of an fp16 that is 2^8 times smaller, with
        # the exponent's highest bit left out.
        bits = numbers.to(torch.int16)
        restored = (bits << 7 & 0x3F80 | bits & -0x8000).view(torch.float16).float() * (scales * 256.0)
    _cast_part(restored, values)


def _cast(source: Tensor, target: Tensor) -> None:
    for given, taken in zip(torch.split(source, PART), torch.split(target, PART), strict=True):
        _cast_part(given, taken)


def _cast_part(source: Tensor, target: Tensor) -> None:
    if target.dtype is torch.float16 and source.dtype is not torch.float16:
        source = source.clamp(-FP16_LARGEST, FP16_LARGEST)
    target.copy_(source)


def readable(payload: memoryview) -> memoryview:
    """The same bytes as torch takes them: it warns of memory that it may not write. Valid while the payload is; read only."""
    if not payload.readonly:
        return payload
    address = np.frombuffer(payload, dtype=np.uint8).ctypes.data
    return memoryview((ctypes.c_char * len(payload)).from_address(address)).cast("B")
