"""The decoder's side of one pairing: dials links, last rank first, then control; frames come in, Admit, Drop, Received go out.

`kvmesh.protocol.pairing` says what comes when; this file owns the streams. Called by `pairings.py`. Whole or absent: one stream
lost, and all are closed.
"""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from time import monotonic

import grpc
from google.protobuf.message import DecodeError

from kvmesh.descriptor import KV_WIRE_NAMES, KV_WIRES
from kvmesh.errors import Corrupt, KvmeshError, Misfit, Unavailable
from kvmesh.kv.frames import HEADER_BYTES, FrameHeader, FrameKind, handles_in, kind_of, open_frame, seal, seal_credit
from kvmesh.kv.layout import WireName, is_quantised, is_wire
from kvmesh.kv.segment import Cell, OfferedSegment, Segment
from kvmesh.protocol.coverage import ShardSpan
from kvmesh.protocol.ids import Generation, Incarnation, PairingNumber, Rank, short
from kvmesh.protocol.pairing import Ask, Pairing
from kvmesh.protocol.version import PROTOCOL_VERSION
from kvmesh.rpc import streams
from kvmesh.rpc.channels import dial
from kvmesh.rpc.raw import raw_stream_call
from kvmesh.rpc.status import peer_errors
from kvmesh.rpc.tasks import race, together, until
from kvmesh.rpc.tls import Tls
from kvmesh.telemetry import logs
from kvmesh.v1 import prefill_pb2 as pb
from kvmesh.v1.bootstrap_pb2 import WholePipeline
from kvmesh.v1.prefill_pb2_grpc import PrefillServiceStub
from kvmesh.v1.types_pb2 import Descriptor, Member
from services.decode.in_flight import InFlight
from services.decode.records import FrameArrived, Received
from services.decode.segments import Segments

log = logs.get(__name__)

LAST_WORDS_SHARE = 0.25
"""Of the watchdog's time: a stage's link may break before rank 0 has named the rooms that were in the step it died in."""
LINK_PATH = "/kvmesh.v1.PrefillService/Link"
RawCall = grpc.aio.StreamStreamCall[bytes, bytes]
ControlCall = grpc.aio.StreamStreamCall[pb.ControlRequest, pb.ControlResponse]


@dataclass(frozen=True, slots=True)
class DecoderIdentity:
    """What a decoder is for the life of its process."""

    member: Member
    descriptor: Descriptor
    window_bytes: int
    """KV that each stage may have in flight."""
    watchdog_seconds: float
    in_flight_bytes: int
    """KV of all stages together that may wait for the copier."""
    shared_cells: int = 0
    """Cells of shared memory for each stage on this host."""
    tls: Tls | None = None
    """What stages are dialled with."""
    kv_wire: str = "auto"
    """The format of KV it asks for: auto, int8 or fp8."""

    @property
    def incarnation(self) -> Incarnation:
        """The process's own."""
        return Incarnation(self.member.incarnation)


