"""The decoder's side of one pairing: dials links, last rank first, then control; Admit, Drop, Received go out.

`kvmesh.protocol.pairing` says what comes when; this file owns the streams, and `link.py` knows what is said on a link. Called
by `pairings.py`. Whole or absent: one stream lost, and all are closed.
"""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass

import grpc

from kvmesh.errors import Corrupt, KvmeshError, Unavailable
from kvmesh.protocol.coverage import ShardSpan
from kvmesh.protocol.ids import Generation, PairingNumber, Rank, short
from kvmesh.protocol.pairing import Ask, Pairing
from kvmesh.rpc import streams
from kvmesh.rpc.channels import dial
from kvmesh.rpc.raw import raw_stream_call
from kvmesh.rpc.status import peer_errors
from kvmesh.rpc.tasks import race, together, until
from kvmesh.telemetry import logs
from kvmesh.v1 import prefill_pb2 as pb
from kvmesh.v1.bootstrap_pb2 import WholePipeline
from kvmesh.v1.prefill_pb2_grpc import PrefillServiceStub
from kvmesh.v1.types_pb2 import Member
from services.decode.identity import DecoderIdentity
from services.decode.in_flight import InFlight
from services.decode.link import Link
from services.decode.records import FrameArrived, Received
from services.decode.segments import Segments

log = logs.get(__name__)

LAST_WORDS_SHARE = 0.25
"""Of the watchdog's time: a stage's link may break before rank 0 has named the rooms that were in the step it died in."""
LINK_PATH = "/kvmesh.v1.PrefillService/Link"
ControlCall = grpc.aio.StreamStreamCall[pb.ControlRequest, pb.ControlResponse]


@dataclass(frozen=True, slots=True)
class Told:
    """Whom a pairing tells, and asks."""

    frame: Callable[[FrameArrived], None]
    refused: Callable[[PairingNumber, pb.RoomRefused], None]
    moves: Callable[[], bool]
    """Whether the decoder's threads move: then what waits at them is no reason to give a link up."""
    standing: Callable[["PairingStreams"], None] = lambda _: None
    fallen: Callable[["PairingStreams"], None] = lambda _: None
    """A stream is lost: no room may be given to the pairing; those it has wait for the last words."""


