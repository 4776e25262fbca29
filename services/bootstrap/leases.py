"""Lease streams at work: what comes up them goes to the core, what the core says goes down them. Owns the core's clock.

Called by the servicer. Everything runs on the event loop, so the core sees one event after the other.
"""

import asyncio
from collections.abc import Sequence
from time import monotonic

from kvmesh.errors import KvmeshError, Unavailable
from kvmesh.protocol.ids import LeaseId
from kvmesh.protocol.registry import Registry
from kvmesh.protocol.roster import Directive
from kvmesh.telemetry import logs, metrics
from kvmesh.v1 import bootstrap_pb2 as pb
from services.bootstrap.wire import directive_to, load_from, whole_to

log = logs.get(__name__)


class Lease:
    """One lease stream: an outbox and an end."""

    def __init__(self, lease: LeaseId) -> None:
        self.id = lease
        self.outbox: asyncio.Queue[pb.RegisterStageResponse] = asyncio.Queue()  # a few directives a generation
        self._ended: asyncio.Future[KvmeshError] = asyncio.get_running_loop().create_future()

    def end(self, error: KvmeshError) -> None:
        """Ends the stream with an error. Repeated: nothing."""
        if not self._ended.done():
            self._ended.set_result(error)

    async def raise_when_ended(self) -> None:
        """Waits for the end and raises its reason."""
        raise await asyncio.shield(self._ended)


class Leases:
    """The core, its leases, and whoever waits for a change."""

    def __init__(self, registry: Registry, heartbeat_seconds: float) -> None:
        self.registry = registry
        self._heartbeat_seconds = heartbeat_seconds
        self._count = 0
        self._open: dict[LeaseId, Lease] = {}
        self._waits_for: dict[LeaseId, str] = {}
        self._news = asyncio.Event()

    def open(self) -> Lease:
        """A new lease, unknown to the core until it registers."""
        self._count += 1
        lease = Lease(LeaseId(self._count))
        self._open[lease.id] = lease
        return lease

    def close(self, lease: Lease) -> None:
        """A stream ended, however."""
        self._open.pop(lease.id, None)
        self._waits_for.pop(lease.id, None)
        self.say(self.registry.lease_lost(lease.id))

    def say(self, directives: Sequence[Directive]) -> None:
        """Sends directives down, tells who waits for whom, and wakes everyone who waits for a change."""
        for said in directives:
            lease = self._open.get(said.lease)
            if lease is not None:
                lease.outbox.put_nowait(directive_to(said, self.registry.term))
        self._tell_waiters()
        self._show()
        self._news.set()
        self._news = asyncio.Event()

    def _tell_waiters(self) -> None:
        for roster in self.registry.rosters.values():
            holders = [s.holder for s in roster.seats if s.holder is not None]
            for waiter in [*holders, *roster.newcomers]:
                peer, lease = roster.waits_for(waiter.lease), self._open.get(waiter.lease)
                if lease is not None and peer != self._waits_for.get(lease.id, ""):
                    self._waits_for[lease.id] = peer
                    if peer:
                        message = pb.RegisterStageResponse(term=self.registry.term, wait_for=pb.WaitFor(peer=peer))
                        lease.outbox.put_nowait(message)

    def _show(self) -> None:
        registry = self.registry
        stages = sum(s.holder is not None for r in registry.rosters.values() for s in r.seats)
        metrics.LEASES.labels(role="stage").set(stages)
        metrics.LEASES.labels(role="decoder").set(len(registry.decoders))
        metrics.PIPELINES_WHOLE.set(len(registry.whole))

    def beat(self, lease: Lease, message: pb.Heartbeat) -> None:
        """A heartbeat came."""
        self.registry.beat(lease.id, load_from(message), monotonic())
        self.say([])

    async def changed(self) -> None:
        """Waits for the next change."""
        await self._news.wait()

    async def run(self) -> None:
        """Ends leases that expired, until cancelled."""
        while True:
            for expired in self.registry.tick(monotonic()):
                lease = self._open.get(expired)
                if lease is not None:
                    log.info("lease %d expired", expired)
                    lease.end(Unavailable("no heartbeat came in time", reason="lease_expired"))
                self.say(self.registry.lease_lost(expired))
            await asyncio.sleep(self._heartbeat_seconds)

    def end_all(self) -> None:
        """The registry leaves: every stream ends."""
        for lease in list(self._open.values()):
            lease.end(Unavailable("the registry is stopping", reason="draining"))


class WholeFeed:
    """The live list of whole pipelines, each time it changed."""

    def __init__(self, leases: Leases) -> None:
        self._leases = leases
        self._last: pb.WholePipelines | None = None

    async def next(self) -> pb.WholePipelines:
        """The list, when it differs from the one given before."""
        while (now := whole_to(self._leases.registry)) == self._last:
            await self._leases.changed()
        self._last = now
        return now
