"""What is said on one link, at the stage: HELLO and WELCOME, frames out, credit in. Raced by the servicer."""

import asyncio
from collections.abc import AsyncIterator

import grpc
from google.protobuf.message import DecodeError

from kvmesh.descriptor import DTYPE_NAMES, KV_WIRE_NAMES, KV_WIRES
from kvmesh.errors import InvalidInput, KvmeshError, Misfit
from kvmesh.kv.frames import FrameHeader, FrameKind, cells_in, open_frame, seal
from kvmesh.kv.layout import DTypeName, WireName, wire_between
from kvmesh.protocol.version import PROTOCOL_VERSION
from kvmesh.telemetry import logs, metrics
from kvmesh.v1 import prefill_pb2 as pb
from kvmesh.v1 import types_pb2
from services.prefill.life import StageIdentity
from services.prefill.sender import LinkSender

log = logs.get(__name__)

RawContext = grpc.aio.ServicerContext[bytes, bytes]


def welcome(identity: StageIdentity, wire: WireName, *, in_segment: bool) -> bytes:
    """The stage's first message: who it is, what it will send, and how."""
    shard = identity.shard
    payload = pb.LinkWelcome(
        protocol_version=PROTOCOL_VERSION,
        stage=identity.incarnation,
        rank=identity.rank,
        layers=types_pb2.LayerRange(begin=shard.layer_begin, end=shard.layer_end),
        heads=[types_pb2.HeadRange(begin=s.head_begin, end=s.head_end) for s in identity.shards],
        kv_wire=KV_WIRES[wire],
        in_segment=in_segment,
    )
    return seal(FrameHeader(FrameKind.WELCOME), payload.SerializeToString())


async def read_credits(requests: AsyncIterator[bytes], link: LinkSender) -> None:
    """What the decoder has dealt with, until it ends the stream."""
    async for message in requests:
        header, payload = open_frame(message)
        if header.kind is FrameKind.CREDIT:
            link.credit(header.credit_bytes, cells_in(payload))
        else:
            log.warning("a decoder sent a frame of kind %s on its link", header.kind.name)


async def write_frames(context: RawContext, link: LinkSender) -> None:
    """What the link has to say, for as long as it stands."""
    while True:
        await context.write(await link.next_message())
        metrics.KV_SEND_SECONDS_TOTAL.inc(link.written())


async def raise_when_cut(link: LinkSender) -> None:
    """Waits for the link's end and raises its reason."""
    raise await asyncio.shield(link.ended)


def hello_in(message: bytes) -> pb.LinkHello:
    """The first message of a link.

    Raises:
        InvalidInput: it is not HELLO, or allows nothing to be sent.
    """
    try:
        header, payload = open_frame(message)
    except KvmeshError as error:
        raise InvalidInput(f"the first message of a link is not HELLO: {error.message}", field="hello") from error
    if header.kind is not FrameKind.HELLO:
        raise InvalidInput(f"the first message of a link is {header.kind.name}, not HELLO", field="hello")
    try:
        hello = pb.LinkHello.FromString(bytes(payload))
    except DecodeError as error:
        raise InvalidInput("the first message of a link holds no LinkHello", field="hello") from error
    if not hello.window_bytes:
        raise InvalidInput("window_bytes is 0; nothing could be sent", field="hello.window_bytes")
    return hello


def wire_for(hello: pb.LinkHello, own: types_pb2.Descriptor, dtype: DTypeName) -> WireName:
    """The format in which the decoder is sent its KV.

    Raises:
        Misfit: the decoder can't take this stage's KV; both values are in the message.
    """
    if hello.protocol_version != PROTOCOL_VERSION:
        raise Misfit(f"protocol version: decoder {hello.protocol_version}, stage {PROTOCOL_VERSION}")
    other = hello.descriptor
    if other.page_size < 1:
        raise Misfit(f"page_size: decoder {other.page_size}; a page holds a token at least")
    for name in ("model_fingerprint", "num_layers", "num_kv_heads", "head_dim"):
        if getattr(other, name) != getattr(own, name):
            raise Misfit(f"{name}: decoder {getattr(other, name)}, stage {getattr(own, name)}")
    theirs = DTYPE_NAMES.get(other.dtype)
    if theirs is None:
        raise Misfit(f"dtype: decoder {other.dtype}, stage {dtype}")
    return wire_between(dtype, theirs, KV_WIRE_NAMES.get(hello.kv_wire, str(hello.kv_wire)))
