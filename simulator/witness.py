"""The witness: sees everything that happens, keeps its own books, and raises when an invariant of docs/protocol.md §5 breaks.

Its books are made from what is said and done, never from the machines' own state: one that is wrong about itself is found.
Invariants by number: 1 equal logs, 2 nothing untold, 3 one holder a page, 4 no foreign write, 5 one end and each token once,
6 everything ends and all is idle, 8 one message to admission.
"""

from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from kvmesh.errors import KvmeshError
from kvmesh.protocol.head_room import RoomState
from kvmesh.protocol.ids import Generation, PageId, PairingNumber, Rank, RoomId, short
from kvmesh.protocol.scheduler import Scheduler
from kvmesh.protocol.steps import RoomAdmitted, Step
from simulator.messages import Admit, Drop, Forwarded, Frame, Generate, Message, RoomRefused, Tokens, token_of

NOTES_KEPT = 200_000
"""Of the timeline: a failing run is shrunk before it is read."""


class Violation(AssertionError):
    """An invariant is broken."""

    def __init__(self, invariant: int, message: str, *keys: int) -> None:
        super().__init__(f"invariant {invariant}: {message}")
        self.invariant = invariant
        self.keys = keys
        """Rooms, requests or generations concerned: what to look for in the timeline."""


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
    """One decoder's worker."""

    pairings: dict[RoomId, PairingNumber] = field(default_factory=dict)
    owners: dict[PageId, RoomId] = field(default_factory=dict)
    arrived: dict[RoomId, Counter[tuple[Rank, int]]] = field(default_factory=dict)


@dataclass(slots=True)
class RequestBooks:
    """One request, as its client sees it."""

    num_tokens: int = 0
    end: str | None = None


