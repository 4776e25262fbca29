"""One process's life: bound, serving, draining, ended. Called by each service's `__main__`, and by nothing else.

A signal or `stop` begins the drain: readiness goes, `draining` is set, the service finishes what it has and returns from
`run`, within `drain_seconds`. Then the servers stop. A second signal ends the process at once. Knows no service.
"""

import asyncio
import faulthandler
import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import NoReturn, Protocol

import grpc
import uvloop
from grpc_reflection.v1alpha import reflection

from kvmesh.errors import BadConfig, KvmeshError, Misfit
from kvmesh.rpc.address import Address, advertised, parse, why_not_bindable
from kvmesh.rpc.channels import server_options
from kvmesh.rpc.health import Health
from kvmesh.rpc.interceptors import ErrorInterceptor
from kvmesh.rpc.tls import Tls, add_port
from kvmesh.rpc.trace import SERVICE as TRACE_SERVICE
from kvmesh.rpc.trace import TraceServicer
from kvmesh.settings import BAD_CONFIG_EXIT, setting
from kvmesh.telemetry import logs, otlp
from kvmesh.telemetry.page import MetricsPage
from kvmesh.v1.trace_pb2_grpc import add_TraceServiceServicer_to_server

log = logs.get(__name__)

FAILED_EXIT, MISFIT_EXIT, STALE_TERM_EXIT = 1, 3, 4

_LAST_CALLS_SECONDS = 0.5
"""What calls still open after the drain get to hear of the end; they are reflection and watchers by then."""
SPARE_SECONDS = 5
"""From the end of the drain's time to the end of the process, at the latest: docs/operations.md, Drain."""
_HARD_END_SECONDS = 3.0
"""After the drain's time: a process that is not gone by then shows where it hangs and is ended from outside Python."""


@dataclass(frozen=True, kw_only=True)
class ServeSettings:
    """What every service has. Services add their own fields."""

    listen: str = setting("127.0.0.1:0", help="address to serve gRPC on, host:port; port 0 takes a free one")
    advertise: str = setting("", help="host or host:port that others dial; default: derived from listen")
    health_listen: str = setting("127.0.0.1:0", help="address to serve grpc.health.v1 on")
    metrics_listen: str = setting("127.0.0.1:0", help="address to serve Prometheus metrics on, over HTTP")
    drain_seconds: float = setting(20.0, help="time to finish after SIGTERM")
    grace_seconds: float = setting(0.0, help="time from SIGTERM to SIGKILL, where something grants one; 0: not known")
    watchdog_seconds: float = setting(2.0, help="a peer or worker silent for that long is lost")
    log_level: str = setting("info", help=f"one of {', '.join(logs.LEVELS)}")

    def check_serving(self) -> None:
        """Raises:
        BadConfig: a value is out of range.
        """
        if self.drain_seconds < 0:
            raise BadConfig(f"drain_seconds is {self.drain_seconds:g}; 0 or more is needed")
        if 0 < self.grace_seconds < self.drain_seconds + SPARE_SECONDS:
            raise BadConfig(
                f"grace_seconds is {self.grace_seconds:g} and drain_seconds is {self.drain_seconds:g}; "
                f"a drain needs {SPARE_SECONDS} s less than the grace, to end by itself"
            )
        if self.watchdog_seconds < 0.1:
            raise BadConfig(f"watchdog_seconds is {self.watchdog_seconds:g}; at least 0.1 is needed")
        if self.log_level not in logs.LEVELS:
            raise BadConfig(f"log_level is {self.log_level!r}; one of {', '.join(logs.LEVELS)} is needed")


class Service(Protocol):
    """What a process does."""

    names: Sequence[str]
    """Full names of its gRPC services, for reflection."""

    def add_to(self, server: grpc.aio.Server) -> None:
        """Adds its servicers and raw methods."""

    async def run(self, life: "Life") -> None:
        """Its long-lived work. When `life.draining` is set: drain, then return. An error ends the process."""


