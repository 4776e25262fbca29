"""The KV memory of one process: pages of K and V for a range of layers, and the only code that copies in or out of it.

A stage's pool is its worker's alone; a decoder's two threads share one, and each page is one's at a time. A pool knows no room
and no allocator: it is told page ids. One tensor, [L, 2 (K, V), H, P * S, D]: slot = page * S + offset, so adjacent pages are
adjacent slots and a room in a contiguous run is read as a view, and a frame is one strided copy. What travels may be of another
format than the pool (`wire`): then the copy goes through a tensor of one frame, which stays in the cache.
"""

from collections.abc import Sequence
from math import prod
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvmesh.errors import BadConfig, Misfit
from kvmesh.kv.frames import HEADER_BYTES, FrameHeader, FrameKind, allocate, seal_into
from kvmesh.kv.host import HostPages, reserve
from kvmesh.kv.layout import (
    BLOCK_TOKENS,
    DTYPE_BYTES,
    DTypeName,
    Piece,
    Shard,
    WireName,
    is_quantised,
    payload_bytes,
    runs,
)
from kvmesh.kv.wire import TORCH_DTYPES, decode, encode, readable


class PagePool:
    """Pages for the KV of layers [begin, end). On the CPU pages that are never used take no memory."""

    def __init__(
        self,
        layers: tuple[int, int],
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        num_pages: int,
        dtype: DTypeName,
        device: str = "cpu",
    ) -> None:
        """Args:
        layers: global layer ids, half-open.
        page_size: tokens in a page.

        Raises:
            BadConfig: the device has no memory for so many pages.
        """
        self.shard = Shard(layers[0], layers[1], 0, num_kv_heads, head_dim, dtype)
        self.page_size = page_size
        self.num_pages = num_pages
        shape = (self.shard.num_layers, 2, num_kv_heads, num_pages * page_size, head_dim)
        self._copies: _Copies
        try:
            if torch.device(device).type == "cpu":
                memory = reserve(prod(shape) * DTYPE_BYTES[dtype])
                self.slots = torch.frombuffer(memory, dtype=TORCH_DTYPES[dtype]).view(shape)
                self._copies = HostPages(memory, shape[:3], page_size, head_dim * DTYPE_BYTES[dtype])
            else:
                # Not cleared: nobody reads a slot before its token was written.
                self.slots = torch.empty(shape, dtype=TORCH_DTYPES[dtype], device=device)
                self._copies = _DevicePages(self.slots, page_size)
        except (RuntimeError, OSError, OverflowError):
            size = num_pages * page_size * self.shard.bytes_per_token / 2**30
            raise BadConfig(f"no memory for {num_pages} pages of {page_size} tokens ({size:.1f} GiB)") from None

    def kv(self, layer: int) -> Tensor:
        """K and V of a global layer id, [2, H, P * S, D], a view."""
        return self.slots[layer - self.shard.layer_begin]

    def k(self, layer: int) -> Tensor:
        """Keys of a global layer id, [H, P * S, D], a view."""
        return self.kv(layer)[0]

    def v(self, layer: int) -> Tensor:
        """Values of a global layer id, [H, P * S, D], a view."""
        return self.kv(layer)[1]

    def frame_bytes(self, piece: Piece) -> int:
        """Length of the frame of a piece: header and payload."""
        heads, wire = self._sent(piece)
        layers, tokens = piece.layer_end - piece.layer_begin, piece.token_end - piece.token_begin
        return HEADER_BYTES + payload_bytes(wire, layers, heads[1] - heads[0], tokens, self.shard.head_dim)

    def seal_frame(self, into: memoryview, pages: Sequence[int], piece: Piece, *, room: int, pairing: int) -> int:
        """Write the sealed KV frame of `piece` of the room in `pages`, header and payload, and return its length.

        Args:
            into: writable bytes, at least `frame_bytes(piece)`; what lies behind the frame is left as it was.

        Raises:
            IndexError: the piece lies outside the pool or the pages given, or `into` is too short.
        """
        shard, (heads, wire), size = self.shard, self._sent(piece), self.frame_bytes(piece)
        if not shard.layer_begin <= piece.layer_begin < piece.layer_end <= shard.layer_end:
            raise IndexError(f"{piece} is outside the pool's layers [{shard.layer_begin}, {shard.layer_end})")
        if not shard.head_begin <= heads[0] < heads[1] <= shard.head_end:
            raise IndexError(f"{piece} is outside the pool's heads [{shard.head_begin}, {shard.head_end})")
        if len(into) < size:
            raise IndexError(f"a frame of {size} bytes does not fit {len(into)}")
        header = FrameHeader(
            kind=FrameKind.KV,
            room=room,
            pairing=pairing,
            layer_begin=piece.layer_begin,
            layer_end=piece.layer_end,
            head_begin=heads[0],
            head_end=heads[1],
            token_begin=piece.token_begin,
            token_end=piece.token_end,
            head_dim=shard.head_dim,
            dtype=wire,
            block_tokens=BLOCK_TOKENS if is_quantised(wire) else 0,
        )
        layers, payload = self._layers(header), into[HEADER_BYTES:size]
        if wire == shard.dtype:
            self._copies.read(payload, pages, layers, slice(*heads), piece.token_begin, piece.token_end)
        else:
            values = torch.empty(header.kv_shape, dtype=self.slots.dtype)
            self._copies.read(_bytes_of(values), pages, layers, slice(*heads), piece.token_begin, piece.token_end)
            encode(values, wire, payload, BLOCK_TOKENS)
        seal_into(into[:size], header)
        return size

    def frame(self, pages: Sequence[int], piece: Piece, *, room: int, pairing: int) -> bytes:
        """The same frame in bytes of its own.

        Raises:
            IndexError: the piece lies outside the pool or the pages given.
        """
        message, view = allocate(self.frame_bytes(piece) - HEADER_BYTES)
        self.seal_frame(view, pages, piece, room=room, pairing=pairing)
        return message

    def write(self, pages: Sequence[int], header: FrameHeader, payload: memoryview) -> None:
        """Write the payload of an opened KV frame into the pages of its room, in the pool's format.

        Nothing is written unless all of it can be.

        Raises:
            Misfit: layers, heads or head width do not fit this pool, or the tokens lie outside the pages.
        """
        self._check_fit(pages, header)
        layers, heads = self._layers(header), slice(header.head_begin, header.head_end)
        if header.dtype is not None and header.dtype != self.shard.dtype:
            values = decode(payload, header.dtype, header.kv_shape, header.block_tokens, self.shard.dtype)
            payload = _bytes_of(values)
        self._copies.write(payload, pages, layers, heads, header.token_begin, header.token_end)

    def _sent(self, piece: Piece) -> tuple[tuple[int, int], WireName]:
        """Heads and format of a piece."""
        return piece.heads or (self.shard.head_begin, self.shard.head_end), piece.wire or self.shard.dtype

    def _layers(self, header: FrameHeader) -> slice:
        return slice(header.layer_begin - self.shard.layer_begin, header.layer_end - self.shard.layer_begin)

    def _check_fit(self, pages: Sequence[int], header: FrameHeader) -> None:
        shard = self.shard
        if header.dtype is None:
            raise Misfit("a message without KV")
        if header.head_dim != shard.head_dim:
            raise Misfit(f"KV with head_dim {header.head_dim} for a pool with {shard.head_dim}")
        if not shard.layer_begin <= header.layer_begin < header.layer_end <= shard.layer_end:
            raise Misfit(
                f"KV of layers [{header.layer_begin}, {header.layer_end}) for a pool with"
                f" [{shard.layer_begin}, {shard.layer_end})"
            )
        if not 0 <= header.head_begin < header.head_end <= shard.head_end:
            raise Misfit(f"KV of heads [{header.head_begin}, {header.head_end}) for a pool with {shard.num_heads}")
        capacity = len(pages) * self.page_size
        if not 0 <= header.token_begin < header.token_end <= capacity:
            raise Misfit(f"KV of tokens [{header.token_begin}, {header.token_end}) for a room with {capacity} slots")


