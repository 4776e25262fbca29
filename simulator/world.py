"""The world: processes at addresses, streams between them, and what can happen to both.

It delivers and breaks; it decides nothing. When something is due, the pace says: at virtual times (`timed.py`), or any time at
all (`explore.py`). Everything that happens passes the witness.
"""

from collections import Counter
from typing import Protocol

from kvmesh.protocol.ids import Term
from simulator.messages import Closed, Message
from simulator.process import Process, Queue, Stream, Wire
from simulator.snapshot import copy
from simulator.witness import Witness

UNREACHABLE = Closed("Unavailable", "unreachable")


def has_ended(half: Queue) -> bool:
    """Whether its last item is its end: nothing comes behind that."""
    return bool(half.items) and isinstance(half.items[-1], Closed)


class Pace(Protocol):
    """When things are due."""

    now: float

    def queued(self, world: "World", queue: Queue) -> None:
        """Something was put on a queue."""

    def set_timer(self, process: Process, seconds: float, timer: str) -> None:
        """A process set a timer."""

    def pause(self) -> float:
        """Seconds between two tries of the same thing."""

    def loses(self) -> bool:
        """Whether what is on the way of a stream that breaks is lost."""


class World:
    """All there is."""

    def __init__(self, pace: Pace, witness: Witness) -> None:
        self.pace, self.witness = pace, witness
        self.living: dict[int, Process] = {}
        """By incarnation."""
        self.named: dict[str, int] = {}
        """The newest life of each name, while it lives."""
        self.addresses: dict[str, int] = {}
        """Who is reached there now."""
        self.wires: dict[int, Wire] = {}
        """By the number of their stream, until both ends are done."""
        self.term = Term(0)
        """The highest a registry ever used: durable."""
        self.num_processes = 0
        self.faults: Counter[str] = Counter()
        self.apart: set[frozenset[str]] = set()
        """Pairs of processes between which nothing passes."""
        self.borrowed: set[int] | None = None
        """Of a copy: the processes and streams it still shares with its original. None: it shares nothing."""

    # Processes.

    def next_incarnation(self) -> int:
        """For the next process."""
        self.num_processes += 1
        return self.num_processes

    def next_term(self) -> Term:
        """For the next registry; durable before it is used."""
        self.term = Term(self.term + 1)
        return self.term

    def superseded(self, process: Process, term: Term) -> None:
        """A registry heard of a higher term: it persists that and exits."""
        self.term = max(self.term, term)
        self.kill(process)

    def process(self, name: str) -> Process | None:
        """The one of that name, if it lives; it may be changed."""
        incarnation = self.named.get(name)
        return self.own(incarnation) if incarnation is not None else None

    def begin(self, process: Process) -> None:
        """A process comes up; whoever dials its address reaches it from now on."""
        self.living[process.incarnation] = process
        self.named[process.name] = self.addresses[process.address] = process.incarnation
        self.witness.note(process, "is up")
        process.start()

    def kill(self, process: Process) -> None:
        """A process is gone; its peers learn of it from their streams."""
        if not process.alive:
            return
        gone = process.incarnation
        process.alive = False
        self.witness.died(process)
        del self.living[gone]
        if self.named.get(process.name) == gone:
            del self.named[process.name]
        if self.addresses.get(process.address) == gone:
            del self.addresses[process.address]
        for stream in self.streams_of(gone):
            self._shut(stream, gone)
            self._break(stream, stream.peer(gone))

    def cut(self, stream: Stream, *, silent: bool = False) -> None:
        """The network breaks a stream: both ends learn of it, each at its time.

        Args:
            silent: nothing had passed any more, so what is on the way is lost.
        """
        for end in (stream.client, stream.server):
            self._break(stream, end, lost=silent)

    def streams_of(self, incarnation: int) -> list[Stream]:
        """Those that it is an end of."""
        return [w.stream for w in self.wires.values() if incarnation in (w.stream.client, w.stream.server)]

    # For processes.

    def dial(self, client: Process, address: str, kind: str, first: Message) -> Stream:
        """Opens a stream; who is not there is learnt of like any other end."""
        client.num_dialled += 1
        number = client.num_dialled
        name = f"{client.name}.{client.incarnation}→{address} {kind} {number}"
        server = self.addresses.get(address, 0)
        stream = Stream(client.incarnation * 1_000_000 + number, kind, name, client.incarnation, server)
        wire = self.wires[stream.number] = Wire(stream)
        self.put(wire.up if server else wire.down, first if server else UNREACHABLE)
        return stream

    def send(self, stream: Stream, sender: Process, message: Message) -> None:
        """Sends to the other end, from one that has the stream open."""
        wire = self._wire(stream)
        if wire is not None and wire.is_open(sender.incarnation):
            peer = stream.peer(sender.incarnation)
            half = wire.towards(peer)
            if wire.is_open(peer) and not has_ended(half):  # else nobody will read it
                self.put(half, message)

    def close(self, stream: Stream, closer: Process, end: Closed) -> None:
        """An end is done with a stream. A server's last messages arrive before its end; a client's cancel may overtake."""
        wire = self._wire(stream)
        if wire is None or not wire.is_open(closer.incarnation):
            return
        self._shut(stream, closer.incarnation)
        peer = stream.peer(closer.incarnation)
        if closer.incarnation == stream.client and self.pace.loses():
            wire.towards(peer).items.clear()
        if wire.is_open(peer) and not has_ended(wire.towards(peer)):
            self.put(wire.towards(peer), end)

    def put(self, queue: Queue, item: object) -> None:
        """Puts something on a queue."""
        queue.items.append(item)
        self.pace.queued(self, queue)

    def pause(self) -> float:
        """Seconds between two tries of the same thing."""
        return self.pace.pause()

    # What happens.

    def blocked(self, queue: Queue) -> bool:
        """Whether nothing can be taken from a queue now: its owner stands still, or a partition lies between."""
        owner = self.living.get(queue.owner)
        if owner is None:
            return False
        if owner.frozen or (queue.stream is None and queue.kind in owner.hung):
            return True
        if queue.stream is None or not self.apart or (queue.items and queue.items[0] == UNREACHABLE):
            return False  # that the peer is silent, an end finds out by itself
        peer = self.living.get(queue.stream.peer(queue.owner))
        return peer is not None and frozenset((owner.name, peer.name)) in self.apart

    def take(self, queue: Queue) -> None:
        """A queue's owner takes its next item."""
        if not queue.items or queue.owner not in self.living:
            return
        owner, stream = self.own(queue.owner), queue.stream
        if stream is None:
            owner.moved(queue.kind)
            owner.take(queue.kind, owner.local[queue.kind].items.popleft())
            return
        wire = self._wire(stream)
        if wire is None or not wire.is_open(owner.incarnation):
            return
        item = wire.towards(owner.incarnation).items.popleft()
        self.witness.heard(owner, stream, item)
        if isinstance(item, Closed):
            self._shut(stream, owner.incarnation)
            owner.lost(stream, item)
        elif owner.incarnation == stream.server and not wire.greeted:
            wire.greeted = True
            owner.opened(stream, item)
        else:
            owner.heard(stream, item)

    def lose(self, queue: Queue) -> None:
        """What is on the way before the end of a stream is lost."""
        assert queue.stream is not None, "a half of a stream"
        wire = self._wire(queue.stream)
        if wire is not None:
            items = wire.towards(queue.owner).items
            end = items.pop()
            items.clear()
            items.append(end)

    def fire(self, process: Process, timer: str) -> None:
        """A timer's time has come."""
        if process.alive and timer in process.timers:
            del process.timers[timer]
            process.fired(timer)

    def _break(self, stream: Stream, end: int, *, lost: bool = False) -> None:
        """One end will learn that a stream is gone; what was on the way to it may be lost."""
        wire = self._wire(stream)
        if wire is not None and wire.is_open(end):
            half = wire.towards(end)
            if lost or self.pace.loses():
                half.items.clear()
            if not has_ended(half):
                self.put(half, UNREACHABLE)

    def _shut(self, stream: Stream, end: int) -> None:
        wire = self._wire(stream)
        if wire is None:
            return
        wire.shut(end)
        if not (wire.client_open or wire.server_open):
            del self.wires[stream.number]

    # Copies share what neither has changed.

    def copied(self) -> "World":
        """A world that goes its own way from here."""
        other = World(self.pace, copy(self.witness, {}))
        other.living, other.named, other.addresses = dict(self.living), dict(self.named), dict(self.addresses)
        other.wires, other.term, other.num_processes = dict(self.wires), self.term, self.num_processes
        other.faults, other.apart = self.faults, self.apart
        other.borrowed = {*self.living, *self.wires}
        return other

    def own(self, incarnation: int) -> Process:
        """A process that is about to change."""
        process = self.living[incarnation]
        if self.borrowed is not None and incarnation in self.borrowed:
            self.borrowed.discard(incarnation)
            process = self.living[incarnation] = copy(process, {id(process.world): self})
        process.mark = None
        return process

    def _wire(self, stream: Stream) -> Wire | None:
        """A stream that is about to change."""
        wire = self.wires.get(stream.number)
        if wire is None:
            return None
        if self.borrowed is not None and stream.number in self.borrowed:
            self.borrowed.discard(stream.number)
            wire = self.wires[stream.number] = copy(wire, {})
        wire.mark = None
        return wire
