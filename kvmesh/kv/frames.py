"""The bytes of one message on a KV link: a fixed 64-byte header, little-endian, then the payload.

    offset  0  magic "KVMF"      4  version u8     5  kind u8         6  dtype u8 (0 none, 1 fp32, 2 bf16, 3 fp16,
                                                             4 int8, 5 fp8: e4m3)
            8  checksum u64     16  room u64      24  pairing u64
           32  layer_begin u16  34  layer_end     36  head_begin      38  head_end      (all u16)
           40  token_begin u32  44  token_end u32 48  head_dim u16        50  block_tokens u16
           52  payload_bytes u32                  56  credit_bytes u32                  (the rest is 0)

The checksum is XXH3-64 over header (its own field as 0) and payload. A KV payload is [layers, 2 (K, V), heads, tokens,
head_dim], row-major; in a quantised one the scales stand first, fp32 [layers, 2, heads, blocks], one for each block_tokens
tokens of the frame, the last block perhaps shorter. Elsewhere block_tokens is 0. Links seal and open frames here, the pool
fills them; torch-free, knows no stream and no page.
"""

import ctypes
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

from kvmesh.errors import Corrupt
from kvmesh.kv.checksum import checksum
from kvmesh.kv.layout import WireName, is_quantised, payload_bytes

HEADER_BYTES = 64
MAGIC = b"KVMF"
VERSION = 2

_HEADER = struct.Struct("<4sBBBxQQQHHHHIIHHIIxxxx")
_KIND = 5
_CHECKSUM = slice(8, 16)
_HANDLE = struct.Struct("<II")
_DTYPE_CODES: dict[WireName, int] = {"fp32": 1, "bf16": 2, "fp16": 3, "int8": 4, "fp8": 5}
_DTYPE_NAMES: dict[int, WireName | None] = {0: None, **{code: name for name, code in _DTYPE_CODES.items()}}
# Where CPython keeps the contents of a bytes object; the 1 is its final NUL.
_BYTES_DATA_OFFSET = bytes.__basicsize__ - 1


class FrameKind(IntEnum):
    """What a message on a link is."""

    HELLO = 1
    """Decoder, first message; payload LinkHello."""
    WELCOME = 2
    """Stage, first answer; payload LinkWelcome."""
    KV = 3
    """Stage; payload KV."""
    FIRST_TOKEN = 4
    """Last stage; payload FirstToken."""
    CREDIT = 5
    """Decoder; `credit_bytes` more may be in flight; payload: the cells of the segment that are free again, u32 each."""
    IN_CELLS = 6
    """Stage; payload: for each KV frame that stands in the segment its cell and its length, u32 each."""


_KINDS = frozenset(int(kind) for kind in FrameKind)


@dataclass(frozen=True, slots=True)
class FrameHeader:
    """What a message says of itself. Ranges are half-open and 0 where the kind has none; `dtype` is None without KV."""

    kind: FrameKind
    room: int = 0
    pairing: int = 0
    layer_begin: int = 0
    layer_end: int = 0
    head_begin: int = 0
    head_end: int = 0
    token_begin: int = 0
    token_end: int = 0
    head_dim: int = 0
    dtype: WireName | None = None
    payload_bytes: int = 0
    credit_bytes: int = 0
    block_tokens: int = 0
    """Tokens of a head that share a scale; 0 where the KV is not quantised."""

    @property
    def kv_shape(self) -> tuple[int, int, int, int, int]:
        """Shape of a KV payload: [layers, 2, heads, tokens, head_dim]."""
        return (
            self.layer_end - self.layer_begin,
            2,
            self.head_end - self.head_begin,
            self.token_end - self.token_begin,
            self.head_dim,
        )

    @property
    def kv_bytes(self) -> int:
        """Bytes that a KV payload of this shape and dtype has, scales included; 0 without a dtype."""
        layers, _, heads, tokens, head_dim = self.kv_shape
        return payload_bytes(self.dtype, layers, heads, tokens, head_dim, self.block_tokens or 1) if self.dtype else 0

    @property
    def is_kv(self) -> bool:
        """Whether shape, dtype, block and length agree, as those of every KV frame must."""
        fits = self.dtype is not None and min(self.kv_shape) > 0 and self.kv_bytes == self.payload_bytes
        return fits and is_quantised(self.dtype) == (self.block_tokens > 0)


def allocate(payload_bytes: int) -> tuple[bytes, memoryview]:
    """A message of header and payload in one uninitialised bytes object, and a writable view of all of it.

    gRPC takes only `bytes`, so the payload is written straight into one. Whoever calls this fills all of the payload,
    calls `seal_into`, and drops the view before the bytes go anywhere else.
    """
    size = HEADER_BYTES + payload_bytes
    message: bytes = _uninitialised_bytes(None, size)
    view = (ctypes.c_char * size).from_address(id(message) + _BYTES_DATA_OFFSET)
    return message, memoryview(view).cast("B")


def seal(header: FrameHeader, payload: bytes | bytearray | memoryview = b"") -> bytes:
    """A whole message; `header.payload_bytes` is taken from the payload."""
    source = memoryview(payload).cast("B")
    message, view = allocate(len(source))
    view[HEADER_BYTES:] = source
    seal_into(view, header)
    return message