class Witness:
    """Sees one world."""

    def __init__(self) -> None:
        self.notes: deque[tuple[float, str, str, tuple[int, ...]]] = deque(maxlen=NOTES_KEPT)
        self.noting = True
        self.requests: dict[int, RequestBooks] = {}
        self.prompts: dict[RoomId, tuple[int, int]] = {}
        """Of a room: its request, and the index of its first token."""
        self.logs: dict[Generation, list[bytes]] = {}
        """What rank 0 wrote."""
        self.stages: dict[int, StageBooks] = {}
        """By incarnation."""
        self.decoders: dict[int, DecoderBooks] = {}
        self.unwritten: dict[RoomId, int] = {}
        """Rooms that were reserved and stand in no step yet: messages about them since, beside Admit."""

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

    def sent(self, message: Message) -> None:
        """A message left. Invariant 8: before a room is admitted there is its Admit, and nothing else but its end."""
        room = getattr(message, "room", None)
        if room in self.unwritten and not isinstance(message, Admit | Drop | RoomRefused | Generate):
            self.unwritten[room] += 1

    def life_over(self, process: Any, error: KvmeshError) -> None:
        """A stage's life ended."""
        self.note(process, f"its life is over: {error.message}", process.life.generation)

    # Requests (5).

    def arrived(self, request: int) -> None:
        """A client asks."""
        self.requests[request] = RequestBooks()

    def granted(self, process: Any, wish: Any, grant: Any, generate: Generate) -> None:
        """A request was given a room."""
        if grant.room in self.prompts:
            raise Violation(5, f"room {short(grant.room)} was given out twice", grant.room)
        self.prompts[grant.room] = (wish.number, generate.output_index)
        self.note(process, f"request {wish.number} is room {short(grant.room)}", grant.room, wish.number)

    def prompt_of(self, room: RoomId) -> tuple[int, int]:
        """A room's request, and the index of its first token."""
        return self.prompts[room]

    def delivered(self, wish: Any, tokens: Tokens) -> None:
        """A client got tokens."""
        books = self.requests[wish.number]
        for token in tokens.tokens:
            right = token_of(wish.number, books.num_tokens)
            if books.end is not None or token != right or books.num_tokens >= wish.output_len:
                said = f"token {token} came as the {books.num_tokens}-th of request {wish.number}, {right} is right"
                raise Violation(5, said, wish.number)
            books.num_tokens += 1

    def answered(self, process: Any, wish: Any, reason: str) -> None:
        """A request ended: with its last token, or by a reason."""
        books = self.requests[wish.number]
        if books.end is not None:
            raise Violation(5, f"request {wish.number} ended twice", wish.number)
        if not reason and books.num_tokens != wish.output_len:
            raise Violation(5, f"request {wish.number} ended well after {books.num_tokens} tokens", wish.number)
        books.end = reason
        self.note(process, f"request {wish.number} ends: {reason or 'well'}", wish.number)

    # Admission (8).

    def reserved(self, process: Any, generate: Generate) -> None:
        """A decoder holds the pages of a room, and asks rank 0 next."""
        self.unwritten[generate.room] = 0
        self.note(process, f"room {short(generate.room)} has its pages", generate.room)

    def pumped(self, scheduler: Scheduler) -> None:
        """Rank 0 wrote all steps it would. No room waits but for pages, or for a place in flight."""
        limits = scheduler.limits
        waiting = [r for r, state in scheduler.states.items() if state is RoomState.WAITING]
        if not waiting or not scheduler.may_write:
            return
        if len(waiting) == len(scheduler.states) and scheduler.free_pages == limits.num_pages:
            raise Violation(8, f"rank 0 lets room {short(waiting[0])} wait, and nothing is in its way", waiting[0])

    def written(self, process: Any, step: Step) -> None:
        """Rank 0 wrote a step."""
        log = self.logs.setdefault(process.part.number, [])
        if step.number != len(log):
            raise Violation(1, f"rank 0 wrote step {step.number} after {len(log)} steps", process.part.number)
        log.append(step.canonical())
        self.note(process, f"writes {step}", *(e.room for e in step.entries), *(w.room for w in step.work))
        for entry in step.entries:
            if isinstance(entry, RoomAdmitted):
                more = self.unwritten.pop(entry.room, 0)
                if more:
                    said = f"room {short(entry.room)} took {more} messages more than one to be admitted"
                    raise Violation(8, said, entry.room)

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
        """A decoder's worker may write a room's pages from here on."""
        books = self._books(process)
        for page in pages:
            if page in books.owners:
                said = f"{process.name} gave page {page} of room {short(books.owners[page])} to {short(room)}"
                raise Violation(3, said, room, books.owners[page])
            books.owners[page] = room
        books.pairings[room] = pairing
        books.arrived[room] = Counter()

    def room_closed(self, process: Any, room: RoomId) -> None:
        """A decoder's worker writes nothing for a room from here on."""
        books = self._books(process)
        books.pairings.pop(room, None)
        books.arrived.pop(room, None)
        books.owners = {page: owner for page, owner in books.owners.items() if owner != room}

    def wrote(self, process: Any, link: tuple[PairingNumber, Rank], frame: Frame, pages: tuple[PageId, ...]) -> None:
        """A decoder's worker wrote a frame into pages."""
        books = self._books(process)
        for page in pages:
            if books.owners.get(page) != frame.room:
                said = f"{process.name} wrote room {short(frame.room)} into page {page}, which is not its own"
                raise Violation(4, said, frame.room)
        if books.pairings.get(frame.room) != link[0]:
            raise Violation(4, f"room {short(frame.room)} was written over pairing {link[0]}, not its own", frame.room)
        foreign = [room for _, room in frame.cells if room != frame.room]
        if foreign:
            said = f"KV of room {short(foreign[0])} was written as that of {short(frame.room)}"
            raise Violation(4, said, frame.room, foreign[0])
        for token in range(frame.begin, frame.end):
            books.arrived[frame.room][(link[1], token)] += 1

    def joined(self, process: Any, call: Generate, ranks: Iterable[Rank]) -> None:
        """A room decodes from here on: it reads all of its KV."""
        arrived = self._books(process).arrived[call.room]
        for rank in ranks:
            for token in range(call.prompt_len):
                if arrived[(rank, token)] != 1:
                    said = f"room {short(call.room)} decodes with token {token} of rank {rank} written "
                    raise Violation(4, f"{said}{arrived[(rank, token)]} times", call.room)


def rooms_in(item: object) -> Iterable[int]:
    """The rooms that a message is about."""
    if isinstance(item, Forwarded):
        return {*(e.room for e in item.step.entries), *(w.room for w in item.step.work)}
    room = getattr(item, "room", None)
    return () if room is None else (room,)
