"""The witness: sees everything that happens, keeps its own books, and raises when an invariant of docs/protocol.md §5 breaks.

Its books are made from what is said and done, never from the machines' own state: one that is wrong about itself is found.
Invariants by number: 1 equal logs, 2 nothing untold, 3 one holder a page, 4 no foreign write, 5 one end and each token once,
6 everything ends and all is idle, 8 nothing delays an admission, 9 last rank first.
"""

from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from kvmesh.errors import KvmeshError
from kvmesh.protocol.head_room import RoomState
from kvmesh.protocol.ids import Generation, PageId, PairingKey, PairingNumber, Rank, RoomId, short
from kvmesh.protocol.pages import pages_for
from kvmesh.protocol.scheduler import Scheduler
from kvmesh.protocol.steps import RoomAdmitted, Step
from simulator.clients import ClientBooks
from simulator.messages import Forwarded, Frame, Generate
from simulator.violation import Violation

NOTES_KEPT = 200_000
"""Of the timeline: a failing run is shrunk before it is read."""


@dataclass(slots=True)
class StageBooks:
    """One stage in one generation."""

    generation: Generation
    pipeline: str
    num_steps: int = 0
    rooms: dict[RoomId, tuple[PageId, ...]] = field(default_factory=dict)
    holders: dict[PageId, RoomId] = field(default_factory=dict)


@dataclass(slots=True)
class DecoderBooks:
    """One decoder's threads."""

    pairings: dict[RoomId, PairingNumber] = field(default_factory=dict)
    owners: dict[PageId, RoomId] = field(default_factory=dict)
    arrived: dict[RoomId, Counter[tuple[Rank, int]]] = field(default_factory=dict)
    at_worker: dict[RoomId, tuple[PageId, ...]] = field(default_factory=dict)
    """Rooms that were handed to the decode worker, until it said that it let them go."""
    in_step: dict[RoomId, tuple[PageId, ...]] = field(default_factory=dict)
    """Rooms of the decode step that is under way: it reads and writes their pages, whatever was said."""


