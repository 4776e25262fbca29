"""What the stage serves: Steps and Control (protobuf) and Link (raw bytes). Each is one stream of the life that runs.

Reads what comes in, hands it to the generation or its head, and writes what they have to say. Decides nothing.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import TypeVar

import grpc
from google.protobuf.message import DecodeError

from kvmesh.descriptor import DTYPE_NAMES, KV_WIRE_NAMES, KV_WIRES
from kvmesh.errors import Fenced, InvalidInput, KvmeshError, Misfit, Unavailable
from kvmesh.kv.frames import FrameHeader, FrameKind, cells_in, open_frame, seal
from kvmesh.kv.layout import DTypeName, WireName, wire_between
from kvmesh.protocol.ids import Incarnation, PairingKey, PairingNumber, RoomId, short
from kvmesh.protocol.request import LOST_STEP
from kvmesh.protocol.version import PROTOCOL_VERSION
from kvmesh.rpc.tasks import race
from kvmesh.telemetry import logs, metrics
from kvmesh.v1 import prefill_pb2 as pb
from kvmesh.v1 import types_pb2
from kvmesh.v1.prefill_pb2_grpc import PrefillServiceServicer
from services.prefill.carrier import InSegment, OnStream, join_segment
from services.prefill.generation import DRAINED, Generation
from services.prefill.head import Head
from services.prefill.life import LiveStage
from services.prefill.links import LinkSender
from services.prefill.wire import opening_from, step_from

log = logs.get(__name__)

MAX_UNSENT_REFUSALS = 1024
"""To one decoder; then its Admits are not read until it reads."""

StepsContext = grpc.aio.ServicerContext[pb.StepsRequest, pb.StepsResponse]
ControlContext = grpc.aio.ServicerContext[pb.ControlRequest, pb.ControlResponse]
DescribeContext = grpc.aio.ServicerContext[pb.DescribeLogRequest, pb.DescribeLogResponse]
RawContext = grpc.aio.ServicerContext[bytes, bytes]

_Message = TypeVar("_Message")


class PrefillServicer(PrefillServiceServicer):
    """Streams of one stage."""

    def __init__(
        self,
        life: Callable[[], LiveStage],
        describe: Callable[[], pb.DescribeLogResponse],
        watchdog_seconds: float,
    ) -> None:
        """Args:
        life: the life that runs now.
        describe: where the stage stands in the log.
        watchdog_seconds: a stream whose first message takes longer is refused.

        Raises (through the returned streams):
            Unavailable: the stage is between two lives.
        """
        self._life = life
        self._describe = describe
        self._watchdog_seconds = watchdog_seconds

    async def _first(self, requests: AsyncIterator[_Message], field: str = "open") -> _Message | None:
        """The first message; a stream that stays silent holds nothing up.

        Raises:
            InvalidInput: none came within the watchdog's time.
        """
        try:
            async with asyncio.timeout(self._watchdog_seconds):
                return await anext(requests, None)
        except TimeoutError as error:
            raise InvalidInput("no first message came", field=field) from error

    # Steps.

    async def Steps(  # type: ignore[override]  # noqa: N802  # a coroutine that writes to its context serves as well
        self, requests: AsyncIterator[pb.StepsRequest], context: StepsContext
    ) -> None:
        """The log, from the rank before."""
        first = await self._first(requests)
        if first is None or first.WhichOneof("message") != "open":
            raise InvalidInput("the first message is not an open", field="open")
        life = self._life()
        with life.stream():
            generation = await life.accept(opening_from(first.open))
            try:
                with logs.bind(generation=short(generation.number)):
                    await context.write(pb.StepsResponse(opened=pb.StepOpened()))
                    await race(
                        _read_steps(requests, generation),
                        _write_answers(context, generation),
                        generation.raise_when_ended(),
                    )
            finally:
                before = life.identity.rank - 1
                life.end(Unavailable(f"rank {before} of {life.identity.pipeline} was lost", reason="stage_lost"))

    # The log, for people.

    async def DescribeLog(  # noqa: N802
        self,
        request: pb.DescribeLogRequest,  # noqa: ARG002
        context: DescribeContext,  # noqa: ARG002
    ) -> pb.DescribeLogResponse:
        """Where this stage stands in the log."""
        return self._describe()

    # Control.

    async def Control(  # type: ignore[override]  # noqa: N802
        self, requests: AsyncIterator[pb.ControlRequest], context: ControlContext
    ) -> None:
        """The lease of a decoder's rooms."""
        first = await self._first(requests)
        if first is None or first.WhichOneof("message") != "open":
            raise InvalidInput("the first message is not an open", field="open")
        life = self._life()
        with life.stream():
            generation, head, key = self._open_control(life, first.open)
            try:
                await context.write(pb.ControlResponse(opened=pb.ControlOpened()))
                refused: asyncio.Queue[pb.RoomRefused] = asyncio.Queue(MAX_UNSENT_REFUSALS)
                await race(
                    _read_control(requests, refused, head, key),
                    _write_refused(context, refused),
                    _end_control(generation, refused, head, key, self._watchdog_seconds / 4),
                )
            finally:
                head.unpair(key)

    def _open_control(self, life: LiveStage, opening: pb.ControlOpen) -> tuple[Generation, Head, PairingKey]:
        if life.head is None:
            if life.identity.rank != 0:
                raise Misfit(f"control goes to rank 0; this is rank {life.identity.rank}")
            raise Fenced("no generation is served here")
        if opening.to_incarnation != life.identity.incarnation:
            raise Fenced("meant for another process")
        generation = life.require_serving(opening.generation)
        key = (Incarnation(opening.decoder), PairingNumber(opening.pairing))
        if key not in generation.links:
            raise Fenced(f"pairing {opening.pairing} has no link to rank 0")
        life.head.pair(key, generation.links[key].decoder_page_size)
        return generation, life.head, key

    # Link.

    async def Link(self, requests: AsyncIterator[bytes], context: RawContext) -> None:  # noqa: N802
        """KV frames, to the decoder that dialled. Raw bytes: see prefill.proto."""
        hello = _hello(await self._first(requests, "hello") or b"")
        life = self._life()
        with life.stream():
            identity = life.identity
            if hello.to_incarnation != identity.incarnation:
                raise Fenced("meant for another process")
            generation = life.require_serving(hello.generation)
            wire = _check_fit(hello, identity.descriptor, identity.shard.dtype)
            segment = join_segment(hello, identity.shards, wire)
            carrier = OnStream(hello.window_bytes) if segment is None else InSegment(segment)
            with contextlib.closing(carrier):
                link = generation.open_link(hello, identity.shards, wire, carrier)
                try:
                    await context.write(self._welcome(life, wire, in_segment=segment is not None))
                    await race(
                        _read_credits(requests, link),
                        _write_frames(context, link),
                        _raise_when_cut(link),
                        generation.raise_when_ended(),
                    )
                finally:
                    generation.close_link(link)

    def _welcome(self, life: LiveStage, wire: WireName, *, in_segment: bool) -> bytes:
        identity, shard = life.identity, life.identity.shard
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


