"""What the stage serves: Steps and Control (protobuf) and Link (raw bytes). Each is one stream of the life that runs.

Reads what comes in, hands it to the generation or its head, and writes what they have to say. Decides nothing.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import TypeVar

import grpc

from kvmesh.errors import Fenced, InvalidInput, Misfit, Unavailable
from kvmesh.protocol.ids import Incarnation, PairingKey, PairingNumber, RoomId, short
from kvmesh.protocol.request import LOST_STEP
from kvmesh.rpc.tasks import race
from kvmesh.telemetry import logs
from kvmesh.v1 import prefill_pb2 as pb
from kvmesh.v1.prefill_pb2_grpc import PrefillServiceServicer
from services.prefill.carrier import InSegment, OnStream, join_segment
from services.prefill.generation import DRAINED, Generation
from services.prefill.head import Head
from services.prefill.life import LiveStage
from services.prefill.link_stream import (
    RawContext,
    hello_in,
    raise_when_cut,
    read_credits,
    welcome,
    wire_for,
    write_frames,
)
from services.prefill.wire import opening_from, step_from

log = logs.get(__name__)

MAX_UNSENT_REFUSALS = 1024
"""To one decoder; then its Admits are not read until it reads."""

StepsContext = grpc.aio.ServicerContext[pb.StepsRequest, pb.StepsResponse]
ControlContext = grpc.aio.ServicerContext[pb.ControlRequest, pb.ControlResponse]
DescribeContext = grpc.aio.ServicerContext[pb.DescribeLogRequest, pb.DescribeLogResponse]

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
        life.head.pair(key, generation.links.page_size(key))
        return generation, life.head, key

    # Link.

    async def Link(self, requests: AsyncIterator[bytes], context: RawContext) -> None:  # noqa: N802
        """KV frames, to the decoder that dialled. Raw bytes: see prefill.proto."""
        hello = hello_in(await self._first(requests, "hello") or b"")
        life = self._life()
        with life.stream():
            identity = life.identity
            if hello.to_incarnation != identity.incarnation:
                raise Fenced("meant for another process")
            generation = life.require_serving(hello.generation)
            wire = wire_for(hello, identity.descriptor, identity.shard.dtype)
            segment = join_segment(hello, identity.shards, wire)
            carrier = OnStream(hello.window_bytes) if segment is None else InSegment(segment)
            with contextlib.closing(carrier):
                link = generation.links.open(hello, identity.shards, wire, carrier)
                try:
                    await context.write(welcome(identity, wire, in_segment=segment is not None))
                    await race(
                        read_credits(requests, link),
                        write_frames(context, link),
                        raise_when_cut(link),
                        generation.raise_when_ended(),
                    )
                finally:
                    generation.links.close(link)


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