class Witness(ClientBooks):
    """Sees one world."""

    def __init__(self) -> None:
        super().__init__()
        self.notes: deque[tuple[float, str, str, tuple[int, ...]]] = deque(maxlen=NOTES_KEPT)
        self.noting = True
        self.logs: dict[Generation, list[bytes]] = {}
        """What rank 0 wrote."""
        self.admitted: dict[Generation, dict[RoomId, RoomAdmitted]] = {}
        """What it wrote of rooms that have not ended."""
        self.stages: dict[int, StageBooks] = {}
        """By incarnation."""
        self.decoders: dict[int, DecoderBooks] = {}
        self.begun: set[tuple[Generation, Rank]] = set()
        """Who has ever served in a generation."""
        self.linked: set[tuple[PairingKey, Rank]] = set()
        """Who has ever linked for a pairing."""

    # The timeline.

    def note(self, process: Any, text: str, *keys: int) -> None:
        """Something happened, for people."""
        if self.noting:
            self.notes.append((process.now, process.name, text, keys))

    def died(self, process: Any) -> None:
        """A process is gone, and with it all its pages."""
        self.note(process, "is gone")
        self.stages.pop(process.incarnation, None)
        self.decoders.pop(process.incarnation, None)

    def heard(self, process: Any, stream: Any, item: object) -> None:
        """A message, or an end, was taken up."""
        if self.noting:
            self.notes.append((process.now, process.name, f"← {stream.name}: {item}", tuple(rooms_in(item))))

    def life_over(self, process: Any, error: KvmeshError) -> None:
        """A stage's life ended."""
        self.note(process, f"its life is over: {error.message}", process.life.generation)
        if self.calm and process.life.serving and process.life.rank == 0:
            said = f"generation {short(process.life.generation)} ended by {error.message!r}, and nothing had gone wrong"
            raise Violation(6, said, process.life.generation)

    # Last rank first (9).

    def life_begun(self, process: Any, generation: Generation) -> None:
        """A stage serves from here on."""
        life = process.life
        missing = [r for r in range(1, life.pp_size) if (generation, r) not in self.begun] if life.rank == 0 else []
        if missing:
            said = f"rank 0 of {life.pipeline} serves generation {short(generation)}, ranks {missing} never did"
            raise Violation(9, said, generation)
        self.begun.add((generation, life.rank))

    def link_opened(self, process: Any, key: PairingKey) -> None:
        """A stage can reach a decoder from here on."""
        self.linked.add((key, process.life.rank))

    def control_opened(self, process: Any, key: PairingKey) -> None:
        """Rank 0 takes rooms of a pairing from here on."""
        missing = [r for r in range(process.life.pp_size) if (key, r) not in self.linked]
        if missing:
            raise Violation(9, f"pairing {key[1]} of decoder {key[0]} stands, ranks {missing} never linked", key[0])

    # Admission (8).

    def reserved(self, process: Any, generate: Generate) -> None:
        """A decoder holds the pages of a room, and asks rank 0 next."""
        self.held(process, generate)
        self.note(process, f"room {short(generate.room)} has its pages", generate.room)

    def pumped(self, process: Any, scheduler: Scheduler) -> None:
        """Rank 0 wrote all steps it would. A room that waits alone waits for pages, or for a place in flight, or for its
        decoder's share; what is held, the log says."""
        waiting = [r for r, state in scheduler.states.items() if state is RoomState.WAITING]
        if len(waiting) != 1 or not scheduler.may_write:
            return
        limits, held = scheduler.limits, self.admitted.get(process.part.number, {})
        (room,) = waiting
        free = limits.num_pages - sum(len(entry.pages) for entry in held.values())
        need = pages_for(process.part.head.prompts[room].prompt_len, limits.page_size)
        if need <= free and (not held or len(process.part.head.controls) == 1):
            raise Violation(8, f"rank 0 lets room {short(room)} wait, and nothing is in its way", room)

    def written(self, process: Any, step: Step) -> None:
        """Rank 0 wrote a step."""
        generation = process.part.number
        log, admitted = self.logs.setdefault(generation, []), self.admitted.setdefault(generation, {})
        if step.number != len(log):
            raise Violation(1, f"rank 0 wrote step {step.number} after {len(log)} steps", generation)
        log.append(step.canonical())
        self.note(process, f"writes {step}", *(e.room for e in step.entries), *(w.room for w in step.work))
        for entry in step.entries:
            if isinstance(entry, RoomAdmitted):
                admitted[entry.room] = entry
            else:
                admitted.pop(entry.room, None)
        for work in step.work:
            self.served(process, work.room)

    # Stages (1, 2, 3).

    def log_begun(self, process: Any, generation: Generation) -> None:
        """A stage's worker forgot its log, and begins another."""
        self.stages[process.incarnation] = StageBooks(generation, process.shape.pipeline)

    def applied(self, process: Any, step: Step) -> None:
        """A stage's worker applied a step."""
        books = self.stages[process.incarnation]
        log = self.logs.get(books.generation, [])
        if step.number >= len(log) or log[step.number] != step.canonical() or step.number != books.num_steps:
            said = f"{process.name} applied {step} as step {books.num_steps}, rank 0 wrote another"
            raise Violation(1, said, books.generation)
        books.num_steps += 1
        for entry in step.entries:
            if isinstance(entry, RoomAdmitted):
                self._hold(process, books, entry)
            elif entry.room in books.rooms:
                for page in books.rooms.pop(entry.room):
                    del books.holders[page]
            else:
                raise Violation(2, f"{process.name} ended room {short(entry.room)}, which it never had", entry.room)
        for work in step.work:
            if work.room not in books.rooms:
                said = f"{process.name} computed for room {short(work.room)}, which it was not told of"
                raise Violation(2, said, work.room)

    def _hold(self, process: Any, books: StageBooks, entry: RoomAdmitted) -> None:
        for page in entry.pages:
            if page in books.holders:
                said = f"{process.name} gave page {page} of room {short(books.holders[page])} to {short(entry.room)}"
                raise Violation(3, said, entry.room, books.holders[page])
            books.holders[page] = entry.room
        books.rooms[entry.room] = entry.pages

    # Decoders (3, 4).

    def _books(self, process: Any) -> DecoderBooks:
        return self.decoders.setdefault(process.incarnation, DecoderBooks())

    def room_opened(self, process: Any, room: RoomId, pairing: PairingNumber, pages: tuple[PageId, ...]) -> None:
        """A decoder's copier knows of a room and its pages from here on."""
        books = self._books(process)
        for page in pages:
            if page in books.owners:
                said = f"{process.name} gave page {page} of room {short(books.owners[page])} to {short(room)}"
                raise Violation(3, said, room, books.owners[page])
            books.owners[page] = room
        books.pairings[room] = pairing
        books.arrived[room] = Counter()

    def room_closed(self, process: Any, room: RoomId) -> None:
        """A decoder's copier writes nothing for a room from here on."""
        books = self._books(process)
        books.pairings.pop(room, None)
        books.arrived.pop(room, None)
        books.owners = {page: owner for page, owner in books.owners.items() if owner != room}

    def wrote(self, process: Any, link: tuple[PairingNumber, Rank], frame: Frame, pages: tuple[PageId, ...]) -> None:
        """A decoder's copier wrote a frame into pages."""
        books = self._books(process)
        for page in pages or (PageId(-1),):
            if books.owners.get(page) != frame.room:
                said = f"{process.name} wrote room {short(frame.room)} into page {page}, which is not its own"
                raise Violation(4, said, frame.room)
        for others in (books.at_worker, books.in_step):
            for other, held in others.items():
                if not set(held).isdisjoint(pages):
                    said = f"{process.name} wrote room {short(frame.room)} into pages that the worker holds for "
                    raise Violation(4, f"{said}{short(other)}", frame.room, other)
        if books.pairings.get(frame.room) != link[0]:
            raise Violation(4, f"room {short(frame.room)} was written over pairing {link[0]}, not its own", frame.room)
        right = tuple((frame.room, token) for token in range(frame.begin, frame.end))
        if frame.cells != right:
            wrong = next(cell for cell, own in zip(frame.cells, right, strict=True) if cell != own)
            of = f"of room {short(wrong[0])}, token {wrong[1]}," if wrong is not None else "that was never computed"
            raise Violation(4, f"KV {of} was written as room {short(frame.room)}'s", frame.room)
        for token in range(frame.begin, frame.end):
            books.arrived[frame.room][(link[1], token)] += 1

    def handed_over(self, process: Any, call: Generate, ranks: Iterable[Rank], pages: tuple[PageId, ...]) -> None:
        """A room decodes from here on: the worker reads all of its KV."""
        books = self._books(process)
        books.at_worker[call.room] = pages
        arrived = books.arrived[call.room]
        for rank in ranks:
            for token in range(call.prompt_len):
                if arrived[(rank, token)] != 1:
                    said = f"room {short(call.room)} decodes with token {token} of rank {rank} written "
                    raise Violation(4, f"{said}{arrived[(rank, token)]} times", call.room)

    def step_begun(self, process: Any, rooms: dict[RoomId, tuple[PageId, ...]]) -> None:
        """A decode step reads and writes the pages of these rooms, until it is over."""
        books = self._books(process)
        strays = [room for room in rooms if room not in books.at_worker]
        if strays:
            raise Violation(4, f"{process.name} decodes room {short(strays[0])}, which it does not hold", *strays)
        books.in_step = rooms

    def step_over(self, process: Any) -> None:
        """The decode step touches nothing any more."""
        self._books(process).in_step = {}

    def let_go(self, process: Any, room: RoomId) -> None:
        """The decode worker says that it is done with a room."""
        self._books(process).at_worker.pop(room, None)


def rooms_in(item: object) -> Iterable[int]:
    """The rooms that a message is about."""
    if isinstance(item, Forwarded):
        return {*(e.room for e in item.step.entries), *(w.room for w in item.step.work)}
    room = getattr(item, "room", None)
    return () if room is None else (room,)
