"""Spans to a collector, over OTLP. Called by the life of a process; on where OpenTelemetry's own variables name an endpoint.

Needs the extra `kvmesh[traces]`; without it spans stay in the ring of each process. A collector that is away costs nothing
but its spans: they leave in the background, from a bounded queue.
"""

import importlib
import math
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version

from kvmesh.errors import BadConfig

ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
"""The first that is set turns export on."""
_LAST_SECONDS = 1.0
"""What the last spans get to leave in, at the end of the process."""

_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_COMPRESSIONS = ("OTEL_EXPORTER_OTLP_TRACES_COMPRESSION", "OTEL_EXPORTER_OTLP_COMPRESSION")
_TIMEOUTS = ("OTEL_EXPORTER_OTLP_TRACES_TIMEOUT", "OTEL_EXPORTER_OTLP_TIMEOUT")
_QUEUE, _BATCH = "OTEL_BSP_MAX_QUEUE_SIZE", "OTEL_BSP_MAX_EXPORT_BATCH_SIZE"
_QUEUE_SPANS, _BATCH_SPANS = 2048, 512
"""The SDK's, where the variables are not set."""
_COUNTS = (_QUEUE, _BATCH, "OTEL_BSP_SCHEDULE_DELAY", "OTEL_BSP_EXPORT_TIMEOUT")


@contextmanager
def exporting(service: str) -> Iterator[None]:
    """Exports while entered, if an endpoint is named.

    Args:
        service: "prefill" becomes service.name "kvmesh-prefill", unless OTEL_SERVICE_NAME says otherwise.

    Raises:
        BadConfig: an endpoint is named and the extra is not installed, or a variable can't be used.
    """
    named = next((name for name in ENDPOINTS if os.environ.get(name)), None)
    if named is None or _turned_off():
        yield
        return
    _check_variables()
    try:
        collector = importlib.import_module("kvmesh.telemetry.collector")
    except ImportError as error:
        raise BadConfig(
            f"{named} is set, and the extra kvmesh[traces] is not installed: install it, or unset the variable"
        ) from error
    name = os.environ.get("OTEL_SERVICE_NAME") or f"kvmesh-{service}"
    try:
        provider = collector.export_as({"service.name": name, "service.version": version("kvmesh")})
    except Exception as error:  # of the SDK, by a variable that is not checked here
        variables = ", ".join(sorted(v for v in os.environ if v.startswith("OTEL_")))
        raise BadConfig(f"one of {variables} can't be used: {type(error).__name__}: {error}") from error
    try:
        yield
    finally:
        last = threading.Thread(target=provider.shutdown, daemon=True)
        last.start()
        last.join(_LAST_SECONDS)


def _turned_off() -> bool:
    """Raises:
    BadConfig: spans are to go where this process can't send them.
    """
    exporter = os.environ.get("OTEL_TRACES_EXPORTER", "").strip().lower()
    _check(("OTEL_TRACES_EXPORTER",), lambda text: text.strip().lower() in ("", "otlp", "none"), "otlp or none")
    return exporter == "none" or os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true"


def _check_variables() -> None:
    """Refuses what the SDK would fail by, or pass over in silence.

    Raises:
        BadConfig: one line that names the variable.
    """
    _check(_PROTOCOLS, lambda text: text.strip().lower() in ("", "grpc"), "grpc")
    _check(_COMPRESSIONS, lambda text: text.strip().lower() == "gzip", "gzip, or no such variable,")
    _check(_TIMEOUTS, _is_seconds, "a number of seconds above 0")
    _check(_COUNTS, _is_count, "a whole number above 0")
    queue, batch = int(os.environ.get(_QUEUE, _QUEUE_SPANS)), int(os.environ.get(_BATCH, _BATCH_SPANS))
    if batch > queue:
        raise BadConfig(f"{_BATCH} is {batch} and {_QUEUE} is {queue}; a batch must fit into the queue")


def _check(names: Sequence[str], is_right: Callable[[str], bool], needed: str) -> None:
    for name in names:
        text = os.environ.get(name)
        if text is not None and not is_right(text):
            raise BadConfig(f"{name} is {text!r}; {needed} is needed")


def _is_seconds(text: str) -> bool:
    try:
        return 0 < float(text) < math.inf
    except ValueError:
        return False


def _is_count(text: str) -> bool:
    try:
        return int(text) > 0
    except ValueError:
        return False