class Life:
    """What a service may ask of its process."""

    def __init__(self, settings: ServeSettings, tls: Tls | None = None) -> None:
        self.address = ""
        """host:port that others dial; known before the service is made."""
        self.tls = tls
        """What it is served with there; None: in plain text."""
        self.draining = asyncio.Event()
        """Set by the first signal, or by `stop`."""
        self.exit_code = 0
        self._settings = settings
        self._health = Health(settings.watchdog_seconds)
        self._limit: asyncio.Timeout | None = None

    def set_ready(self, ready: bool, why: str = "") -> None:
        """States whether the service can serve now. Ignored while it drains: then it can't."""
        self._health.set_ready(ready and not self.draining.is_set(), why)

    def watch_progress(self, name: str, age_seconds: Callable[[], float | None], limit_seconds: float) -> None:
        """Makes liveness depend on an own progress; never on a peer.

        Args:
            name: what should move, for the log.
            age_seconds: time since it last moved; None while it owes nothing.
            limit_seconds: the age from which this process is no longer alive.
        """
        self._health.watch_progress(name, age_seconds, limit_seconds)

    def stop(self, exit_code: int) -> None:
        """Begins the drain, as SIGTERM does; the process ends with this code."""
        self.exit_code = self.exit_code or exit_code
        self._begin_drain(f"stopping with exit code {exit_code}")

    def _on_signal(self, number: int) -> None:
        if self.draining.is_set():
            log.warning("a second signal: ended at once")
            os._exit(128 + number)
        self._begin_drain(f"{signal.Signals(number).name}: draining")

    def _begin_drain(self, why: str) -> None:
        if self.draining.is_set():
            return
        log.info("%s", why)
        self._health.set_ready(False, "draining")
        self.draining.set()
        faulthandler.dump_traceback_later(self._settings.drain_seconds + _HARD_END_SECONDS, exit=True)
        if self._limit is not None:
            self._limit.reschedule(asyncio.get_running_loop().time() + self._settings.drain_seconds)

    async def _live(self, service: Service) -> None:
        """Runs the service, to its end or to the end of the drain."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(None) as self._limit:
                if self.draining.is_set():
                    self._limit.reschedule(loop.time() + self._settings.drain_seconds)
                await service.run(self)
        except TimeoutError:
            if self._limit is None or not self._limit.expired():
                raise
            log.error("not drained within %g s", self._settings.drain_seconds)
            self.exit_code = self.exit_code or FAILED_EXIT


def main(
    name: str,
    settings: ServeSettings,
    make: Callable[[Life], Service],
    *,
    connection_seconds: float = 0.0,
    load_tls: Callable[[], Tls | None] = lambda: None,
) -> NoReturn:
    """Lives one life and exits.

    Args:
        name: the service, e.g. "prefill".
        settings: its settings.
        make: makes the service; called on the event loop, once the port is bound and before it is served.
        connection_seconds: age at which connections to its port are renewed; 0: never, as peers want it.
        load_tls: what to serve that port with; what it raises ends the start.
    """
    try:
        settings.check_serving()
        logs.setup(name, settings.log_level)
        code = uvloop.run(_serve(name, settings, make, connection_seconds, load_tls()))
    except Exception as error:  # the last stop: everything becomes an exit code
        code = _exit_code(error)
    sys.stdout.flush()
    sys.stderr.flush()
    sys.exit(code)


async def _serve(
    name: str, settings: ServeSettings, make: Callable[[Life], Service], connection_seconds: float, tls: Tls | None
) -> int:
    life = Life(settings, tls)
    with otlp.exporting(name):
        return await _serve_life(life, name, settings, make, connection_seconds)


async def _serve_life(
    life: Life, name: str, settings: ServeSettings, make: Callable[[Life], Service], connection_seconds: float
) -> int:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, life._on_signal, number)
    server = grpc.aio.server(
        interceptors=[ErrorInterceptor()], options=server_options(settings.watchdog_seconds, connection_seconds)
    )
    bound = _bind("listen", settings.listen, lambda target: add_port(server, target, life.tls))
    life.address = str(advertised(settings.advertise, bound))
    health = _bind("health_listen", settings.health_listen, life._health.bind)
    async with AsyncExitStack() as servers:
        page = await servers.enter_async_context(_metrics_page(name, settings))
        service = make(life)
        service.add_to(server)
        add_TraceServiceServicer_to_server(TraceServicer(), server)
        reflection.enable_server_reflection([*service.names, TRACE_SERVICE, reflection.SERVICE_NAME], server)
        await life._health.start()
        servers.push_async_callback(life._health.stop)
        await server.start()
        servers.push_async_callback(server.stop, _LAST_CALLS_SECONDS)
        _announce(name, life.address, health=health, metrics=page.address)
        async with asyncio.TaskGroup() as background:
            beat = background.create_task(life._health.run())
            try:
                await life._live(service)
            finally:
                life._health.set_ready(False, "ended")
                beat.cancel()
    faulthandler.cancel_dump_traceback_later()
    return life.exit_code


def _bind(field: str, text: str, add_port: Callable[[str], int]) -> Address:
    """Takes the port a setting asks for.

    Raises:
        BadConfig: it can't be had; the setting and the reason.
    """
    wanted = parse(text, field=field)
    try:
        return Address(wanted.host, add_port(str(wanted)))
    except RuntimeError as error:
        reason = why_not_bindable(wanted) or "the address can't be bound"
        raise BadConfig(f"{field} is {text}: {reason}") from error


def _metrics_page(name: str, settings: ServeSettings) -> MetricsPage:
    wanted = parse(settings.metrics_listen, field="metrics_listen")
    try:
        return MetricsPage(name, wanted.host, wanted.port)
    except OSError as error:
        raise BadConfig(f"metrics_listen is {wanted}: {error.strerror or error}") from error


def _announce(name: str, address: str, *, health: Address, metrics: tuple[str, int]) -> None:
    """The one line on stdout: whoever started this process learns where it is."""
    line = {
        "service": name,
        "address": address,
        "health": str(_dialled(health, address)),
        "metrics": str(_dialled(Address(*metrics), address)),
    }
    print(json.dumps(line), flush=True)
    log.info("serving on %s", address)


def _dialled(bound: Address, advertised_address: str) -> Address:
    """Where others reach a port that may be bound to a wildcard: beside the main one."""
    if not bound.is_wildcard:
        return bound
    return Address(parse(advertised_address, field="advertise").host, bound.port)


def _exit_code(error: BaseException) -> int:
    """Tells why the process ends: configuration in one line, a bug with its traceback."""
    leaves = _leaves(error)
    configured = [e for e in leaves if isinstance(e, BadConfig | Misfit)]
    for leaf in configured:
        print(" ".join(str(leaf).split()), file=sys.stderr)
    if not configured or not all(isinstance(e, BadConfig | KvmeshError) for e in leaves):
        log.critical("ended by an error", exc_info=error)
    if not configured:
        return FAILED_EXIT
    return BAD_CONFIG_EXIT if isinstance(configured[0], BadConfig) else MISFIT_EXIT


def _leaves(error: BaseException) -> Sequence[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        return [leaf for inner in error.exceptions for leaf in _leaves(inner)]
    return [error]
