"""A decoder's decode worker: the thread that decodes. What services/decode/worker.py does, without tensors.

Its queue is its own: while it is in a step it takes nothing. Called by the decoder's process when it is woken and at the end of
each step, and by the copier, which hands it rooms; it lets them go through the copier's queue. The witness sees its steps.
"""

from collections import deque
from dataclasses import dataclass, field

from kvmesh.protocol.ids import PageId, RoomId
from simulator.messages import Generate, token_of
from simulator.process import Process


@dataclass(frozen=True, slots=True)
class HandedOver:
    """From the copier: a room decodes from here on."""

    call: Generate
    pages: tuple[PageId, ...]


@dataclass(frozen=True, slots=True)
class CloseRoom:
    """A room is over."""

    room: RoomId


@dataclass(frozen=True, slots=True)
class LetGo:
    """For the copier: the worker is done with a room."""

    room: RoomId


@dataclass(frozen=True, slots=True)
class Woken:
    """There is something in the queue of a worker that rests."""


@dataclass(frozen=True, slots=True)
class DecodeStep:
    """The end of a step: one token for every room that was running when it began."""

    rooms: tuple[RoomId, ...]


@dataclass(frozen=True, slots=True)
class Drawn:
    """The next token of a room."""

    room: RoomId
    token: int
    last: bool


@dataclass(slots=True)
class Running:
    """A room that decodes."""

    call: Generate
    pages: tuple[PageId, ...]
    index: int
    """Of its next token, in the request."""


@dataclass(slots=True)
class DecodeWorker:
    """What the thread owns."""

    handed: deque[HandedOver | CloseRoom] = field(default_factory=deque)
    """Its queue in."""
    running: dict[RoomId, Running] = field(default_factory=dict)

    def post(self, decoder: Process, record: HandedOver | CloseRoom) -> None:
        """Queues a record."""
        self.handed.append(record)
        if not decoder.local["decoding"].items:
            decoder.queue("decoding", Woken())

    def take(self, decoder: Process, item: Woken | DecodeStep) -> None:
        """Ends the step it is in, takes what has come, and begins the next step."""
        if isinstance(item, DecodeStep):
            self._end_step(decoder, item)
        while self.handed:
            self._deal_with(decoder, self.handed.popleft())
        if self.running:
            decoder.world.witness.step_begun(decoder, {room: r.pages for room, r in self.running.items()})
            decoder.queue("decoding", DecodeStep(tuple(self.running)))

    def _deal_with(self, decoder: Process, record: HandedOver | CloseRoom) -> None:
        if isinstance(record, HandedOver):
            call = record.call
            self.running[call.room] = Running(call, record.pages, call.output_index + 1)
        elif record.room in self.running:  # else it has ended, and was let go with its last token
            self._let_go(decoder, record.room)

    def _end_step(self, decoder: Process, step: DecodeStep) -> None:
        decoder.world.witness.step_over(decoder)
        for number in step.rooms:
            room = self.running[number]
            token = token_of(room.call.request, room.index)
            room.index += 1
            last = room.index >= room.call.max_output_len
            if last:
                self._let_go(decoder, number)  # before the report: what follows from that finds the pages let go
            decoder.queue("results", Drawn(number, token, last))

    def _let_go(self, decoder: Process, room: RoomId) -> None:
        del self.running[room]
        decoder.world.witness.let_go(decoder, room)
        decoder.queue("inbox", LetGo(room))
