"""Metrics pages over HTTP: read once, or again and again as Prometheus does. Called by the mesh and the pairs."""

import asyncio
from collections.abc import Mapping, Sequence
from itertools import cycle
from time import monotonic

LIKE_PROMETHEUS = {
    "Accept": "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.3",
    "Accept-Encoding": "gzip",
}
"""What it asks for: exemplars, compressed."""


Page = Mapping[str, float]
"""Series of the mesh, as a page writes them → value."""


def own_series(text: str) -> Page:
    """What a page in the plain format says of the mesh. What it says of its process moves by itself."""
    rows = [line.rpartition(" ") for line in text.splitlines() if line.startswith("kvmesh_")]
    return {series: float(value) for series, _, value in rows}


async def read(address: str, headers: Mapping[str, str]) -> bytes:
    """The body of a page.

    Args:
        address: host:port.

    Raises:
        OSError: nobody answers, or not with a page.
    """
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        lines = [f"{name}: {value}" for name, value in {"Host": address, "Connection": "close", **headers}.items()]
        writer.write("\r\n".join(["GET /metrics HTTP/1.1", *lines, "", ""]).encode())
        head, _, body = (await reader.read(-1)).partition(b"\r\n\r\n")
    finally:
        writer.close()
    if b" 200 " not in head.partition(b"\r\n")[0]:
        raise OSError(f"{address} answered no page: {head[:100]!r}")
    return body


class Scraper:
    """Reads page after page, each once an interval, spread over it as Prometheus spreads its targets."""

    def __init__(self, addresses: Sequence[str], every_seconds: float) -> None:
        """Args:
        addresses: of the pages, host:port.
        every_seconds: the interval, counted over all times in which it runs.
        """
        self._pages = cycle(addresses)
        self._pause_seconds = self._left_seconds = every_seconds / len(addresses)
        self.num_pages = 0
        """Pages read so far."""

    async def run(self) -> None:
        """Scrapes until cancelled. What was left to wait then is left when it runs again."""
        while True:
            due = monotonic() + self._left_seconds
            try:
                await asyncio.sleep(self._left_seconds)
            finally:
                self._left_seconds = max(0.0, due - monotonic())
            await read(next(self._pages), LIKE_PROMETHEUS)
            self.num_pages += 1
            self._left_seconds = max(0.0, due + self._pause_seconds - monotonic())
