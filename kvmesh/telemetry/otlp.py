"""Spans to a collector, over OTLP. Called by the life of a process; on where OpenTelemetry's own variables name an endpoint.

Needs the extra `kvmesh[traces]`; without it spans stay in the ring of each process. A collector that is away costs nothing
but its spans: they leave in the background, from a bounded queue.
"""

import importlib
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version

from kvmesh.errors import BadConfig

ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
"""The first that is set turns export on; all other variables of the SDK count as well."""
_LAST_SECONDS = 1.0
"""What the last spans get to leave in, at the end of the process."""


@contextmanager
def exporting(service: str) -> Iterator[None]:
    """Exports while entered, if an endpoint is named.

    Args:
        service: "prefill" becomes service.name "kvmesh-prefill", unless OTEL_SERVICE_NAME says otherwise.

    Raises:
        BadConfig: an endpoint is named and the extra is not installed.
    """
    named = next((name for name in ENDPOINTS if os.environ.get(name)), None)
    if named is None:
        yield
        return
    try:
        collector = importlib.import_module("kvmesh.telemetry.collector")
    except ImportError as error:
        raise BadConfig(
            f"{named} is set, and the extra kvmesh[traces] is not installed: install it, or unset the variable"
        ) from error
    name = os.environ.get("OTEL_SERVICE_NAME", f"kvmesh-{service}")
    provider = collector.export_as({"service.name": name, "service.version": version("kvmesh")})
    try:
        yield
    finally:
        last = threading.Thread(target=provider.shutdown, daemon=True)
        last.start()
        last.join(_LAST_SECONDS)