def seal_into(buffer: memoryview, header: FrameHeader) -> None:
    """Write the header before a payload that already stands at `buffer[64:]`; its length is taken from the buffer.

    Raises:
        struct.error: a field is out of its range.
    """
    _HEADER.pack_into(
        buffer,
        0,
        MAGIC,
        VERSION,
        header.kind,
        _DTYPE_CODES[header.dtype] if header.dtype else 0,
        0,
        header.room,
        header.pairing,
        header.layer_begin,
        header.layer_end,
        header.head_begin,
        header.head_end,
        header.token_begin,
        header.token_end,
        header.head_dim,
        header.block_tokens,
        len(buffer) - HEADER_BYTES,
        header.credit_bytes,
    )
    buffer[_CHECKSUM] = checksum(buffer).to_bytes(8, "little")


def open_frame(message: bytes | bytearray | memoryview) -> tuple[FrameHeader, memoryview]:
    """Check a message and read its header; the payload is a view of the message, not a copy.

    Raises:
        Corrupt: magic, version, kind, dtype, length or checksum is wrong (reason "frame" or "checksum"), or a KV header
            contradicts its own length.
    """
    view = memoryview(message).cast("B")
    if len(view) < HEADER_BYTES:
        raise Corrupt(f"frame of {len(view)} bytes is shorter than its header of {HEADER_BYTES}", reason="frame")
    head = bytearray(view[:HEADER_BYTES])
    magic, version, kind, dtype, told, *fields, payload_bytes, credit_bytes = _HEADER.unpack(head)
    if magic != MAGIC:
        raise Corrupt("not a KV frame: wrong magic", reason="frame")
    if version != VERSION:
        raise Corrupt(f"frame of version {version}, this build reads {VERSION}", reason="frame")
    payload = view[HEADER_BYTES:]
    if payload_bytes != len(payload):
        raise Corrupt(f"frame says {payload_bytes} bytes of payload and has {len(payload)}", reason="frame")
    head[_CHECKSUM] = bytes(8)
    if checksum(head, payload) != told:
        raise Corrupt("checksum of a frame does not match")
    return _header(kind, dtype, fields, payload_bytes, credit_bytes), payload


class Handle(NamedTuple):
    """Where a sealed frame stands in a segment."""

    cell: int
    num_bytes: int


def seal_handles(handles: Iterable[Handle], *, pairing: int) -> bytes:
    """An IN_CELLS message."""
    payload = b"".join(_HANDLE.pack(*handle) for handle in handles)
    return seal(FrameHeader(FrameKind.IN_CELLS, pairing=pairing), payload)


def handles_in(payload: memoryview) -> list[Handle]:
    """What an IN_CELLS message says.

    Raises:
        Corrupt: it is no list of handles.
    """
    if len(payload) % _HANDLE.size:
        raise Corrupt(f"{len(payload)} bytes are no handles", reason="frame")
    return [Handle(*fields) for fields in _HANDLE.iter_unpack(payload)]


def seal_credit(num_bytes: int, cells: Sequence[int], *, pairing: int) -> bytes:
    """A CREDIT message."""
    header = FrameHeader(FrameKind.CREDIT, pairing=pairing, credit_bytes=num_bytes)
    return seal(header, struct.pack(f"<{len(cells)}I", *cells))


def cells_in(payload: memoryview) -> list[int]:
    """The cells that a CREDIT message gives back.

    Raises:
        Corrupt: it is no list of cells.
    """
    if len(payload) % 4:
        raise Corrupt(f"{len(payload)} bytes are no cells", reason="frame")
    return list(struct.unpack(f"<{len(payload) // 4}I", payload))


def kind_of(message: bytes | memoryview) -> int:
    """The kind that a message says it has, unchecked; 0 when it is too short to say."""
    return message[_KIND] if len(message) >= HEADER_BYTES else 0


def _header(kind: int, dtype: int, fields: list[int], payload_bytes: int, credit_bytes: int) -> FrameHeader:
    """The header of a message whose checksum holds; raises Corrupt when its fields make no sense."""
    if kind not in _KINDS or dtype not in _DTYPE_NAMES:
        raise Corrupt(f"frame of unknown kind {kind} or dtype {dtype}", reason="frame")
    room, pairing, layer_begin, layer_end, head_begin, head_end, token_begin, token_end, head_dim, block = fields
    header = FrameHeader(
        kind=FrameKind(kind),
        room=room,
        pairing=pairing,
        layer_begin=layer_begin,
        layer_end=layer_end,
        head_begin=head_begin,
        head_end=head_end,
        token_begin=token_begin,
        token_end=token_end,
        head_dim=head_dim,
        dtype=_DTYPE_NAMES[dtype],
        payload_bytes=payload_bytes,
        credit_bytes=credit_bytes,
        block_tokens=block,
    )
    if header.kind is FrameKind.KV and not header.is_kv:
        raise Corrupt(f"KV frame of shape {header.kv_shape} with {payload_bytes} bytes of payload", reason="frame")
    return header


_uninitialised_bytes = ctypes.pythonapi.PyBytes_FromStringAndSize
_uninitialised_bytes.restype = ctypes.py_object
_uninitialised_bytes.argtypes = [ctypes.c_char_p, ctypes.c_ssize_t]
