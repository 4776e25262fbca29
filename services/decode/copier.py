"""The decoder's copier: the thread that verifies frames and writes them into pages, while the decode worker computes.

Rooms opening and closing, frames, and the rooms that the worker lets go reach it through one queue, in one order; so a frame is
fenced where it is written. Whose pages are whose, `kvmesh.protocol.receiving` says; a room that is complete is handed over.
"""

from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic

from google.protobuf.message import DecodeError

from kvmesh.errors import Corrupt, KvmeshError
from kvmesh.kv.frames import HEADER_BYTES, FrameHeader, FrameKind, kind_of, open_frame
from kvmesh.kv.pool import PagePool
from kvmesh.protocol.coverage import ShardSpan
from kvmesh.protocol.ids import PairingNumber, RoomId
from kvmesh.protocol.receiving import Outcome, Receiving
from kvmesh.telemetry import metrics
from kvmesh.v1 import prefill_pb2 as pb
from kvmesh.v1.types_pb2 import FINISH_REASON_UNSPECIFIED, FinishReason
from services.decode.records import (
    CloseRoom,
    FirstTokenArrived,
    FrameArrived,
    HandedOver,
    LetGo,
    LinkBroken,
    OpenRoom,
    Receive,
    Received,
    RoomBroken,
    RoomComplete,
    TokenDrawn,
)


@dataclass(frozen=True, slots=True)
class _Opened:
    """A message that was verified."""

    arrived: FrameArrived
    header: FrameHeader
    payload: memoryview