class PairingStreams:
    """One pairing and its streams."""

    def __init__(
        self,
        pipeline: WholePipeline,
        number: PairingNumber,
        own: DecoderIdentity,
        told: Told,
        in_flight: InFlight,
        offers: Segments,
    ) -> None:
        self.pipeline = pipeline.pipeline
        self.generation = Generation(pipeline.generation)
        self.number = number
        self._stages: Sequence[Member] = pipeline.stages
        self._own = own
        self._told = told
        self._in_flight, self._offers = in_flight, offers
        descriptor = own.descriptor
        self._pairing = Pairing(
            number, self.generation, len(self._stages), descriptor.num_layers, descriptor.num_kv_heads
        )
        self._links: dict[Rank, Link] = {}
        self.stood = False
        """Whether it has stood."""
        self._control: asyncio.Queue[pb.ControlRequest] = asyncio.Queue()  # one Admit and one end a room
        self._broken: asyncio.Future[KvmeshError] = asyncio.get_running_loop().create_future()

    @property
    def shards(self) -> dict[Rank, tuple[ShardSpan, ...]]:
        """What each stage sends, once it answered."""
        return self._pairing.shards

    async def run(self) -> None:
        """Makes the pairing, then holds it until a stream is lost.

        Raises:
            Misfit: a stage's KV does not fit this decoder.
            KvmeshError: always, in the end: why the pairing is over.
        """
        async with AsyncExitStack() as stack:
            asks = self._pairing.start()
            try:
                while Ask.ANNOUNCE not in asks:
                    asks = await self._carry_out(asks, stack)
                self.stood = True
                self._told.standing(self)
                await self._hold()
            finally:
                self._pairing.lost()
                for link in self._links.values():
                    link.close()
        raise Unavailable(f"the pairing with {self.pipeline} ended", reason="pairing_lost")

    def send(self, message: pb.ControlRequest) -> None:
        """Queues a control message; they leave in order."""
        self._control.put_nowait(message)

    def credit(self, dealt: Received) -> None:
        """Lets a stage send as much again."""
        self._links[dealt.rank].credit(dealt)

    def break_off(self, error: KvmeshError) -> None:
        """A link carried what it must not: the pairing ends."""
        if not self._broken.done():
            self._broken.set_result(error)

    async def _carry_out(self, asks: Sequence[Ask], stack: AsyncExitStack) -> list[Ask]:
        """Carries out one step of the pairing; returns what follows."""
        if Ask.DIAL_TAIL in asks:
            return await self._dial_all(self._pairing.tail, stack)
        if Ask.DIAL_HEAD in asks:
            return await self._dial_all([Rank(0)], stack)
        assert Ask.OPEN_CONTROL in asks, asks
        await self._open_control(stack)
        return self._pairing.control_opened()

    async def _dial_all(self, ranks: Sequence[Rank], stack: AsyncExitStack) -> list[Ask]:
        for rank in ranks:
            channel = await stack.enter_async_context(self._dial(rank))
            call = raw_stream_call(channel, LINK_PATH)
            stack.callback(call.cancel)
            self._links[rank] = Link(
                call, rank, self._stages[rank], self._who(rank), self.number, self._own, self._told.moves
            )
        answers = await together(*(self._links[rank].greet(self.generation, self._offers) for rank in ranks))
        asks: list[Ask] = []
        for rank, shards in zip(ranks, answers, strict=True):
            asks = self._pairing.linked(rank, shards)
        return asks

    async def _open_control(self, stack: AsyncExitStack) -> None:
        stage, who = self._stages[0], self._who(Rank(0))
        channel = await stack.enter_async_context(self._dial(Rank(0)))
        opening = pb.ControlOpen(
            generation=self.generation,
            pairing=self.number,
            decoder=self._own.incarnation,
            to_incarnation=stage.incarnation,
        )
        with peer_errors(who):
            self._control_call: ControlCall = PrefillServiceStub(channel).Control()
            stack.callback(self._control_call.cancel)
            await streams.write(self._control_call, pb.ControlRequest(open=opening))
            answer = await streams.read(self._control_call)
        if answer is None or answer.WhichOneof("message") != "opened":
            raise Unavailable(f"{who} did not open the control stream", reason="pairing_lost")

    async def _hold(self) -> None:
        in_memory = sorted(rank for rank, link in self._links.items() if link.in_segment)
        shared = f", KV of ranks {in_memory} in shared memory" if in_memory else ""
        log.info(
            "paired with %s, generation %s, pairing %d%s", self.pipeline, short(self.generation), self.number, shared
        )
        reading = asyncio.ensure_future(self._read_control())
        try:
            await race(
                self._write_control(),
                until(reading),
                self._raise_when_broken(),
                *(link.read_frames(self._told.frame, self._in_flight) for link in self._links.values()),
                *(link.write_credits() for link in self._links.values()),
            )
        except KvmeshError as error:
            self._told.fallen(self)
            if not isinstance(error, Corrupt):  # else rank 0 lives, and has none
                await asyncio.wait([reading], timeout=self._own.watchdog_seconds * LAST_WORDS_SHARE)
            raise
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)

    async def _write_control(self) -> None:
        with peer_errors(self._who(Rank(0))):
            while True:
                await streams.write(self._control_call, await self._control.get())

    async def _read_control(self) -> None:
        with peer_errors(self._who(Rank(0))):
            while (message := await streams.read(self._control_call)) is not None:
                if message.WhichOneof("message") == "refused":
                    self._told.refused(self.number, message.refused)
                else:
                    log.warning("rank 0 sent a control message of an unknown kind")

    async def _raise_when_broken(self) -> None:
        raise await asyncio.shield(self._broken)

    def _dial(self, rank: Rank) -> grpc.aio.Channel:
        own = self._own
        return dial(self._stages[rank].address, watchdog_seconds=own.watchdog_seconds, tls=own.tls)

    def _who(self, rank: Rank) -> str:
        return f"rank {rank} of {self.pipeline}"
