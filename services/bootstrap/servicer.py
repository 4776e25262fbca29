"""What the registry serves: leases, rooms, the picture. Each lease is one stream; a room is one answer.

Checks what comes in, hands it to the core, writes what the core says. Decides nothing.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from time import monotonic

import grpc

from kvmesh.errors import Fenced, InvalidInput, Unavailable
from kvmesh.protocol.ids import Generation, Term
from kvmesh.protocol.registry import Placed
from kvmesh.rpc.tasks import race
from kvmesh.telemetry import logs, metrics
from kvmesh.v1 import bootstrap_pb2 as pb
from kvmesh.v1 import types_pb2
from kvmesh.v1.bootstrap_pb2_grpc import BootstrapServiceServicer
from services.bootstrap.leases import Lease, Leases, WholeFeed
from services.bootstrap.wire import decoder_from, picture_to, stage_from

log = logs.get(__name__)

PICTURE_SECONDS = 0.1
"""Between two pictures: ten a second are enough for people and gateways."""

StageContext = grpc.aio.ServicerContext[pb.RegisterStageRequest, pb.RegisterStageResponse]
DecoderContext = grpc.aio.ServicerContext[pb.RegisterDecoderRequest, pb.RegisterDecoderResponse]
AssignContext = grpc.aio.ServicerContext[pb.AssignRoomRequest, pb.AssignRoomResponse]
WatchContext = grpc.aio.ServicerContext[pb.WatchMeshRequest, pb.WatchMeshResponse]


class BootstrapServicer(BootstrapServiceServicer):
    """The registry's door."""

    def __init__(self, leases: Leases, assign_wait_seconds: float, hear_term: Callable[[Term], None]) -> None:
        """Args:
        hear_term: told when a member obeys a higher term than ours.
        """
        self._leases = leases
        self._registry = leases.registry
        self._assign_wait_seconds = assign_wait_seconds
        self._hear_term = hear_term

    # Stages.

    async def RegisterStage(  # type: ignore[override]  # noqa: N802  # a coroutine that writes to its context serves as well
        self, requests: AsyncIterator[pb.RegisterStageRequest], context: StageContext
    ) -> None:
        """The lease of a stage."""
        first = await anext(requests, None)
        if first is None or first.WhichOneof("message") != "registration":
            raise InvalidInput("the first message is not a registration", field="registration")
        self._check_term(first.registration.highest_term)
        lease = self._leases.open()
        try:
            stage = stage_from(first.registration, lease.id)
            self._leases.say(self._registry.register_stage(first.registration.pipeline, stage, monotonic()))
            log.info("rank %d of %s registered", stage.rank, first.registration.pipeline)
            await race(self._read_stage(requests, lease), _write_stage(context, lease), lease.raise_when_ended())
        finally:
            self._leases.close(lease)

    async def _read_stage(self, requests: AsyncIterator[pb.RegisterStageRequest], lease: Lease) -> None:
        async for message in requests:
            kind = message.WhichOneof("message")
            if kind == "linked":
                generation = Generation(message.linked.generation)
                self._leases.say(self._registry.linked(lease.id, generation, monotonic()))
            elif kind == "heartbeat":
                self._leases.beat(lease, message.heartbeat)
            elif kind == "registration":
                raise InvalidInput("a lease registers once", field="registration")
            else:
                log.warning("a stage sent a message of an unknown kind")

    # Decoders.

    async def RegisterDecoder(  # type: ignore[override]  # noqa: N802
        self, requests: AsyncIterator[pb.RegisterDecoderRequest], context: DecoderContext
    ) -> None:
        """The lease of a decoder."""
        first = await anext(requests, None)
        if first is None or first.WhichOneof("message") != "registration":
            raise InvalidInput("the first message is not a registration", field="registration")
        self._check_term(first.registration.highest_term)
        lease = self._leases.open()
        try:
            self._registry.register_decoder(decoder_from(first.registration, lease.id), monotonic())
            self._leases.say([])
            log.info("a decoder registered")
            await race(self._read_decoder(requests, lease), self._write_decoder(context), lease.raise_when_ended())
        finally:
            self._leases.close(lease)

    async def _read_decoder(self, requests: AsyncIterator[pb.RegisterDecoderRequest], lease: Lease) -> None:
        async for message in requests:
            kind = message.WhichOneof("message")
            if kind == "heartbeat":
                self._leases.beat(lease, message.heartbeat)
            elif kind == "registration":
                raise InvalidInput("a lease registers once", field="registration")
            else:
                log.warning("a decoder sent a message of an unknown kind")

    async def _write_decoder(self, context: DecoderContext) -> None:
        term, feed = self._registry.term, WholeFeed(self._leases)
        await context.write(pb.RegisterDecoderResponse(term=term, admitted=pb.DecoderAdmitted()))
        while True:
            await context.write(pb.RegisterDecoderResponse(term=term, pipelines=await feed.next()))

    # Rooms.

    async def AssignRoom(  # noqa: N802
        self, request: pb.AssignRoomRequest, context: AssignContext
    ) -> pb.AssignRoomResponse:
        """Mints a room; held while there is no pair."""
        asked, left = monotonic(), context.time_remaining()
        wait = min(self._assign_wait_seconds, left if left is not None else self._assign_wait_seconds)
        if request.prompt_len < 1:
            raise InvalidInput("at least one token is needed", field="prompt_len")
        try:
            async with asyncio.timeout(wait):
                while (placed := self._registry.assign(request.model, request.prompt_len)) is None:
                    await self._leases.changed()
        except TimeoutError as error:
            raise Unavailable(
                "no pipeline and decoder are paired", reason="no_pair", retry_after_seconds=1.0
            ) from error
        metrics.ROOMS_MINTED_TOTAL.inc()
        metrics.ASSIGN_SECONDS.observe(monotonic() - asked)
        return pb.AssignRoomResponse(assignment=_assignment(placed))

    # The picture.

    async def WatchMesh(  # noqa: N802
        self,
        request: pb.WatchMeshRequest,  # noqa: ARG002
        context: WatchContext,  # noqa: ARG002
    ) -> AsyncIterator[pb.WatchMeshResponse]:
        """The whole picture, again after each change."""
        last: pb.WatchMeshResponse | None = None
        while True:
            picture = picture_to(self._registry, monotonic())
            for decoder in picture.decoders:
                decoder.ClearField("heartbeat_age")  # ages alone are no change
            if picture != last:
                last = picture
                yield picture_to(self._registry, monotonic())
            await self._leases.changed()
            await asyncio.sleep(PICTURE_SECONDS)

    def _check_term(self, highest: int) -> None:
        if highest > self._registry.term:
            self._hear_term(Term(highest))
            raise Fenced(f"term {highest} was seen, and this registry's is {self._registry.term}", reason="stale_term")


async def _write_stage(context: StageContext, lease: Lease) -> None:
    while True:
        await context.write(await lease.outbox.get())


def _assignment(placed: Placed) -> types_pb2.RoomAssignment:
    decoder = types_pb2.Member(incarnation=placed.decoder.incarnation, address=placed.decoder.address)
    return types_pb2.RoomAssignment(
        room=placed.room, pipeline=placed.pair.pipeline, generation=placed.pair.generation, decoder=decoder
    )