class _Copies(Protocol):
    """Bytes of tokens out of pages, and into them: see `HostPages`."""

    def read(
        self, into: memoryview, pages: Sequence[int], layers: slice, heads: slice, token_begin: int, token_end: int
    ) -> None: ...

    def write(
        self, source: memoryview, pages: Sequence[int], layers: slice, heads: slice, token_begin: int, token_end: int
    ) -> None: ...


class _DevicePages:
    """The same for memory of another device, by torch, run by run."""

    def __init__(self, slots: Tensor, page_size: int) -> None:
        """Args:
        slots: [L, 2, H, P * S, D].
        """
        self._slots, self._page_size = slots, page_size

    def read(
        self, into: memoryview, pages: Sequence[int], layers: slice, heads: slice, token_begin: int, token_end: int
    ) -> None:
        source, target = self._both(into, layers, heads, token_end - token_begin)
        for slot, token, count in runs(pages, self._page_size, token_begin, token_end):
            at = token - token_begin
            target[:, :, :, at : at + count].copy_(source[:, :, :, slot : slot + count])

    def write(
        self, source: memoryview, pages: Sequence[int], layers: slice, heads: slice, token_begin: int, token_end: int
    ) -> None:
        target, given = self._both(readable(source), layers, heads, token_end - token_begin)
        for slot, token, count in runs(pages, self._page_size, token_begin, token_end):
            at = token - token_begin
            target[:, :, :, slot : slot + count].copy_(given[:, :, :, at : at + count])

    def _both(self, payload: memoryview, layers: slice, heads: slice, num_tokens: int) -> tuple[Tensor, Tensor]:
        """The slots of layers and heads, and the payload as [L, 2, H, T, D]; views."""
        slots = self._slots[layers, :, heads]
        flat = torch.frombuffer(payload, dtype=slots.dtype)
        return slots, flat.view(*slots.shape[:3], num_tokens, slots.shape[4])


def _bytes_of(values: Tensor) -> memoryview:
    """The memory of a tensor without gaps on the CPU."""
    numbers: NDArray[np.uint8] = values.view(-1).view(torch.uint8).numpy()
    return numbers.data
