"""A process of the mesh: what it has to take up, in order, from each of its queues; and the streams it holds.

Roles (registry, stage, decoder, gateway) derive from it and wire the protocol's machines to it. A process is all that a kill
takes away. Queues keep their order; which of them is next, the pace decides.
"""

from collections import deque
from dataclasses import dataclass
from typing import Any

from simulator.messages import Closed, Message

WELL = Closed("", "")
"""An ordinary end."""

HANDED_OVER_SECONDS = 0.0001
"""From one thread of a process to another."""


class Queue:
    """One order of things that a process takes up: a half of a stream, its worker's jobs, its worker's reports."""

    __slots__ = ("due", "items", "kind", "name", "owner", "stream")

    def __init__(self, name: str, owner: int, kind: str, stream: "Stream | None" = None) -> None:
        """Args:
        owner: incarnation of the process that takes from it.
        """
        self.name, self.owner, self.kind, self.stream = name, owner, kind, stream
        self.items: deque[Any] = deque()
        self.due = 0.0
        """When its last item arrives, on virtual time."""


@dataclass(frozen=True, slots=True)
class Stream:
    """A bidirectional stream, as both ends name it. What is on its way belongs to the world."""

    number: int
    kind: str
    name: str
    client: int
    """Incarnation."""
    server: int
    """Incarnation; 0 where nobody was there."""

    def peer(self, end: int) -> int:
        """The other end."""
        return self.server if end == self.client else self.client


class Wire:
    """What a stream is in the world: each half keeps its order; what follows the end of a half is never delivered."""

    __slots__ = ("client_open", "down", "greeted", "mark", "server_open", "stream", "up")

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self.client_open, self.server_open = True, stream.server != 0
        self.greeted = False
        """Whether its first message was taken up."""
        self.up = Queue(f"{stream.name} up", stream.server, "stream", stream)
        self.down = Queue(f"{stream.name} down", stream.client, "stream", stream)
        self.mark: int | None = None
        """Its fingerprint, while nothing changes it."""

    def is_open(self, end: int) -> bool:
        """Whether an end has neither closed it nor learnt of its close."""
        return self.client_open if end == self.stream.client else self.server_open

    def shut(self, end: int) -> None:
        """An end is done with it."""
        self.towards(end).items.clear()
        if end == self.stream.client:
            self.client_open = False
        else:
            self.server_open = False

    def towards(self, end: int) -> Queue:
        """The half that an end reads."""
        return self.down if end == self.stream.client else self.up


class Process:
    """One life of one process."""

    local_kinds: tuple[str, ...] = ()
    """Queues of its own: what its threads hand each other."""
    threads: tuple[tuple[str, ...], ...] = ()
    """Those beside its event loop, each by the queues that it takes from."""

    def __init__(self, world: Any, name: str, address: str, incarnation: int) -> None:
        self.world, self.name, self.address, self.incarnation = world, name, address, incarnation
        self.alive = True
        self.frozen = False
        """Nothing of it moves (SIGSTOP); its streams stand until others give up on them."""
        self.hung: tuple[str, ...] = ()
        """The queues of a thread that stands still while the event loop lives."""
        self.local = {kind: Queue(f"{name}.{incarnation} {kind}", incarnation, kind) for kind in self.local_kinds}
        self.timers: dict[str, object] = {}
        self.num_dialled = 0
        self.moved_at = dict.fromkeys(self.threads, 0.0)
        """When each thread last took up a job, or was given one while it rested."""
        self.mark: int | None = None
        """Its fingerprint, while nothing changes it."""

    # For roles.

    @property
    def now(self) -> float:
        """Virtual time."""
        return float(self.world.pace.now)

    def dial(self, address: str, kind: str, first: Message) -> Stream:
        """Opens a stream to whoever lives at an address."""
        return self.world.dial(self, address, kind, first)  # type: ignore[no-any-return]

    def send(self, stream: Stream | None, message: Message) -> None:
        """Sends on a stream that this end has open; else it is lost."""
        if stream is not None:
            self.world.send(stream, self, message)

    def close(self, stream: Stream | None, end: Closed = WELL) -> None:
        """Ends a stream, whatever is on the way. Repeated: nothing."""
        if stream is not None:
            self.world.close(stream, self, end)

    def queue(self, kind: str, item: object) -> None:
        """Hands something to another thread of this process."""
        for kinds in self.threads:
            if kind in kinds and not self._owes(kinds):
                self.moved_at[kinds] = self.now
        self.world.put(self.local[kind], item)

    def moved(self, kind: str) -> None:
        """The thread that takes from a queue does so."""
        for kinds in self.threads:
            if kind in kinds:
                self.moved_at[kinds] = self.now

    def _owes(self, kinds: tuple[str, ...]) -> bool:
        return any(self.local[kind].items for kind in kinds)

    def age_seconds(self) -> float | None:
        """Time since a thread last moved, of the one that has not for longest; None when none owes anything."""
        return max((self.now - at for kinds, at in self.moved_at.items() if self._owes(kinds)), default=None)

    def after(self, seconds: float, timer: str) -> None:
        """Sets a timer; one that is set already keeps its time."""
        if timer not in self.timers:
            self.timers[timer] = None
            self.world.pace.set_timer(self, seconds, timer)

    def cancel_timer(self, timer: str) -> None:
        """Forgets a timer."""
        self.timers.pop(timer, None)

    # What a role answers to.

    def start(self) -> None:
        """The process is up."""

    def opened(self, stream: Stream, first: Message) -> None:
        """Someone dialled."""
        raise NotImplementedError

    def heard(self, stream: Stream, message: Message) -> None:
        """A message on a stream that is open here."""
        raise NotImplementedError

    def lost(self, stream: Stream, end: Closed) -> None:
        """A stream that was open here is over; it is shut already."""
        raise NotImplementedError

    def take(self, kind: str, item: object) -> None:
        """The next item of an own queue."""
        raise NotImplementedError

    def seconds_of(self, kind: str, item: object) -> float:
        """How long an own queue's item takes until it is done, before chance."""
        return HANDED_OVER_SECONDS

    def fired(self, timer: str) -> None:
        """A timer's time has come."""
        raise NotImplementedError
