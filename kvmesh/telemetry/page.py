"""The page Prometheus reads, over HTTP on a port of its own. Called by the life of a process.

prometheus-client serves it from a thread; it ends with the process, its port closed.
"""

import asyncio
from importlib.metadata import version
from types import TracebackType
from typing import Self

from prometheus_client import start_http_server

from kvmesh.telemetry import metrics
from kvmesh.telemetry.metrics import page_of


class MetricsPage:
    """A served page; leaving it closes the port."""

    def __init__(self, service: str, host: str, port: int) -> None:
        """Takes the port and serves.

        Args:
            service: whose metrics it shows.
            host: IP or name to bind.
            port: 0 takes a free one.

        Raises:
            OSError: the port can't be had.
        """
        metrics.BUILD_INFO.labels(version=version("kvmesh")).set(1)
        self._server, self._thread = start_http_server(port, host, page_of(service))
        bound = self._server.socket.getsockname()
        self.address: tuple[str, int] = (bound[0], bound[1])

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.to_thread(self.close)

    def close(self) -> None:
        """Ends the thread and frees the port; blocks for up to half a second."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
