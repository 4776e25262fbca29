"""Health, as grpc.health.v1 has it, on a plaintext port of its own. Called by the life of a process.

"" and "readiness": able to serve. "liveness": everything that should make progress does; a peer's death is no part of it.
The server runs on the loop it reports on: a loop that is stuck answers no probe. The page of metrics answers from a thread of
its own; so it works out what it says of this loop when it is read.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer

from kvmesh.rpc.channels import server_options
from kvmesh.rpc.lag import LoopLag
from kvmesh.telemetry import logs, metrics

log = logs.get(__name__)

READINESS, LIVENESS = "readiness", "liveness"


@dataclass(frozen=True, slots=True)
class _Probe:
    """Something that should make progress."""

    name: str
    age_seconds: Callable[[], float | None]
    limit_seconds: float

    def stuck_for(self) -> float | None:
        age = self.age_seconds()
        return age if age is not None and age > self.limit_seconds else None


class Health:
    """What a process says of itself."""

    def __init__(self, watchdog_seconds: float, clock: Callable[[], float] = monotonic) -> None:
        self.lag = LoopLag(clock)
        self._watchdog_seconds = watchdog_seconds
        self._servicer = HealthServicer()
        self._server = grpc.aio.server(options=server_options(watchdog_seconds))
        health_pb2_grpc.add_HealthServicer_to_server(self._servicer, self._server)
        self._probes: list[_Probe] = []
        self._stuck: set[str] = set()
        self._ready = False
        self._changed = asyncio.Event()
        self._changed.set()

    def bind(self, target: str) -> int:
        """Takes a port; returns it. Before `start`."""
        return self._server.add_insecure_port(target)

    async def start(self) -> None:
        """Begins to answer: alive, not ready."""
        metrics.LOOP_LAG_SECONDS.set_function(lambda: self.lag.seconds)
        metrics.READY.set_function(lambda: self._ready and self._moves)
        metrics.LIVE.set_function(lambda: not self._stuck and self._moves)
        await self._publish()
        await self._server.start()

    async def stop(self) -> None:
        """Tells every watcher, then ends."""
        await self._servicer.enter_graceful_shutdown()
        await self._server.stop(grace=0.1)

    def set_ready(self, ready: bool, why: str = "") -> None:
        """States whether the process can serve; `why` goes to the log."""
        if ready != self._ready:
            log.info("%s%s", "ready" if ready else "not ready", f": {why}" if why else "")
            self._ready = ready
            self._changed.set()

    def watch_progress(self, name: str, age_seconds: Callable[[], float | None], limit_seconds: float) -> None:
        """Makes liveness depend on a progress; see Life.watch_progress."""
        self._probes.append(_Probe(name, age_seconds, limit_seconds))

    async def run(self) -> None:
        """Publishes what changes, and looks at progress four times in the watchdog's time. Until cancelled."""
        self.lag.expect(self._watchdog_seconds / 4)
        try:
            while True:
                await self._beat()
        finally:
            self.lag.stop()

    async def _beat(self) -> None:
        try:
            async with asyncio.timeout(self.lag.left):
                await self._changed.wait()
        except TimeoutError:
            self.lag.beat()
            self.lag.expect(self._watchdog_seconds / 4)
            self._look()
        if self._changed.is_set():
            self._changed.clear()
            await self._publish()

    @property
    def _moves(self) -> bool:
        """Whether the loop does: one that is late by the watchdog's time is lost to its peers."""
        return self.lag.seconds <= self._watchdog_seconds

    def _look(self) -> None:
        stuck = {p.name: age for p in self._probes if (age := p.stuck_for()) is not None}
        for name, age in stuck.items():
            if name not in self._stuck:
                log.error("%s made no progress for %.1f s", name, age)
        for name in self._stuck - stuck.keys():
            log.info("%s makes progress again", name)
        if bool(stuck) != bool(self._stuck):
            self._changed.set()
        self._stuck = set(stuck)

    async def _publish(self) -> None:
        live = not self._stuck
        for name, serving in (("", self._ready), (READINESS, self._ready), (LIVENESS, live)):
            await self._servicer.set(name, _SERVING if serving else _NOT_SERVING)


_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
