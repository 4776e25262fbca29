"""A decoder's worker: the thread that owns its pages. What services/decode/worker.py does, without tensors.

Called by the decoder's process with each item of its one queue; reports through another. The witness sees what it writes.
"""

from dataclasses import dataclass, field

from kvmesh.errors import KvmeshError
from kvmesh.protocol.coverage import ShardSpan
from kvmesh.protocol.ids import PageId, PairingNumber, Rank, RoomId
from kvmesh.protocol.receiving import OpenedRoom, Outcome, Receiving
from simulator.messages import FirstToken, Frame, Generate, token_of
from simulator.process import Process

VOCABULARY = 1000


@dataclass(frozen=True, slots=True)
class OpenRoom:
    """A room holds pages."""

    room: RoomId
    pairing: PairingNumber
    shards: dict[Rank, tuple[ShardSpan, ...]]
    pages: tuple[PageId, ...]
    call: Generate


@dataclass(frozen=True, slots=True)
class CloseRoom:
    """A room is over."""

    room: RoomId


@dataclass(frozen=True, slots=True)
class Arrived:
    """A message of a link."""

    link: tuple[PairingNumber, Rank]
    message: Frame | FirstToken


@dataclass(frozen=True, slots=True)
class DecodeStep:
    """One token for every running room."""


@dataclass(frozen=True, slots=True)
class Complete:
    """A room joined the decode batch."""

    room: RoomId


@dataclass(frozen=True, slots=True)
class Drawn:
    """The next token of a room."""

    room: RoomId
    token: int
    last: bool


@dataclass(frozen=True, slots=True)
class Broken:
    """What came for a room can't be used."""

    room: RoomId
    reason: str


@dataclass(slots=True)
class Running:
    """A room at the worker."""

    plan: OpenedRoom
    call: Generate
    index: int
    """Of its next token, in the request."""
    num_ranks: int


@dataclass(slots=True)
class DecodeWorker:
    """What the thread owns."""

    receiving: Receiving = field(default_factory=Receiving)
    rooms: dict[RoomId, Running] = field(default_factory=dict)
    stepping: bool = False
    """A decode step is in the queue."""

    def take(self, decoder: Process, item: object) -> None:
        """The next job."""
        match item:
            case OpenRoom(room, pairing, shards, pages, call):
                plan = self.receiving.open(room, pairing, shards, pages, begin=0, end=call.prompt_len)
                self.rooms[room] = Running(plan, call, call.output_index, len(shards))
                decoder.world.witness.room_opened(decoder, room, pairing, pages)
            case CloseRoom(room):
                self._forget(decoder, room)
            case Arrived(link, Frame() as frame):
                self._frame(decoder, link, frame)
            case Arrived(link, FirstToken() as first):
                self._first_token(decoder, link, first)
            case DecodeStep():
                self._decode(decoder)

    def _frame(self, decoder: Process, link: tuple[PairingNumber, Rank], frame: Frame) -> None:
        try:
            outcome = self.receiving.frame(frame.room, frame.pairing, link, frame.shard, frame.begin, frame.end)
        except KvmeshError as error:
            self._break(decoder, frame.room, error)
            return
        if outcome is Outcome.WRITTEN:
            room = self.rooms[frame.room]
            decoder.world.witness.wrote(decoder, link, frame, room.plan.pages)
            self._join_when_complete(decoder, room)

    def _first_token(self, decoder: Process, link: tuple[PairingNumber, Rank], first: FirstToken) -> None:
        try:
            outcome = self.receiving.first_token(first.room, first.pairing, link, first.token, VOCABULARY)
        except KvmeshError as error:
            self._break(decoder, first.room, error)
            return
        if outcome is not Outcome.WRITTEN:
            return
        room = self.rooms[first.room]
        if room.index + 1 >= room.call.max_output_len:
            self._draw(decoder, room, first.token)  # its first token is its last: it needs no KV
        else:
            self._join_when_complete(decoder, room)

    def _break(self, decoder: Process, room: RoomId, error: KvmeshError) -> None:
        self._forget(decoder, room)
        decoder.queue("results", Broken(room, error.reason))

    def _forget(self, decoder: Process, room: RoomId) -> None:
        self.receiving.close(room)
        self.rooms.pop(room, None)
        decoder.world.witness.room_closed(decoder, room)

    def _join_when_complete(self, decoder: Process, room: Running) -> None:
        first = room.plan.first_token
        if first is None or room.plan.joined or not room.plan.complete:
            return
        room.plan.joined = True
        decoder.world.witness.joined(decoder, room.call, range(room.num_ranks))
        decoder.queue("results", Complete(room.call.room))
        self._draw(decoder, room, first)

    def _draw(self, decoder: Process, room: Running, token: int) -> None:
        room.index += 1
        last = room.index >= room.call.max_output_len
        if last:
            self._forget(decoder, room.call.room)
        decoder.queue("results", Drawn(room.call.room, token, last))
        self._step_again(decoder)

    def _step_again(self, decoder: Process) -> None:
        if not self.stepping and any(r.plan.joined for r in self.rooms.values()):
            self.stepping = True
            decoder.queue("decoding", DecodeStep())

    def _decode(self, decoder: Process) -> None:
        self.stepping = False
        for room in [r for r in self.rooms.values() if r.plan.joined]:
            self._draw(decoder, room, token_of(room.call.request, room.index))
        self._step_again(decoder)
