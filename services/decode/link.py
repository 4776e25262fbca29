"""One link of a pairing, at the decoder: its greeting, frames in, credit out. Made and raced by `links.py`.

What comes is handed on unopened; what a stage may have in flight is bounded by its window or by its cells.
"""

import asyncio
from collections.abc import Callable, Iterator
from time import monotonic

import grpc
from google.protobuf.message import DecodeError

from kvmesh.descriptor import KV_WIRE_NAMES, KV_WIRES
from kvmesh.errors import Corrupt, Misfit, Unavailable
from kvmesh.kv.frames import HEADER_BYTES, FrameHeader, FrameKind, handles_in, kind_of, open_frame, seal, seal_credit
from kvmesh.kv.layout import WireName, is_quantised, is_wire
from kvmesh.kv.segment import Cell, OfferedSegment, Segment
from kvmesh.protocol.coverage import ShardSpan
from kvmesh.protocol.ids import Generation, PairingNumber, Rank
from kvmesh.protocol.version import PROTOCOL_VERSION
from kvmesh.rpc import streams
from kvmesh.rpc.status import peer_errors
from kvmesh.v1 import prefill_pb2 as pb
from kvmesh.v1.types_pb2 import Member
from services.decode.identity import DecoderIdentity
from services.decode.in_flight import InFlight
from services.decode.records import FrameArrived, Received
from services.decode.segments import Segments

RawCall = grpc.aio.StreamStreamCall[bytes, bytes]

BEATS = 4
"""In the watchdog's time: how often a stage hears of a decoder that owes it credit."""


class Link:
    """The stream of raw bytes to one stage."""

    def __init__(
        self,
        call: RawCall,
        rank: Rank,
        stage: Member,
        who: str,
        number: PairingNumber,
        own: DecoderIdentity,
        moves: Callable[[], bool],
    ) -> None:
        """Args:
        stage: who is to answer, named `who` in errors.
        number: the pairing's.
        moves: whether the decoder's threads move.
        """
        self._call, self._rank, self._stage, self._who = call, rank, stage, who
        self._number, self._own, self._moves = number, own, moves
        self._segment: Segment | None = None
        self._lent: set[int] = set()
        """Cells that hold frames."""
        self._due: asyncio.Queue[Received] = asyncio.Queue()
        self._owed = 0
        """KV frames that were read and not credited."""

    @property
    def in_segment(self) -> bool:
        """Whether its KV comes in shared memory."""
        return self._segment is not None

    async def greet(self, generation: Generation, offers: Segments) -> list[ShardSpan]:
        """HELLO out, WELCOME in. Returns what the stage will send.

        Raises:
            Misfit: another process answered, or one whose KV this decoder can't read.
            KvmeshError: the stage refuses, or is lost.
        """
        offered = offers.offer()
        try:
            welcome = await self._exchange(generation, offered)
            self._wire = self._told_wire(welcome)
            if offered is not None and welcome.in_segment:
                self._segment = offers.take(offered)
        finally:
            if offered is not None:
                offered.close()
        layers = welcome.layers
        return [ShardSpan(layers.begin, layers.end, heads.begin, heads.end) for heads in welcome.heads]

    async def _exchange(self, generation: Generation, offered: OfferedSegment | None) -> pb.LinkWelcome:
        own, stage, call = self._own, self._stage, self._call
        hello = pb.LinkHello(
            protocol_version=PROTOCOL_VERSION,
            generation=generation,
            pairing=self._number,
            decoder=own.incarnation,
            to_incarnation=stage.incarnation,
            descriptor=own.descriptor,
            window_bytes=own.window_bytes,
            segment=pb.SegmentOffer(**offered.offer._asdict()) if offered is not None else None,
            kv_wire=KV_WIRES[own.kv_wire] if is_wire(own.kv_wire) else pb.KV_WIRE_UNSPECIFIED,
        )
        with peer_errors(self._who):
            await streams.write(call, seal(FrameHeader(FrameKind.HELLO), hello.SerializeToString()))
            answer = await streams.read(call)
        if answer is None:
            raise Unavailable(f"{self._who} closed the link", reason="link_lost")
        header, payload = open_frame(answer)
        try:
            welcome = pb.LinkWelcome.FromString(bytes(payload))
        except DecodeError as error:
            raise Corrupt(f"{self._who} sent a damaged WELCOME", reason="welcome") from error
        if header.kind is not FrameKind.WELCOME or (welcome.stage, welcome.rank) != (stage.incarnation, self._rank):
            raise Misfit(f"another process than {self._who} answered its link")
        return welcome

    def _told_wire(self, welcome: pb.LinkWelcome) -> WireName:
        """The format in which the stage will send KV.

        Raises:
            Misfit: it is another than this decoder asked for, or one that it can't read.
        """
        asked, told = self._own.kv_wire, KV_WIRE_NAMES.get(welcome.kv_wire, str(welcome.kv_wire))
        if not is_wire(told) or (told != asked and (asked != "auto" or is_quantised(told))):
            raise Misfit(f"kv_wire: decoder asks for {asked}, {self._who} sends {told}")
        return told

    async def read_frames(self, frame: Callable[[FrameArrived], None], in_flight: InFlight) -> None:
        """Hands on what comes, until the stage ends the stream.

        Raises:
            Corrupt: the stage names cells that it may not.
            KvmeshError: the stream broke.
        """
        with peer_errors(self._who):
            while (message := await streams.read(self._call)) is not None:
                arrived, kind = monotonic(), kind_of(message)
                if kind == FrameKind.IN_CELLS and self._segment is not None:
                    for cell in frames_in(self._segment, message, self._lent):
                        self._owed += 1
                        frame(self._arrived(cell.memory, arrived, cell.number))
                    continue
                frame(self._arrived(message, arrived))
                if kind == FrameKind.KV:
                    self._owed += 1
                    in_flight.took(len(message) - HEADER_BYTES)
                    await in_flight.below_limit()

    def _arrived(self, message: bytes | memoryview, at: float, cell: int | None = None) -> FrameArrived:
        return FrameArrived(self._number, self._rank, message, at, self._wire, cell)

    def credit(self, dealt: Received) -> None:
        """A frame was dealt with: the stage may send as much again."""
        self._due.put_nowait(dealt)

    async def write_credits(self) -> None:
        """Gives back what was dealt with; while nothing is, and something is owed, a stage hears that this is no standstill.

        KV for pages that a long decode step still holds is put aside that long, without credit.

        Raises:
            KvmeshError: the stream broke.
        """
        with peer_errors(self._who):
            while True:
                dealt = await self._dealt()
                if not dealt and not (self._owed and self._moves()):
                    continue
                cells = [d.cell for d in dealt if d.cell is not None]
                num_bytes = sum(d.num_bytes for d in dealt if d.cell is None)
                self._lent.difference_update(cells)
                self._owed -= len(dealt)
                await streams.write(self._call, seal_credit(num_bytes, cells, pairing=self._number))

    async def _dealt(self) -> list[Received]:
        """What is due together; nothing after a beat without."""
        try:
            async with asyncio.timeout(self._own.watchdog_seconds / BEATS):
                dealt = [await self._due.get()]
        except TimeoutError:
            return []
        while not self._due.empty():
            dealt.append(self._due.get_nowait())
        return dealt

    def close(self) -> None:
        """The pairing is over."""
        if self._segment is not None:
            self._segment.close()


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
