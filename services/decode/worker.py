"""The decoder's worker: the one thread that owns the model and its pages.

Rooms opening and closing and frames reach it through one queue, in one order; so a page is free the moment its room closed,
and a frame is fenced where it is written. Between two arrivals it decodes: one step, one token for every running room.
"""

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic

import torch
from google.protobuf.message import DecodeError

from kvmesh.errors import KvmeshError
from kvmesh.kv.frames import HEADER_BYTES, FrameHeader, FrameKind, kind_of, open_frame
from kvmesh.model.runner import Runner, Span
from kvmesh.model.sampling import SamplingParams, sample
from kvmesh.protocol.coverage import ShardSpan
from kvmesh.protocol.ids import PageId, PairingNumber, Rank, RoomId
from kvmesh.protocol.receiving import OpenedRoom, Outcome, Receiving
from kvmesh.telemetry import metrics
from kvmesh.v1 import prefill_pb2 as pb
from kvmesh.v1.types_pb2 import FINISH_REASON_LENGTH, FINISH_REASON_STOP, FINISH_REASON_UNSPECIFIED, FinishReason


@dataclass(frozen=True, slots=True)
class OpenRoom:
    """A room holds pages: its KV may be written."""

    room: RoomId
    pairing: PairingNumber
    shards: dict[Rank, tuple[ShardSpan, ...]]
    pages: tuple[PageId, ...]
    prompt_len: int
    cached_len: int
    output_index: int
    """Index in the request of the first token."""
    max_output_len: int
    """Tokens of the whole request."""
    sampling: SamplingParams
    stop_ids: frozenset[int]


@dataclass(frozen=True, slots=True)
class CloseRoom:
    """A room is over: nothing is written or decoded for it from here on."""

    room: RoomId


@dataclass(frozen=True, slots=True)
class FrameArrived:
    """A message of a link, unopened."""

    pairing: PairingNumber
    rank: Rank
    message: bytes | memoryview
    arrived: float
    """Monotonic time."""
    cell: int | None = None
    """Where in the link's segment it stands."""


@dataclass(frozen=True, slots=True)
class Received:
    """A frame was dealt with: that many payload bytes are no longer in flight, and its cell, if it stood in one, is free."""

    pairing: PairingNumber
    rank: Rank
    num_bytes: int
    cell: int | None = None


@dataclass(frozen=True, slots=True)
class FirstTokenArrived:
    """The last rank drew a room's first token."""

    room: RoomId
    arrived: float
    queued_seconds: float


@dataclass(frozen=True, slots=True)
class RoomComplete:
    """Every shard and the first token of a room are here; it decodes."""

    room: RoomId
    complete_at: float
    """When the last of it arrived, however busy the worker was then."""
    written_at: float
    """When all of it was verified and written, both on the monotonic clock."""


@dataclass(frozen=True, slots=True)
class TokenDrawn:
    """The next token of a room; with a finish reason it is the last."""

    room: RoomId
    token: int
    finish_reason: FinishReason.ValueType
    drawn_at: float
    """Monotonic time."""


@dataclass(frozen=True, slots=True)
class RoomBroken:
    """What arrived for a room can't be used: its attempt fails."""

    room: RoomId
    error: KvmeshError


@dataclass(frozen=True, slots=True)
class LinkBroken:
    """A link carries what it must not."""

    pairing: PairingNumber
    error: KvmeshError


@dataclass(frozen=True, slots=True)
class WorkerFailed:
    """The model failed: the process must end."""

    error: BaseException


Report = Received | FirstTokenArrived | RoomComplete | TokenDrawn | RoomBroken | LinkBroken | WorkerFailed


@dataclass(slots=True)
class _Room:
    opened: OpenRoom
    plan: OpenedRoom
    length: int = 0
    """Tokens whose KV is in the pages."""
    output_len: int = 0
    last_token: int = 0


