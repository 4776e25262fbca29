"""The bootstrap service: one process, the registry's core, its driver and its door, composed. Called by `__main__`."""

from collections.abc import Sequence
from time import monotonic

import grpc

from kvmesh.errors import BadConfig
from kvmesh.protocol.ids import Term
from kvmesh.protocol.registry import Registry, RegistryLimits
from kvmesh.rpc.life import STALE_TERM_EXIT, Life
from kvmesh.rpc.tasks import race
from kvmesh.telemetry import logs, metrics
from kvmesh.v1.bootstrap_pb2_grpc import add_BootstrapServiceServicer_to_server
from services.bootstrap.config import BootstrapSettings
from services.bootstrap.driver import Driver
from services.bootstrap.servicer import BootstrapServicer
from services.bootstrap.term_file import TermFile

log = logs.get(__name__)


class Bootstrap:
    """The service that `kvmesh.rpc.life` runs."""

    names: Sequence[str] = ("kvmesh.v1.BootstrapService",)

    def __init__(self, settings: BootstrapSettings, life: Life) -> None:
        """Raises:
        BadConfig: the state directory can't be used.
        """
        self._life = life
        self._lease_seconds = settings.lease_seconds
        self._term_file = TermFile(settings.state_dir)
        limits = RegistryLimits(
            lease_seconds=settings.lease_seconds,
            heartbeat_seconds=settings.heartbeat_seconds,
            max_waiting_rooms=settings.max_waiting_rooms,
        )
        self._driver = Driver(Registry(self._term_file.term, limits, monotonic()), self._superseded)
        self._servicer = BootstrapServicer(
            self._driver, assign_wait_seconds=settings.assign_wait_seconds, lease_seconds=settings.lease_seconds
        )

    def add_to(self, server: grpc.aio.Server) -> None:
        """Registers the registry's methods."""
        add_BootstrapServiceServicer_to_server(self._servicer, server)

    async def run(self, life: Life) -> None:
        """Keeps leases until asked to leave; then every stream ends, and members come back to the next registry."""
        with self._term_file:
            log.info("registry term %d", self._term_file.term)
            metrics.TERM.set(self._term_file.term)
            life.watch_progress("leases", self._driver.age_seconds, limit_seconds=10 * self._lease_seconds)
            life.set_ready(True)
            await race(self._driver.run(), self._leave(life))

    async def _leave(self, life: Life) -> None:
        await life.draining.wait()
        self._servicer.stop()

    def _superseded(self, term: Term) -> None:
        """A member obeys a higher term: this registry is stale. The next start goes above it."""
        log.warning("term %d was seen, this registry's is %d: ended, to start above it", term, self._term_file.term)
        try:
            self._term_file.hear(term)
        except BadConfig as error:  # ended all the same; the member will tell the next one again
            log.error("%s", error)
        self._life.stop(STALE_TERM_EXIT)
