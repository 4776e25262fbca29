"""The KV memory of one process: pages of K and V for a range of layers, and the only code that copies in or out of it.

The worker thread that runs the model owns a pool; nothing else touches one. A pool knows no room and no allocator: it is
told page ids. One tensor, [L, 2 (K, V), H, P * S, D]: slot = page * S + offset, so adjacent pages are adjacent slots and
a room in a contiguous run is read as a view, and a frame is one strided copy.
"""

import ctypes
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from kvmesh.errors import BadConfig, Misfit
from kvmesh.kv.frames import HEADER_BYTES, FrameHeader, FrameKind, allocate, seal_into
from kvmesh.kv.layout import DTYPE_BYTES, DTypeName, Piece, Shard, is_exact_cast, runs

TORCH_DTYPES: dict[DTypeName, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


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
        try:
            # Not cleared: nobody reads a slot before its token was written, and clearing would touch all of it.
            self.slots = torch.empty(shape, dtype=TORCH_DTYPES[dtype], device=device)
        except RuntimeError:
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
        """Bytes of a sealed frame of `piece`, header included."""
        tokens = piece.token_end - piece.token_begin
        return HEADER_BYTES + (piece.layer_end - piece.layer_begin) * tokens * self.shard.layer_bytes_per_token

    def frame(self, pages: Sequence[int], piece: Piece, *, room: int, pairing: int) -> bytes:
        """A sealed KV frame of `piece` of the room in `pages`: header and payload in one allocation, one copy.

        Raises:
            IndexError: the piece lies outside the pool or the pages given.
        """
        message, view = allocate(self.frame_bytes(piece) - HEADER_BYTES)
        self.seal_frame(view, pages, piece, room=room, pairing=pairing)
        return message

    def seal_frame(self, into: memoryview, pages: Sequence[int], piece: Piece, *, room: int, pairing: int) -> int:
        """Copies and seals that frame into the beginning of `into`, a writable buffer; returns its length in bytes.

        Raises:
            IndexError: the piece lies outside the pool or the pages given, or `into` is too small.
        """
        shard, size = self.shard, self.frame_bytes(piece)
        if size > len(into):
            raise IndexError(f"a frame of {size} bytes for a buffer of {len(into)}")
        if not shard.layer_begin <= piece.layer_begin < piece.layer_end <= shard.layer_end:
            raise IndexError(f"{piece} is outside the pool's layers [{shard.layer_begin}, {shard.layer_end})")
        source = self.slots[piece.layer_begin - shard.layer_begin : piece.layer_end - shard.layer_begin]
        num_tokens = piece.token_end - piece.token_begin
        shape = (source.shape[0], 2, shard.num_heads, num_tokens, shard.head_dim)
        count = source.shape[0] * 2 * shard.num_heads * num_tokens * shard.head_dim
        target = torch.frombuffer(into, dtype=self.slots.dtype, offset=HEADER_BYTES, count=count).view(shape)
        for slot, token, n in runs(pages, self.page_size, piece.token_begin, piece.token_end):
            offset = token - piece.token_begin
            target[:, :, :, offset : offset + n].copy_(source[:, :, :, slot : slot + n])
        seal_into(
            into[:size],
            FrameHeader(
                kind=FrameKind.KV,
                room=room,
                pairing=pairing,
                layer_begin=piece.layer_begin,
                layer_end=piece.layer_end,
                head_begin=shard.head_begin,
                head_end=shard.head_end,
                token_begin=piece.token_begin,
                token_end=piece.token_end,
                head_dim=shard.head_dim,
                dtype=shard.dtype,
            ),
        )
        return size

    def write(self, pages: Sequence[int], header: FrameHeader, payload: memoryview) -> None:
        """Write the payload of an opened KV frame into the pages of its room, casting where that is exact.

        Nothing is written unless all of it can be.

        Raises:
            Misfit: layers, heads, head width or dtype do not fit this pool, or the tokens lie outside the pages.
        """
        self._check_fit(pages, header)
        source = _as_tensor(payload, header).view(header.kv_shape)
        layers = slice(header.layer_begin - self.shard.layer_begin, header.layer_end - self.shard.layer_begin)
        heads = slice(header.head_begin, header.head_end)
        for slot, token, count in runs(pages, self.page_size, header.token_begin, header.token_end):
            offset = token - header.token_begin
            self.slots[layers, :, heads, slot : slot + count].copy_(source[:, :, :, offset : offset + count])

    def _check_fit(self, pages: Sequence[int], header: FrameHeader) -> None:
        shard = self.shard
        if header.dtype is None or not is_exact_cast(header.dtype, shard.dtype):
            raise Misfit(f"KV in {header.dtype} has no exact form in this pool's {shard.dtype}")
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


def _as_tensor(payload: memoryview, header: FrameHeader) -> Tensor:
    """The payload as a flat tensor that shares its memory; valid while the payload is."""
    # torch warns of read-only buffers and bytes are read-only; the address is taken by hand because nothing writes here.
    address = np.frombuffer(payload, dtype=np.uint8).ctypes.data
    dtype = header.dtype or "fp32"
    count = len(payload) // DTYPE_BYTES[dtype]
    buffer = (ctypes.c_char * len(payload)).from_address(address)
    return torch.frombuffer(buffer, dtype=TORCH_DTYPES[dtype], count=count)