class DecodeWorker:
    """A thread with one queue in."""

    def __init__(self, runner: Runner, receive: Callable[[Report], None]) -> None:
        """Args:
        runner: the whole model and the decoder's pool; from here on only this thread touches it.
        receive: called in this thread with each report; hands it to the event loop.
        """
        self._runner = runner
        self._receive = receive
        self._inbox: deque[OpenRoom | CloseRoom | FrameArrived] = deque()
        self._wake = threading.Condition()
        self._stopping = False
        self._receiving = Receiving()
        self._rooms: dict[RoomId, _Room] = {}
        self._running: dict[RoomId, _Room] = {}
        self._moved_at = monotonic()
        self._idle = True
        self._thread = threading.Thread(target=self._run, name="decode-worker", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    async def stop(self) -> None:
        """Lets the thread end after the step it is in, and waits for it."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        await asyncio.to_thread(self._thread.join)

    def post(self, record: OpenRoom | CloseRoom | FrameArrived) -> None:
        """Queues a record; they are dealt with in the order posted."""
        with self._wake:
            if self._idle and not self._inbox:  # the time it rested is no time without progress
                self._moved_at = monotonic()
            self._inbox.append(record)
            self._wake.notify()

    def age_seconds(self) -> float | None:
        """Time since the worker last moved; None when it owes nothing."""
        return None if self._idle and not self._inbox else monotonic() - self._moved_at

    def _run(self) -> None:
        try:
            while self._wait():
                while self._inbox:
                    self._take(self._inbox.popleft())
                if self._running:
                    self._decode()
        except Exception as error:
            self._receive(WorkerFailed(error))

    def _wait(self) -> bool:
        """Waits until there is something to do; False when stopping."""
        with self._wake:
            self._idle = not (self._running or self._inbox)
            while not (self._inbox or self._running or self._stopping):
                self._wake.wait()
            self._idle = False
            self._moved_at = monotonic()
            return not self._stopping

    def _take(self, record: OpenRoom | CloseRoom | FrameArrived) -> None:
        self._moved_at = monotonic()
        if isinstance(record, OpenRoom):
            plan = self._receiving.open(
                record.room,
                record.pairing,
                record.shards,
                record.pages,
                begin=record.cached_len,
                end=record.prompt_len,
            )
            self._rooms[record.room] = _Room(record, plan, output_len=record.output_index)
        elif isinstance(record, CloseRoom):
            self._forget(record.room)
        else:
            self._frame(record)

    # Frames.

    def _frame(self, arrived: FrameArrived) -> None:
        try:
            header, payload = open_frame(arrived.message)
        except KvmeshError as error:
            _count("corrupt")
            self._receive(LinkBroken(arrived.pairing, error))
            if kind_of(arrived.message) == FrameKind.KV:
                num_bytes = len(arrived.message) - HEADER_BYTES
                self._receive(Received(arrived.pairing, arrived.rank, num_bytes, arrived.cell))
            return
        if header.kind is FrameKind.KV:
            self._receive_kv(arrived, header, payload)
            metrics.KV_RECEIVED_BYTES_TOTAL.inc(len(payload))
            self._receive(Received(arrived.pairing, arrived.rank, len(payload), arrived.cell))
        elif header.kind is FrameKind.FIRST_TOKEN:
            self._receive_first_token(arrived, header, payload)

    def _receive_kv(self, arrived: FrameArrived, header: FrameHeader, payload: memoryview) -> None:
        room, link = RoomId(header.room), (arrived.pairing, arrived.rank)
        piece = ShardSpan(header.layer_begin, header.layer_end, header.head_begin, header.head_end)
        try:
            outcome = self._receiving.frame(
                room, PairingNumber(header.pairing), link, piece, header.token_begin, header.token_end
            )
            if outcome is Outcome.WRITTEN:
                self._runner.pool.write(self._rooms[room].opened.pages, header, payload)
        except KvmeshError as error:
            self._break(room, error)
            return
        _count(outcome.value)
        if outcome is Outcome.WRITTEN:
            self._join_when_complete(self._rooms[room], arrived.arrived)

    def _receive_first_token(self, arrived: FrameArrived, header: FrameHeader, payload: memoryview) -> None:
        room, vocab_size = RoomId(header.room), self._runner.vocab_size
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
        if self._ending(own, token) != FINISH_REASON_UNSPECIFIED:
            self._drew(own, token)  # its first token is its last: it needs no KV
        else:
            self._join_when_complete(own, arrived.arrived)

    def _break(self, room: RoomId, error: KvmeshError) -> None:
        _count("corrupt")
        self._forget(room)
        self._receive(RoomBroken(room, error))

    def _forget(self, room: RoomId) -> None:
        self._receiving.close(room)
        self._rooms.pop(room, None)
        self._running.pop(room, None)

    def _join_when_complete(self, room: _Room, arrived: float) -> None:
        """A complete room decodes. What made it complete arrived last: records are dealt with in that order."""
        plan, opened, first_token = room.plan, room.opened, room.plan.first_token
        if first_token is None or plan.joined or not plan.complete:
            return
        plan.joined = True
        room.length = opened.prompt_len
        self._running[opened.room] = room
        self._receive(RoomComplete(opened.room, arrived, monotonic()))
        self._drew(room, first_token)

    # Decoding.

    def _decode(self) -> None:
        """One step: the KV of each running room's last token is computed, and the next token drawn."""
        began = monotonic()
        rooms = list(self._running.values())
        spans = [Span(pages=r.opened.pages, begin=r.length, end=r.length + 1, sample=True) for r in rooms]
        inputs = torch.tensor([r.last_token for r in rooms], dtype=torch.int64)
        logits = self._runner.forward(spans, inputs, self._moved)
        tokens = sample(logits, [r.opened.sampling for r in rooms], [r.output_len for r in rooms])
        metrics.DECODE_STEP_SECONDS.observe(monotonic() - began)
        metrics.DECODE_BATCH_ROOMS.set(len(rooms))
        metrics.DECODE_TOKENS_TOTAL.inc(len(rooms))
        for room, token in zip(rooms, tokens, strict=True):
            room.length += 1
            self._drew(room, token)

    def _moved(self) -> None:
        self._moved_at = monotonic()

    def _drew(self, room: _Room, token: int) -> None:
        reason = self._ending(room, token)
        room.last_token = token
        room.output_len += 1
        if reason != FINISH_REASON_UNSPECIFIED:
            self._forget(room.opened.room)
        self._receive(TokenDrawn(room.opened.room, token, reason, monotonic()))

    def _ending(self, room: _Room, token: int) -> FinishReason.ValueType:
        """Why the room ends with this token as its next; unspecified when it goes on."""
        if token in room.opened.stop_ids:
            return FINISH_REASON_STOP
        return FINISH_REASON_LENGTH if room.output_len + 1 >= room.opened.max_output_len else FINISH_REASON_UNSPECIFIED


def _count(outcome: str) -> None:
    """A frame was written, or dropped at the write: repeated, late (no such room), foreign (another pairing), corrupt."""
    metrics.FRAMES_TOTAL.labels(outcome=outcome).inc()
