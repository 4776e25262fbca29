"""A decoder's copier: the thread that writes frames into pages. What services/decode/copier.py does, without tensors.

Called by the decoder's process with each item of its one queue; hands rooms to the decode worker, and reports through another
queue. The witness sees what it writes.
"""

from dataclasses import dataclass, field

from kvmesh.errors import KvmeshError
from kvmesh.protocol.coverage import ShardSpan
from kvmesh.protocol.ids import PageId, PairingNumber, Rank, RoomId
from kvmesh.protocol.receiving import OpenedRoom, Outcome, Receiving
from simulator.decode_worker import CloseRoom, DecodeWorker, Drawn, HandedOver, LetGo
from simulator.messages import FirstToken, Frame, Generate
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
class Arrived:
    """A message of a link."""

    link: tuple[PairingNumber, Rank]
    message: Frame | FirstToken


@dataclass(frozen=True, slots=True)
class Complete:
    """A room decodes from here on."""

    room: RoomId


@dataclass(frozen=True, slots=True)
class Broken:
    """What came for a room can't be used."""

    room: RoomId
    reason: str


@dataclass(slots=True)
class Copied:
    """A room at the copier."""

    plan: OpenedRoom[Arrived]
    call: Generate
    num_ranks: int


@dataclass(slots=True)
class Copier:
    """What the thread owns."""

    worker: DecodeWorker
    receiving: Receiving[Arrived] = field(default_factory=Receiving)
    rooms: dict[RoomId, Copied] = field(default_factory=dict)

    def take(self, decoder: Process, item: object) -> None:
        """The next job."""
        match item:
            case OpenRoom(room, pairing, shards, pages, call):
                plan = self.receiving.open(room, pairing, shards, pages, begin=0, end=call.prompt_len)
                self.rooms[room] = Copied(plan, call, len(shards))
                decoder.world.witness.room_opened(decoder, room, pairing, pages)
            case CloseRoom(room):
                self._close(decoder, room)
            case LetGo(room):
                self._forget(decoder, room)
                self._deal_with(decoder, self.receiving.let_go(room))
            case Arrived(link, message):
                if not self.receiving.put_aside(message.room, message.pairing, link, item):
                    self._deal_with(decoder, [item])

    def _close(self, decoder: Process, room: RoomId) -> None:
        self._forget(decoder, room)
        due = self.receiving.close(room)
        if room in self.receiving.held:
            self.worker.post(decoder, CloseRoom(room))
        self._deal_with(decoder, due)

    def _forget(self, decoder: Process, room: RoomId) -> None:
        self.rooms.pop(room, None)
        decoder.world.witness.room_closed(decoder, room)

    def _deal_with(self, decoder: Process, due: list[Arrived]) -> None:
        for arrived in due:
            if isinstance(arrived.message, Frame):
                self._frame(decoder, arrived.link, arrived.message)
            else:
                self._first_token(decoder, arrived.link, arrived.message)

    def _frame(self, decoder: Process, link: tuple[PairingNumber, Rank], frame: Frame) -> None:
        try:
            outcome = self.receiving.frame(frame.room, frame.pairing, link, frame.shard, frame.begin, frame.end)
        except KvmeshError as error:
            self._break(decoder, frame.room, error)
            return
        if outcome is Outcome.WRITTEN:
            room = self.rooms[frame.room]
            decoder.world.witness.wrote(decoder, link, frame, room.plan.pages)
            self._hand_over_when_complete(decoder, room)

    def _first_token(self, decoder: Process, link: tuple[PairingNumber, Rank], first: FirstToken) -> None:
        try:
            outcome = self.receiving.first_token(first.room, first.pairing, link, first.token, VOCABULARY)
        except KvmeshError as error:
            self._break(decoder, first.room, error)
            return
        if outcome is not Outcome.WRITTEN:
            return
        room = self.rooms[first.room]
        if room.call.output_index + 1 >= room.call.max_output_len:  # its first token is its last: it needs no KV
            self._close(decoder, first.room)
            decoder.queue("results", Drawn(first.room, first.token, True))
        else:
            self._hand_over_when_complete(decoder, room)

    def _break(self, decoder: Process, room: RoomId, error: KvmeshError) -> None:
        self._close(decoder, room)
        decoder.queue("results", Broken(room, error.reason))

    def _hand_over_when_complete(self, decoder: Process, room: Copied) -> None:
        first = room.plan.first_token
        if first is None or not self.receiving.hand_over(room.plan):
            return
        decoder.world.witness.handed_over(decoder, room.call, range(room.num_ranks), room.plan.pages)
        decoder.queue("results", Complete(room.call.room))
        decoder.queue("results", Drawn(room.call.room, first, False))
        self.worker.post(decoder, HandedOver(room.call, room.plan.pages))
