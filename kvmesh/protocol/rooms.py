"""The decoder's rooms: it owns each from its arrival to its end.

One table of the lifecycle, the decoder's page books and its queue. Called by the decoder's event loop; each call returns the
actions to carry out, in order. Knows no stream, no tensor, no clock.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from kvmesh.errors import DuplicateRoom, Full, InvalidInput, Unavailable
from kvmesh.protocol.ids import Generation, PageId, RoomId
from kvmesh.protocol.pages import Pages, pages_for
from kvmesh.protocol.remembered import Remembered
from kvmesh.protocol.table import Table


class RoomState(Enum):
    """Where a room is at its decoder."""

    WAITING = "waiting"
    """For pages; holds nothing, asked nothing."""
    RECEIVING = "receiving"
    """Holds pages; Admit is sent; KV arrives."""
    RUNNING = "running"
    """KV complete, Received sent; in the decode batch."""
    ENDED = "ended"
    """Holds nothing. Absorbs what is late."""


class RoomEvent(Enum):
    """What happens to a room at its decoder."""

    RESERVED = "reserved"
    COMPLETE = "complete"
    FINISHED = "finished"
    CANCELLED = "cancelled"
    REFUSED = "refused"
    """By rank 0, which may know the room all the same: it is told Drop."""
    BROKEN = "broken"
    PAIRING_LOST = "pairing lost"


class Ask(Enum):
    """What a transition asks of the decoder."""

    ADMIT = "admit"
    """Open the room at the copier, then send Admit."""
    RECEIVED = "received"
    DROP = "drop"
    RELEASE = "release"
    """Close the room at the copier; behind that its pages are free, or held until the worker lets them go."""


_W, _R, _N, _E = RoomState.WAITING, RoomState.RECEIVING, RoomState.RUNNING, RoomState.ENDED
_FREE = (Ask.RELEASE,)
_DROP = (Ask.DROP, Ask.RELEASE)
ROOM_TABLE: Table[RoomState, RoomEvent, Ask] = Table(
    "room at its decoder",
    {
        (_W, RoomEvent.RESERVED): (_R, (Ask.ADMIT,)),
        (_W, RoomEvent.CANCELLED): (_E, ()),
        (_W, RoomEvent.PAIRING_LOST): (_E, ()),
        (_R, RoomEvent.COMPLETE): (_N, (Ask.RECEIVED,)),
        (_R, RoomEvent.FINISHED): (_E, _DROP),
        (_R, RoomEvent.CANCELLED): (_E, _DROP),
        (_R, RoomEvent.REFUSED): (_E, _DROP),
        (_R, RoomEvent.BROKEN): (_E, _DROP),
        (_R, RoomEvent.PAIRING_LOST): (_E, _FREE),
        (_N, RoomEvent.FINISHED): (_E, _FREE),
        (_N, RoomEvent.CANCELLED): (_E, _FREE),
        (_N, RoomEvent.REFUSED): (_N, ()),
        (_N, RoomEvent.BROKEN): (_N, ()),
        (_N, RoomEvent.PAIRING_LOST): (_N, ()),
        (_E, RoomEvent.COMPLETE): (_E, ()),
        (_E, RoomEvent.FINISHED): (_E, ()),
        (_E, RoomEvent.CANCELLED): (_E, ()),
        (_E, RoomEvent.REFUSED): (_E, ()),
        (_E, RoomEvent.BROKEN): (_E, ()),
        (_E, RoomEvent.PAIRING_LOST): (_E, ()),
    },
)


@dataclass(frozen=True, slots=True)
class Limits:
    """What a decoder keeps to."""

    num_pages: int
    page_size: int
    max_tokens: int
    """Of prompt plus output."""
    max_running_rooms: int
    """Rooms that hold pages: the largest decode batch."""
    max_waiting_rooms: int


@dataclass(frozen=True, slots=True)
class Action:
    """One thing to carry out for a room."""

    ask: Ask
    room: RoomId
    pages: tuple[PageId, ...] = ()
    """With ADMIT: the pages reserved."""


@dataclass(slots=True)
class _Room:
    room: RoomId
    generation: Generation
    num_pages: int
    state: RoomState = RoomState.WAITING
    pages: tuple[PageId, ...] = ()


@dataclass(slots=True)
class DecoderRooms:
    """Every room of one decoder process."""

    limits: Limits
    draining: bool = False
    _pages: Pages = field(init=False)
    _rooms: dict[RoomId, _Room] = field(default_factory=dict)
    _waiting: deque[RoomId] = field(default_factory=deque)
    _ended: Remembered = field(default_factory=Remembered)

    def __post_init__(self) -> None:
        self._pages = Pages(self.limits.num_pages)

    @property
    def states(self) -> Mapping[RoomId, RoomState]:
        """Every room that has not ended."""
        return {r.room: r.state for r in self._rooms.values()}

    def state_of(self, room: RoomId) -> RoomState:
        """Where a room is; one that is not here has ended."""
        known = self._rooms.get(room)
        return known.state if known is not None else RoomState.ENDED

    @property
    def waiting_rooms(self) -> int:
        """Rooms that wait for pages."""
        return len(self._waiting)

    @property
    def running_rooms(self) -> int:
        """Rooms that hold pages."""
        return len(self._rooms) - len(self._waiting)

    @property
    def free_pages(self) -> int:
        """Pages that no room holds."""
        return self._pages.free

    @property
    def pages_by_state(self) -> dict[str, int]:
        """The whole pool: free, receiving (KV comes in) and running (complete) pages."""
        running = sum(len(r.pages) for r in self._rooms.values() if r.state is RoomState.RUNNING)
        held = self.limits.num_pages - self.free_pages
        return {"free": self.free_pages, "receiving": held - running, "running": running}

    def open(self, room: RoomId, generation: Generation, *, prompt_len: int, max_output_len: int) -> list[Action]:
        """A room arrives. Pages for prompt and output are reserved whole, now or when its turn comes.

        Args:
            room: minted by the registry.
            generation: of the pipeline that prefills.
            prompt_len: tokens of prompt and output so far.
            max_output_len: tokens that may still be produced, at least 1.

        Raises:
            InvalidInput: an empty pool could not hold it.
            DuplicateRoom: the room is or was here.
            Full: the queue is at its limit.
            Unavailable: the decoder drains.
        """
        limits = self.limits
        if room in self._rooms or room in self._ended:
            raise DuplicateRoom("the room was used before", field="assignment.room")
        longest = min(limits.max_tokens, limits.num_pages * limits.page_size)
        if prompt_len < 1 or max_output_len < 1:
            raise InvalidInput("prompt and output need at least one token each", field="prompt")
        if prompt_len + max_output_len > longest:
            raise InvalidInput(
                f"{prompt_len} prompt tokens and {max_output_len} of output exceed {longest}",
                reason="too_long",
                field="max_output_len",
            )
        if self.draining:
            raise Unavailable("the decoder drains", reason="draining")
        need = pages_for(prompt_len + max_output_len, limits.page_size)
        self._rooms[room] = _Room(room, generation, need)
        self._waiting.append(room)
        actions = self._reserve()
        if self._rooms[room].state is RoomState.WAITING and len(self._waiting) > limits.max_waiting_rooms:
            self._waiting.remove(room)
            del self._rooms[room]
            raise Full(f"{limits.max_waiting_rooms} rooms wait already", reason="full", retry_after_seconds=1.0)
        return actions

    def tell(self, room: RoomId, event: RoomEvent) -> list[Action]:
        """Something happened to a room. An unknown room has ended: late events are absorbed.

        Raises:
            Fault: the table has no such row.
        """
        known = self._rooms.get(room)
        if known is None:
            ROOM_TABLE.step(RoomState.ENDED, event)
            return []
        return [*self._step(known, event), *self._reserve()]

    def generation_lost(self, generation: Generation) -> tuple[list[RoomId], list[Action]]:
        """The pairing with a generation is over. Returns the rooms that ended by it, and the actions."""
        actions: list[Action] = []
        lost: list[RoomId] = []
        for room in [r for r in self._rooms.values() if r.generation == generation]:
            actions += self._step(room, RoomEvent.PAIRING_LOST)
            if room.state is RoomState.ENDED:
                lost.append(room.room)
        return lost, [*actions, *self._reserve()]

    def _reserve(self) -> list[Action]:
        """First come, first served: the head waits for its pages and is not overtaken."""
        actions: list[Action] = []
        while self._waiting and self.running_rooms < self.limits.max_running_rooms:
            room = self._rooms[self._waiting[0]]
            pages = self._pages.take(room.num_pages)
            if pages is None:
                break
            room.pages = pages
            actions += self._step(room, RoomEvent.RESERVED)
        return actions

    def _step(self, room: _Room, event: RoomEvent) -> list[Action]:
        was = room.state
        room.state, asks = ROOM_TABLE.step(was, event)
        if was is RoomState.WAITING and room.state is not RoomState.WAITING:
            self._waiting.remove(room.room)
        actions = [Action(ask, room.room, room.pages) for ask in asks]
        if room.state is RoomState.ENDED:
            self._forget(room)
        return actions

    def _forget(self, room: _Room) -> None:
        if room.pages:
            self._pages.give(room.pages)
        del self._rooms[room.room]
        self._ended.add(room.room)

    def check(self) -> None:
        """Audits the books.

        Raises:
            ValueError: free and held pages are not the whole pool, each once.
        """
        self._pages.check([r.pages for r in self._rooms.values()])
