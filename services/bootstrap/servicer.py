"""What the registry serves: leases, rooms, the picture. Each lease is one stream; a room is one answer.

Checks what comes in, hands it to the core's driver, writes what the core says. Decides nothing.
"""

import asyncio
from collections.abc import AsyncIterator
from time import monotonic
from typing import TypeVar

import grpc

from kvmesh.errors import InvalidInput, Unavailable
from kvmesh.protocol.ids import Generation
from kvmesh.rpc.tasks import race
from kvmesh.telemetry import logs, metrics, traces
from kvmesh.v1 import bootstrap_pb2 as pb
from kvmesh.v1.bootstrap_pb2_grpc import BootstrapServiceServicer
from services.bootstrap.driver import Driver, LeaseStream
from services.bootstrap.wire import assignment_to, decoder_from, load_from, room_from, stage_from, to_decoder, to_stage
from services.bootstrap.wire_picture import picture_to

log = logs.get(__name__)

PICTURE_SECONDS = 0.1
"""Between two pictures: ten a second are enough for people and gateways."""
MAX_ANSWER_SECONDS = 0.1
"""Kept of a caller's deadline, so that the reason reaches it before its own clock ends the call: a tenth, at most this."""

_Message = TypeVar("_Message")

StageContext = grpc.aio.ServicerContext[pb.RegisterStageRequest, pb.RegisterStageResponse]
DecoderContext = grpc.aio.ServicerContext[pb.RegisterDecoderRequest, pb.RegisterDecoderResponse]
AssignContext = grpc.aio.ServicerContext[pb.AssignRoomRequest, pb.AssignRoomResponse]
WatchContext = grpc.aio.ServicerContext[pb.WatchMeshRequest, pb.WatchMeshResponse]


class BootstrapServicer(BootstrapServiceServicer):
    """The registry's door."""

    def __init__(self, driver: Driver, *, assign_wait_seconds: float, lease_seconds: float) -> None:
        self._driver = driver
        self._registry = driver.registry
        self._assign_wait_seconds, self._lease_seconds = assign_wait_seconds, lease_seconds
        self._stopping = asyncio.Event()

    def stop(self) -> None:
        """Ends every stream and call: the registry leaves."""
        self._stopping.set()
        self._driver.carry_out(self._registry.stop())

    # Stages.

    async def RegisterStage(  # type: ignore[override]  # noqa: N802  # a coroutine that writes to its context serves as well
        self, requests: AsyncIterator[pb.RegisterStageRequest], context: StageContext
    ) -> None:
        """The lease of a stage."""
        first = await self._first(requests)
        if first is None or first.WhichOneof("message") != "registration":
            raise InvalidInput("the first message is not a registration", field="registration")
        stream = self._driver.open()
        try:
            stage = stage_from(first.registration, stream.number)
            stream.name = stage.name
            log.info("%s registers%s", stage.name, ", holding a generation" if stage.held_generation else "")
            self._driver.carry_out(self._registry.register_stage(stage, monotonic()))
            await race(self._hear_stage(requests, stream), self._tell_stage(context, stream), stream.raise_when_ended())
        finally:
            self._driver.close(stream)

    async def _hear_stage(self, requests: AsyncIterator[pb.RegisterStageRequest], stream: LeaseStream) -> None:
        async for message in requests:
            match message.WhichOneof("message"):
                case "linked":
                    generation = Generation(message.linked.generation)
                    self._driver.carry_out(self._registry.linked(stream.number, generation, monotonic()))
                case "heartbeat":
                    self._beat(stream, message.heartbeat)
                case other:
                    self._hear_other(stream, other)

    async def _tell_stage(self, context: StageContext, stream: LeaseStream) -> None:
        while True:
            await context.write(to_stage(await stream.next(), self._registry.term))

    # Decoders.

    async def RegisterDecoder(  # type: ignore[override]  # noqa: N802
        self, requests: AsyncIterator[pb.RegisterDecoderRequest], context: DecoderContext
    ) -> None:
        """The lease of a decoder."""
        first = await self._first(requests)
        if first is None or first.WhichOneof("message") != "registration":
            raise InvalidInput("the first message is not a registration", field="registration")
        stream = self._driver.open()
        try:
            decoder = decoder_from(first.registration, stream.number)
            stream.name = decoder.name
            log.info("%s registers", decoder.name)
            self._driver.carry_out(self._registry.register_decoder(decoder, monotonic()))
            await race(
                self._hear_decoder(requests, stream), self._tell_decoder(context, stream), stream.raise_when_ended()
            )
        finally:
            self._driver.close(stream)

    async def _hear_decoder(self, requests: AsyncIterator[pb.RegisterDecoderRequest], stream: LeaseStream) -> None:
        async for message in requests:
            match message.WhichOneof("message"):
                case "heartbeat":
                    self._beat(stream, message.heartbeat)
                case other:
                    self._hear_other(stream, other)

    async def _tell_decoder(self, context: DecoderContext, stream: LeaseStream) -> None:
        while True:
            await context.write(to_decoder(await stream.next(), self._registry.term))

    # Both.

    async def _first(self, requests: AsyncIterator[_Message]) -> _Message | None:
        """The first message of a lease stream; who opens one and says nothing is not waited for.

        Raises:
            InvalidInput: none came within a lease's time.
        """
        try:
            async with asyncio.timeout(self._lease_seconds):
                return await anext(requests, None)
        except TimeoutError as error:
            raise InvalidInput("no registration came within the lease's time", field="registration") from error

    def _beat(self, stream: LeaseStream, message: pb.Heartbeat) -> None:
        self._driver.carry_out(self._registry.heartbeat(stream.number, load_from(message), monotonic()))

    def _hear_other(self, stream: LeaseStream, kind: str | None) -> None:
        """A second registration is refused; what a later version may say is counted, and a sign of life."""
        if kind == "registration":
            raise InvalidInput("a lease stream registers once", field="registration")
        log.warning("%s sent a message of an unknown kind", stream.name)
        metrics.UNKNOWN_MESSAGES_TOTAL.inc()
        self._registry.heard(stream.number, monotonic())

    # Rooms.

    async def AssignRoom(  # noqa: N802
        self, request: pb.AssignRoomRequest, context: AssignContext
    ) -> pb.AssignRoomResponse:
        """Mints and places a room."""
        hold, left = self._assign_wait_seconds, context.time_remaining()
        if left is not None:
            hold = min(hold, left - min(left / 10, MAX_ANSWER_SECONDS))
        span = traces.start("assign room", parent=traces.of_call(context.invocation_metadata()))
        with metrics.ASSIGN_SECONDS.time(), span:
            grant = await self._driver.assign(room_from(request), hold)
            span.room = grant.room
        return pb.AssignRoomResponse(assignment=assignment_to(grant))

    # The picture.

    async def WatchMesh(  # type: ignore[override]  # noqa: N802
        self,
        request: pb.WatchMeshRequest,  # noqa: ARG002
        context: WatchContext,
    ) -> None:
        """The whole picture at once, then after each change."""
        await race(self._show(context), self._raise_when_stopping())

    async def _show(self, context: WatchContext) -> None:
        while True:
            version = self._registry.version
            await context.write(picture_to(self._registry.view(monotonic())))
            await asyncio.sleep(PICTURE_SECONDS)
            while self._registry.version == version:
                await self._driver.changed()

    async def _raise_when_stopping(self) -> None:
        await self._stopping.wait()
        raise Unavailable("the registry is stopping", reason="stopping")