async def _read_steps(requests: AsyncIterator[pb.StepsRequest], generation: Generation) -> None:
    """Steps, each with all of its activations, in order, until the rank before says that it drained, or is lost."""
    async for message in requests:
        kind = message.WhichOneof("message")
        if kind == "drained":
            generation.end(Unavailable("the pipeline drained", reason=DRAINED))
            return
        if kind != "step":
            raise InvalidInput("a step was expected", field="step")
        pieces: list[bytes] = []
        missing = message.step.activation_bytes
        while missing > 0:
            piece = await anext(requests, None)
            if piece is None:
                return
            if piece.WhichOneof("message") != "activations" or not 0 < len(piece.activations.payload) <= missing:
                raise InvalidInput("activations do not add up to activation_bytes", field="activations")
            pieces.append(piece.activations.payload)
            missing -= len(piece.activations.payload)
        generation.num_written = max(generation.num_written, message.step.num_written)
        generation.run(step_from(message.step), activations=b"".join(pieces))


async def _write_answers(context: StepsContext, generation: Generation) -> None:
    while True:
        await context.write(await generation.answers.get())


async def _read_control(
    requests: AsyncIterator[pb.ControlRequest], refused: asyncio.Queue[pb.RoomRefused], head: Head, key: PairingKey
) -> None:
    async for message in requests:
        kind = message.WhichOneof("message")
        if kind == "admit":
            refusal = head.admit(key, message.admit)
            if refusal is not None:
                await refused.put(refusal)
        elif kind == "drop":
            head.drop(key, RoomId(message.drop))
        elif kind == "received":
            head.received(key, RoomId(message.received))
        else:
            log.warning("a decoder sent a control message of an unknown kind")


async def _write_refused(context: ControlContext, refused: asyncio.Queue[pb.RoomRefused]) -> None:
    while True:
        await context.write(pb.ControlResponse(refused=await refused.get()))
        refused.task_done()


async def _end_control(
    generation: Generation, refused: asyncio.Queue[pb.RoomRefused], head: Head, key: PairingKey, patience_seconds: float
) -> None:
    """Ends with the generation; its last words name the rooms that had work in the step it died in."""
    error = await asyncio.shield(generation.ended)
    if error.reason != DRAINED:
        for room in head.scheduler.rooms_in_flight(key):
            with contextlib.suppress(asyncio.QueueFull):
                refused.put_nowait(pb.RoomRefused(room=room, reason=LOST_STEP, detail=error.message))
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(refused.join(), patience_seconds)
    raise error


async def _read_credits(requests: AsyncIterator[bytes], link: LinkSender) -> None:
    async for message in requests:
        header, payload = open_frame(message)
        if header.kind is FrameKind.CREDIT:
            link.credit(header.credit_bytes, cells_in(payload))
        else:
            log.warning("a decoder sent a frame of kind %s on its link", header.kind.name)


async def _write_frames(context: RawContext, link: LinkSender) -> None:
    while True:
        await context.write(await link.next_message())
        metrics.KV_SEND_SECONDS_TOTAL.inc(link.written())


async def _raise_when_cut(link: LinkSender) -> None:
    raise await asyncio.shield(link.ended)


def _hello(message: bytes) -> pb.LinkHello:
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


def _check_fit(hello: pb.LinkHello, own: types_pb2.Descriptor, dtype: DTypeName) -> WireName:
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
