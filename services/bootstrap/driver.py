"""Drives the registry's core: its clock, its lease streams, those who ask for rooms, those who watch.

The servicer hands in what came; whatever the core answers is carried out here. Everything runs on the event loop, one event
after the other. Decides nothing.
"""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from time import monotonic

from kvmesh.errors import KvmeshError, Unavailable
from kvmesh.protocol.directives import Action, Admitted, Deny, Directive, Grant, Refuse, RequestId, Superseded, Tell
from kvmesh.protocol.ids import LeaseId, Term, short
from kvmesh.protocol.members import Stage
from kvmesh.protocol.placement import RoomRequest
from kvmesh.protocol.registry import Registry
from kvmesh.telemetry import logs, metrics

log = logs.get(__name__)

MAX_UNSENT_DIRECTIVES = 256
"""To one member; a generation takes four. A member that leaves so many unread has stopped reading."""


class LeaseStream:
    """One lease stream: what is to be said down it, and its end."""

    def __init__(self, number: LeaseId) -> None:
        self.number = number
        self.name = "a member"
        """For people, from registration on."""
        self._unsent: asyncio.Queue[Directive] = asyncio.Queue(MAX_UNSENT_DIRECTIVES)
        self._end: asyncio.Future[KvmeshError] = asyncio.get_running_loop().create_future()

    def say(self, directive: Directive) -> None:
        """Queues a directive; a stream that is not read ends."""
        try:
            self._unsent.put_nowait(directive)
        except asyncio.QueueFull:
            self.end(Unavailable("directives are not read", reason="lease_expired"))

    async def next(self) -> Directive:
        """The next directive to send."""
        return await self._unsent.get()

    def end(self, error: KvmeshError) -> None:
        """Ends the stream with an error. Repeated: nothing."""
        if not self._end.done():
            self._end.set_result(error)

    async def raise_when_ended(self) -> None:
        """Waits for the end and raises its reason."""
        raise await asyncio.shield(self._end)


class Driver:
    """The core at work."""

    def __init__(self, registry: Registry, superseded: Callable[[Term], None]) -> None:
        """Args:
        superseded: told when a member obeys a higher term; everyone is refused by then.
        """
        self.registry = registry
        self._superseded = superseded
        self._numbers = count(1)
        self._leases: dict[LeaseId, LeaseStream] = {}
        self._running: frozenset[LeaseId] = frozenset()
        """Those that the core knew when it was last asked: a stream that was refused at its registration never was a lease."""
        self._asking: dict[RequestId, asyncio.Future[Grant | Deny]] = {}
        self._news = asyncio.Event()
        self._ticked_at = monotonic()
        self._generations_shown = 0

    def carry_out(self, actions: list[Action]) -> None:
        """Does what the core asked for, in order, and wakes those who wait for a change."""
        for action in actions:
            match action:
                case Tell(number, directive):
                    self._tell(number, directive)
                case Refuse(number, error):
                    self._refuse(number, error)
                case Grant(request) | Deny(request):
                    self._answer(request, action)
                case Superseded(term):
                    self._superseded(term)
        self._show()
        self._news.set()
        self._news = asyncio.Event()

    async def run(self) -> None:
        """Lets the core know how time passes, until cancelled."""
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, self.registry.due - monotonic())):
                    await self.changed()
            if (now := monotonic()) >= self.registry.due:
                self.carry_out(self.registry.tick(now))
                self._ticked_at = now

    def age_seconds(self) -> float:
        """Time since the core was last told the time."""
        return monotonic() - self._ticked_at

    # Leases.

    def open(self) -> LeaseStream:
        """A stream that will register."""
        stream = LeaseStream(LeaseId(next(self._numbers)))
        self._leases[stream.number] = stream
        return stream

    def close(self, stream: LeaseStream) -> None:
        """The stream ended, however."""
        del self._leases[stream.number]
        if stream.number in self._running:
            log.info("%s: the lease stream ended", stream.name)
            metrics.LEASES_ENDED_TOTAL.labels(reason="stream_ended").inc()
        self.carry_out(self.registry.lease_lost(stream.number))

    def _tell(self, number: LeaseId, directive: Directive) -> None:
        stream = self._leases.get(number)
        if stream is None:
            return
        if isinstance(directive, Admitted):
            log.info("%s admitted, generation %s", stream.name, short(directive.generation))
        stream.say(directive)

    def _refuse(self, number: LeaseId, error: KvmeshError) -> None:
        if number in self._running:
            metrics.LEASES_ENDED_TOTAL.labels(reason=error.label).inc()
        stream = self._leases.get(number)
        if stream is not None:
            log.info("%s refused: %s", stream.name, error.message)
            stream.end(error)

    # Rooms.

    async def assign(self, room: RoomRequest, hold_seconds: float) -> Grant:
        """Asks for a room; returns within `hold_seconds`.

        Raises:
            KvmeshError: why there is none.
        """
        request = RequestId(next(self._numbers))
        self._asking[request] = asyncio.get_running_loop().create_future()
        try:
            self.carry_out(self.registry.assign(request, room, hold_seconds, monotonic()))
            answer = await self._asking[request]
        finally:
            del self._asking[request]
            self.registry.forget(request)
        if isinstance(answer, Deny):
            raise answer.error
        return answer

    def _answer(self, request: RequestId, answer: Grant | Deny) -> None:
        if isinstance(answer, Grant):
            metrics.ROOMS_MINTED_TOTAL.inc()
        waiting = self._asking.get(request)
        if waiting is not None and not waiting.done():
            waiting.set_result(answer)

    # Watchers.

    async def changed(self) -> None:
        """Waits for the next change."""
        await self._news.wait()

    def _show(self) -> None:
        leases = self.registry.mesh.leases.all()
        self._running = frozenset(lease.member.lease for lease in leases)
        stages = sum(isinstance(lease.member, Stage) for lease in leases)
        metrics.LEASES.labels(role="stage").set(stages)
        metrics.LEASES.labels(role="decoder").set(len(leases) - stages)
        metrics.PIPELINES_WHOLE.set(len(self.registry.mesh.whole().pipelines))
        metrics.ROOM_REQUESTS_HELD.set(self.registry.num_held)
        minted = self.registry.mesh.mint.generations
        metrics.GENERATIONS_MINTED_TOTAL.inc(minted - self._generations_shown)
        self._generations_shown = minted