@dataclass(frozen=True, slots=True)
class Told:
    """Whom a pairing tells."""

    frame: Callable[[FrameArrived], None]
    refused: Callable[[pb.RoomRefused], None]
    standing: Callable[["PairingStreams"], None]


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
        self._links: dict[Rank, RawCall] = {}
        self._segments: dict[Rank, Segment] = {}
        self._wires: dict[Rank, WireName] = {}
        self._lent: dict[Rank, set[int]] = {}
        """Cells that hold frames."""
        self._credits: dict[Rank, asyncio.Queue[Received]] = {}
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
                self._told.standing(self)
                await self._hold()
            finally:
                self._pairing.lost()
                for segment in self._segments.values():
                    segment.close()
        raise Unavailable(f"the pairing with {self.pipeline} ended", reason="pairing_lost")

    def send(self, message: pb.ControlRequest) -> None:
        """Queues a control message; they leave in order."""
        self._control.put_nowait(message)

    def credit(self, dealt: Received) -> None:
        """Lets a stage send as much again."""
        self._credits[dealt.rank].put_nowait(dealt)

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
            self._links[rank] = call
        answers = await together(*(self._greet(rank) for rank in ranks))
        asks: list[Ask] = []
        for rank, shards in zip(ranks, answers, strict=True):
            asks = self._pairing.linked(rank, shards)
        return asks

    async def _greet(self, rank: Rank) -> list[ShardSpan]:
        """HELLO out, WELCOME in."""
        offered = self._offers.offer()
        try:
            welcome = await self._exchange_greetings(rank, offered)
            self._wires[rank] = self._told_wire(rank, welcome)
            if offered is not None and welcome.in_segment:
                self._segments[rank] = self._offers.take(offered)
        finally:
            if offered is not None:
                offered.close()
        self._credits[rank], self._lent[rank] = asyncio.Queue(), set()
        layers = welcome.layers
        return [ShardSpan(layers.begin, layers.end, heads.begin, heads.end) for heads in welcome.heads]

    async def _exchange_greetings(self, rank: Rank, offered: OfferedSegment | None) -> pb.LinkWelcome:
        own, stage, call = self._own, self._stages[rank], self._links[rank]
        hello = pb.LinkHello(
            protocol_version=PROTOCOL_VERSION,
            generation=self.generation,
            pairing=self.number,
            decoder=own.incarnation,
            to_incarnation=stage.incarnation,
            descriptor=own.descriptor,
            window_bytes=own.window_bytes,
            segment=pb.SegmentOffer(**offered.offer._asdict()) if offered is not None else None,
            kv_wire=KV_WIRES[own.kv_wire] if is_wire(own.kv_wire) else pb.KV_WIRE_UNSPECIFIED,
        )
        with peer_errors(self._who(rank)):
            await streams.write(call, seal(FrameHeader(FrameKind.HELLO), hello.SerializeToString()))
            answer = await streams.read(call)
        if answer is None:
            raise Unavailable(f"{self._who(rank)} closed the link", reason="link_lost")
        header, payload = open_frame(answer)
        try:
            welcome = pb.LinkWelcome.FromString(bytes(payload))
        except DecodeError as error:
            raise Corrupt(f"{self._who(rank)} sent a damaged WELCOME", reason="welcome") from error
        if header.kind is not FrameKind.WELCOME or (welcome.stage, welcome.rank) != (stage.incarnation, rank):
            raise Misfit(f"another process than {self._who(rank)} answered its link")
        return welcome

    def _told_wire(self, rank: Rank, welcome: pb.LinkWelcome) -> WireName:
        """The format in which the stage will send KV.

        Raises:
            Misfit: it is another than this decoder asked for, or one that it can't read.
        """
        asked, told = self._own.kv_wire, KV_WIRE_NAMES.get(welcome.kv_wire, str(welcome.kv_wire))
        if not is_wire(told) or (told != asked and (asked != "auto" or is_quantised(told))):
            raise Misfit(f"kv_wire: decoder asks for {asked}, {self._who(rank)} sends {told}")
        return told

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
        shared = f", KV of ranks {sorted(self._segments)} in shared memory" if self._segments else ""
        log.info(
            "paired with %s, generation %s, pairing %d%s", self.pipeline, short(self.generation), self.number, shared
        )
        reading = asyncio.ensure_future(self._read_control())
        try:
            await race(
                self._write_control(),
                until(reading),
                self._raise_when_broken(),
                *(self._read_frames(rank) for rank in self._links),
                *(self._write_credits(rank) for rank in self._links),
            )
        except KvmeshError:
            await asyncio.wait([reading], timeout=self._own.watchdog_seconds * LAST_WORDS_SHARE)
            raise
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)

    async def _read_frames(self, rank: Rank) -> None:
        call, segment, lent = self._links[rank], self._segments.get(rank), self._lent[rank]
        in_flight, wire = self._in_flight, self._wires[rank]
        with peer_errors(self._who(rank)):
            while (message := await streams.read(call)) is not None:
                arrived = monotonic()
                kind = kind_of(message)
                if kind == FrameKind.IN_CELLS and segment is not None:
                    for frame in frames_in(segment, message, lent):
                        self._told.frame(FrameArrived(self.number, rank, frame.memory, arrived, wire, frame.number))
                    continue
                self._told.frame(FrameArrived(self.number, rank, message, arrived, wire))
                if kind == FrameKind.KV:
                    in_flight.took(len(message) - HEADER_BYTES)
                    await in_flight.below_limit()

    async def _write_credits(self, rank: Rank) -> None:
        call, due = self._links[rank], self._credits[rank]
        with peer_errors(self._who(rank)):
            while True:
                dealt = [await due.get()]
                while not due.empty():
                    dealt.append(due.get_nowait())
                cells = [d.cell for d in dealt if d.cell is not None]
                self._lent[rank].difference_update(cells)
                num_bytes = sum(d.num_bytes for d in dealt if d.cell is None)
                await streams.write(call, seal_credit(num_bytes, cells, pairing=self.number))

    async def _write_control(self) -> None:
        with peer_errors(self._who(Rank(0))):
            while True:
                await streams.write(self._control_call, await self._control.get())

    async def _read_control(self) -> None:
        with peer_errors(self._who(Rank(0))):
            while (message := await streams.read(self._control_call)) is not None:
                if message.WhichOneof("message") == "refused":
                    self._told.refused(message.refused)
                else:
                    log.warning("rank 0 sent a control message of an unknown kind")

    async def _raise_when_broken(self) -> None:
        raise await self._broken

    def _dial(self, rank: Rank) -> grpc.aio.Channel:
        own = self._own
        return dial(self._stages[rank].address, watchdog_seconds=own.watchdog_seconds, tls=own.tls)

    def _who(self, rank: Rank) -> str:
        return f"rank {rank} of {self.pipeline}"


def frames_in(segment: Segment, message: bytes, lent: set[int]) -> Iterator[Cell]:
    """The frames that handles name, as they stand in their cells.

    Args:
        lent: cells that the stage may not name, since the decoder has not given them back; these are added.

    Raises:
        Corrupt: the message is damaged, or names what is no cell, or no free one.
    """
    _, payload = open_frame(message)
    for handle in handles_in(payload):
        cell = segment.cell(handle.cell)
        if cell.number in lent:
            raise Corrupt(f"cell {cell.number} is named again before it was given back", reason="frame")
        lent.add(cell.number)
        if handle.num_bytes > len(cell.memory):
            raise Corrupt(f"a frame of {handle.num_bytes} bytes in a cell of {len(cell.memory)}", reason="frame")
        frame = Cell(cell.number, cell.memory[: handle.num_bytes])
        if kind_of(frame.memory) != FrameKind.KV:
            raise Corrupt(f"what stands in cell {cell.number} is no KV frame", reason="frame")
        yield frame