class Copier:
    """What the thread does with each record."""

    def __init__(
        self,
        pool: PagePool,
        vocab_size: int,
        tell_worker: Callable[[HandedOver | CloseRoom], None],
        receive: Receive,
        moved: Callable[[], None],
    ) -> None:
        """Args:
        pool: the decoder's; only pages that belong to the copier are written.
        tell_worker: posts to the decode worker.
        moved: called after every frame: many may be due at once.
        """
        self._pool = pool
        self._vocab_size = vocab_size
        self._tell_worker, self._moved = tell_worker, moved
        self._receive = receive
        self._receiving: Receiving[_Opened] = Receiving()
        self._rooms: dict[RoomId, OpenRoom] = {}

    @property
    def is_idle(self) -> bool:
        """No room is left here, nor any page that the worker holds."""
        return not (self._rooms or self._receiving.rooms or self._receiving.held)

    def take(self, record: OpenRoom | CloseRoom | FrameArrived | LetGo) -> None:
        """The next record."""
        if isinstance(record, FrameArrived):
            self._verify(record)
        elif isinstance(record, OpenRoom):
            self._rooms[record.room] = record
            self._receiving.open(
                record.room,
                record.pairing,
                record.shards,
                record.pages,
                begin=record.cached_len,
                end=record.prompt_len,
            )
        elif isinstance(record, CloseRoom):
            self._close(record.room)
        else:
            self._rooms.pop(record.room, None)
            self._deal_with(self._receiving.let_go(record.room))

    def _close(self, room: RoomId) -> None:
        self._rooms.pop(room, None)
        due = self._receiving.close(room)
        if room in self._receiving.held:
            self._tell_worker(CloseRoom(room))
        self._deal_with(due)

    # Frames.

    def _verify(self, arrived: FrameArrived) -> None:
        try:
            header, payload = open_frame(arrived.message)
        except KvmeshError as error:
            self._break_link(arrived, error)
            return
        if header.kind not in (FrameKind.KV, FrameKind.FIRST_TOKEN):
            self._break_link(arrived, Corrupt(f"a stage sent {header.kind.name}", reason="frame"))
            return
        if header.kind is FrameKind.KV and header.dtype != arrived.wire:
            self._break_link(
                arrived, Corrupt(f"KV came as {header.dtype}, it was to come as {arrived.wire}", reason="frame")
            )
            return
        opened = _Opened(arrived, header, payload)
        link = (arrived.pairing, arrived.rank)
        if not self._receiving.put_aside(RoomId(header.room), PairingNumber(header.pairing), link, opened):
            self._deal_with([opened])

    def _break_link(self, arrived: FrameArrived, error: KvmeshError) -> None:
        _count("corrupt")
        self._receive(LinkBroken(arrived.pairing, error))
        if kind_of(arrived.message) == FrameKind.KV:
            self._dealt_with(arrived, len(arrived.message) - HEADER_BYTES)

    def _deal_with(self, due: list[_Opened]) -> None:
        for opened in due:
            arrived, header, payload = opened.arrived, opened.header, opened.payload
            if header.kind is FrameKind.KV:
                self._receive_kv(arrived, header, payload)
                metrics.KV_RECEIVED_BYTES_TOTAL.inc(len(payload))
                self._dealt_with(arrived, len(payload))
            else:
                self._receive_first_token(arrived, header, payload)
            self._moved()

    def _dealt_with(self, arrived: FrameArrived, num_bytes: int) -> None:
        self._receive(Received(arrived.pairing, arrived.rank, num_bytes, arrived.cell))

    def _receive_kv(self, arrived: FrameArrived, header: FrameHeader, payload: memoryview) -> None:
        room, link = RoomId(header.room), (arrived.pairing, arrived.rank)
        piece = ShardSpan(header.layer_begin, header.layer_end, header.head_begin, header.head_end)
        try:
            outcome = self._receiving.frame(
                room, PairingNumber(header.pairing), link, piece, header.token_begin, header.token_end
            )
            if outcome is Outcome.WRITTEN:
                self._pool.write(self._rooms[room].pages, header, payload)
        except KvmeshError as error:
            self._break(room, error)
            return
        _count(outcome.value)
        if outcome is Outcome.WRITTEN:
            self._hand_over_when_complete(self._rooms[room], arrived.arrived)

    def _receive_first_token(self, arrived: FrameArrived, header: FrameHeader, payload: memoryview) -> None:
        room, vocab_size = RoomId(header.room), self._vocab_size
        try:
            record = pb.FirstToken.FromString(bytes(payload))
        except DecodeError:
            record = pb.FirstToken(token=vocab_size)  # no token: refused below
        link, token = (arrived.pairing, arrived.rank), record.token
        try:
            outcome = self._receiving.first_token(room, PairingNumber(header.pairing), link, token, vocab_size)
        except KvmeshError as error:
            self._break(room, error)
            return
        if outcome is not Outcome.WRITTEN:
            _count(outcome.value)
            return
        self._receive(FirstTokenArrived(room, arrived.arrived, record.queued.ToNanoseconds() / 1e9))
        own = self._rooms[room]
        reason = own.ending(token, own.output_index)
        if reason != FINISH_REASON_UNSPECIFIED:  # its first token is its last: it needs no KV
            self._close(room)
            self._drew(room, token, reason)
        else:
            self._hand_over_when_complete(own, arrived.arrived)

    def _break(self, room: RoomId, error: KvmeshError) -> None:
        _count("corrupt")
        self._close(room)
        self._receive(RoomBroken(room, error))

    def _hand_over_when_complete(self, room: OpenRoom, arrived: float) -> None:
        """A complete room decodes. What made it complete arrived last: frames are dealt with in that order."""
        plan = self._receiving.rooms[room.room]
        if plan.first_token is None or not self._receiving.hand_over(plan):
            return
        self._receive(RoomComplete(room.room, arrived, monotonic()))
        self._drew(room.room, plan.first_token, FINISH_REASON_UNSPECIFIED)  # before the worker draws the next
        self._tell_worker(HandedOver(room, plan.first_token))

    def _drew(self, room: RoomId, token: int, reason: FinishReason.ValueType) -> None:
        self._receive(TokenDrawn(room, token, reason, monotonic()))


def _count(outcome: str) -> None:
    """A frame was written, or dropped at the write: repeated, late (no such room), foreign (another pairing), corrupt."""
    metrics.FRAMES_TOTAL.labels(outcome=outcome).inc()
