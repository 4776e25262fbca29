"""Rank 0 decides: which rooms begin and end, on which pages, and what each step computes.

The only writer of the log and the only allocator of the pipeline. Called by rank 0's event loop; told of Admit, Drop and
Received from control streams and of `applied` from the rank behind. Knows no stream, no tensor and no time.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from kvmesh.errors import DuplicateRoom, Fault, Fenced, Full, InvalidInput, KvmeshError, Unavailable
from kvmesh.protocol.head_room import ROOM_TABLE, Ask, HeadRoom, RoomEvent, RoomState
from kvmesh.protocol.ids import PageId, PairingKey, RoomId, StepNumber
from kvmesh.protocol.pages import Pages, pages_for
from kvmesh.protocol.remembered import Remembered
from kvmesh.protocol.steps import Entry, RoomAdmitted, RoomDone, RoomDropped, Sampling, Step, Work


@dataclass(frozen=True, slots=True)
class Limits:
    """What rank 0 keeps to. Tokens, pages and counts; all at least 1."""

    num_pages: int
    page_size: int
    max_prompt_len: int
    step_tokens: int
    """Most tokens of one step: the budget that chunks share."""
    max_steps_in_flight: int
    max_waiting_rooms: int
    """Over all decoders."""
    max_steps_ahead: int = 2
    """Steps written and not yet applied by rank 0 itself: the one it computes, and one so that it never waits. A step that is
    written takes no room that comes later, so more would only make rooms wait."""


@dataclass(slots=True)
class _Queue:
    """Rooms of one pairing that wait, first come first served, and the pages its admitted rooms hold."""

    decoder_page_size: int
    waiting: deque[RoomId] = field(default_factory=deque)
    held_pages: int = 0


class Scheduler:
    """Rank 0's decisions in one generation."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self._pages = Pages(limits.num_pages)
        self._rooms: dict[RoomId, HeadRoom] = {}
        self._queues: dict[PairingKey, _Queue] = {}
        self._turn: deque[PairingKey] = deque()
        self._prefilling: dict[RoomId, None] = {}
        self._terminal: list[Entry] = []
        self._ended = Remembered()
        self._next_number = StepNumber(0)
        self._applied = -1
        self._applied_here = -1
        self._working: deque[tuple[RoomId, ...]] = deque()
        """Rooms with work in each step in flight, oldest first."""
        self.draining = False

    # What the lease stream reports.

    @property
    def states(self) -> Mapping[RoomId, RoomState]:
        """Every room here and where it is."""
        return {r.room: r.state for r in self._rooms.values()}

    @property
    def open_rooms(self) -> int:
        """Rooms that have not ended: those that wait, and those whose terminal entry is not written."""
        return len(self._rooms)

    def holds(self, room: RoomId) -> bool:
        """Whether a room is here, in whatever state."""
        return room in self._rooms

    @property
    def waiting_rooms(self) -> int:
        """Rooms in the queues."""
        return sum(len(q.waiting) for q in self._queues.values())

    @property
    def running_rooms(self) -> int:
        """Rooms that hold pages."""
        return sum(bool(r.pages) for r in self._rooms.values())

    @property
    def queued_tokens(self) -> int:
        """Prompt tokens accepted and not yet scheduled."""
        live = (RoomState.WAITING, RoomState.PREFILLING)
        return sum(r.prompt_len - r.scheduled_len for r in self._rooms.values() if r.state in live)

    @property
    def free_pages(self) -> int:
        """Pages that no room holds."""
        return self._pages.free

    @property
    def steps_in_flight(self) -> int:
        """Steps written and not yet applied by every rank."""
        return self._next_number - 1 - self._applied

    @property
    def may_write(self) -> bool:
        """Whether neither too many steps are in flight, nor too many written ahead of rank 0's own worker."""
        ahead = self._next_number - 1 - self._applied_here
        return self.steps_in_flight < self.limits.max_steps_in_flight and ahead < self.limits.max_steps_ahead

    def rooms_in_flight(self, key: PairingKey) -> list[RoomId]:
        """Rooms of a pairing with work in a step that not every rank has applied: if the generation dies now, it died in
        that step, and one of them may be why."""
        rooms = dict.fromkeys(room for working in self._working for room in working)
        return [room for room in rooms if self._of(key, room) is not None]

    @property
    def idle(self) -> bool:
        """No room, no entry due, no step in flight."""
        return not self._rooms and not self._terminal and self.steps_in_flight == 0

    # Events.

    def pair(self, key: PairingKey, *, decoder_page_size: int = 1) -> list[RoomId]:
        """A decoder's control stream stands. Ends the decoder's older pairings; their rooms are returned.

        Args:
            decoder_page_size: tokens in a page of the decoder, which keeps whole pages only.

        Raises:
            Fenced: a pairing of this decoder with this or a higher number stands.
            Unavailable: the pipeline drains.
        """
        if self.draining:
            raise Unavailable("the pipeline drains", reason="draining")
        older = [k for k in self._queues if k[0] == key[0]]
        if any(k[1] >= key[1] for k in older):
            raise Fenced(f"pairing {key[1]} is not newer than the standing one")
        dropped = [room for k in older for room in self.unpair(k)]
        self._queues[key] = _Queue(decoder_page_size)
        self._turn.append(key)
        return dropped

    def unpair(self, key: PairingKey) -> list[RoomId]:
        """A control stream ended: every room that came on it is dropped. Late: nothing. Returns those rooms."""
        if key not in self._queues:
            return []
        rooms = [r for r in self._rooms.values() if r.key == key]
        for room in rooms:
            self._step_room(room, RoomEvent.UNPAIRED)
        del self._queues[key]
        self._turn.remove(key)
        return [r.room for r in rooms]

    def admit(
        self,
        key: PairingKey,
        room: RoomId,
        *,
        prompt_len: int,
        cached_len: int,
        sampling: Sampling | None = None,
        output_index: int = 0,
        trace: str = "",
    ) -> None:
        """A decoder asks for a room. Queued until its turn and its pages come.

        Raises:
            Fenced: the pairing is over.
            DuplicateRoom: the room is here already.
            InvalidInput: the plan is malformed, or an empty pool could not hold it.
            Full: the queue is at its limit.
            Unavailable: the pipeline drains.
        """
        error = self._objection(key, room, prompt_len, cached_len)
        if error is not None:
            raise error
        self._rooms[room] = HeadRoom(room, key, prompt_len, cached_len, sampling or Sampling(), output_index, trace)
        self._queues[key].waiting.append(room)

    def _objection(self, key: PairingKey, room: RoomId, prompt_len: int, cached_len: int) -> KvmeshError | None:
        limits = self.limits
        if key not in self._queues:
            return Fenced(f"pairing {key[1]} is over")
        if room in self._rooms or room in self._ended:
            return DuplicateRoom("the room is known", field="room")
        if self.draining:
            return Unavailable("the pipeline drains", reason="draining")
        longest = min(limits.max_prompt_len, limits.num_pages * limits.page_size)
        if not 1 <= prompt_len <= longest:
            return InvalidInput(f"{prompt_len} prompt tokens; 1 to {longest} fit", reason="too_long", field="tokens")
        if not 0 <= cached_len < prompt_len:
            detail = f"cached_len {cached_len} is outside [0, {prompt_len})"
            return InvalidInput(detail, reason="bad_cached_len", field="cached_len")
        page_size = self._queues[key].decoder_page_size
        if cached_len % page_size:
            detail = f"cached_len {cached_len} is not in whole pages of {page_size} tokens"
            return InvalidInput(detail, reason="bad_cached_len", field="cached_len")
        if self.waiting_rooms >= limits.max_waiting_rooms:
            return Full(f"{limits.max_waiting_rooms} rooms wait already", reason="queue_full", retry_after_seconds=1.0)
        return None

    def drop(self, key: PairingKey, room: RoomId) -> None:
        """The decoder ended the room. An unknown room is late: nothing."""
        known = self._of(key, room)
        if known is not None:
            self._step_room(known, RoomEvent.DROP)

    def received(self, key: PairingKey, room: RoomId) -> None:
        """The decoder has all KV of the room. An unknown room is late: nothing.

        Raises:
            Fault: the room's last token is not even scheduled, or the decoder ended it before: the pairing must end.
        """
        known = self._of(key, room)
        if known is not None:
            self._step_room(known, RoomEvent.RECEIVED)

    def applied(self, number: StepNumber) -> None:
        """Every rank behind has applied step `number`, and all before it.

        Raises:
            Fault: that step was never written, or is not newer.
        """
        if not self._applied < number < self._next_number:
            raise Fault(f"step {number} applied, outside ({self._applied}, {self._next_number})")
        for _ in range(number - self._applied):
            self._working.popleft()
        self._applied = number
        self._applied_here = max(self._applied_here, number)

    def applied_here(self, number: StepNumber) -> None:
        """Rank 0's own worker applied step `number`."""
        self._applied_here = number

    def drain(self) -> None:
        """Takes no more rooms and no more pairings; those here finish."""
        self.draining = True

    # Decisions.

    def next_step(self) -> Step | None:
        """Writes the next step, or None when nothing is due, or enough is written already."""
        if not self.may_write:
            return None
        entries = [*self._end_rooms(), *self._admit_rooms()]
        work = self._chunks()
        if not entries and not work:
            return None
        step = Step(self._next_number, tuple(entries), tuple(work))
        self._next_number = StepNumber(self._next_number + 1)
        self._working.append(tuple(w.room for w in work))
        return step

    def _end_rooms(self) -> list[Entry]:
        entries, self._terminal = self._terminal, []
        for entry in entries:
            room = self._rooms.pop(entry.room)
            self._ended.add(entry.room)
            self._pages.give(room.pages)
            queue = self._queues.get(room.key)
            if queue is not None:
                queue.held_pages -= len(room.pages)
        return entries

    def _admit_rooms(self) -> list[Entry]:
        """Decoders in turn; a room that waits for free pages is not overtaken; one over its decoder's share is passed by."""
        entries: list[Entry] = []
        passed = 0
        while self._turn and passed < len(self._turn):
            key = self._turn[0]
            queue = self._queues[key]
            head = self._rooms[queue.waiting[0]] if queue.waiting else None
            need = pages_for(head.prompt_len, self.limits.page_size) if head else 0
            share = max(need, self.limits.num_pages // len(self._turn))
            if head is None or queue.held_pages + need > share:
                self._turn.rotate(-1)
                passed += 1
                continue
            pages = self._pages.take(need)
            if pages is None:
                break
            queue.waiting.popleft()
            queue.held_pages += need
            entries.append(self._begin(head, pages))
            self._turn.rotate(-1)
            passed = 0
        return entries

    def _begin(self, room: HeadRoom, pages: tuple[PageId, ...]) -> RoomAdmitted:
        room.pages = pages
        self._step_room(room, RoomEvent.ADMIT)
        self._prefilling[room.room] = None
        return RoomAdmitted(
            room.room,
            room.key[1],
            room.key[0],
            room.prompt_len,
            room.cached_len,
            pages,
            room.sampling,
            room.output_index,
            trace=room.trace,
        )

    def _chunks(self) -> list[Work]:
        """Rooms in the order of admission share the budget."""
        budget = self.limits.step_tokens
        work: list[Work] = []
        for room_id in list(self._prefilling):
            if budget == 0:
                break
            room = self._rooms[room_id]
            begin, end = room.scheduled_len, min(room.prompt_len, room.scheduled_len + budget)
            room.scheduled_len = end
            budget -= end - begin
            work.append(Work(room_id, begin, end))
            if end == room.prompt_len:
                self._step_room(room, RoomEvent.LAST_CHUNK)
        return work

    # The one writer of a room's state.

    def _step_room(self, room: HeadRoom, event: RoomEvent) -> None:
        was = room.state
        room.state, asks = ROOM_TABLE.step(was, event)
        if was is RoomState.PREFILLING and room.state is not RoomState.PREFILLING:
            self._prefilling.pop(room.room, None)
        if room.state is RoomState.GONE:
            self._queues[room.key].waiting.remove(room.room)
            del self._rooms[room.room]
            self._ended.add(room.room)
        for ask in asks:
            self._terminal.append(RoomDone(room.room) if ask is Ask.WRITE_DONE else RoomDropped(room.room))

    def _of(self, key: PairingKey, room: RoomId) -> HeadRoom | None:
        known = self._rooms.get(room)
        return known if known is not None and known.key == key else None

    def check(self) -> None:
        """Audits the books.

        Raises:
            ValueError: free and held pages are not the whole pool, each once.
        """
        self._pages.check([r.pages for r in self._rooms.values()])
