"""Somebody on the network: relays every connection to a service, and keeps all bytes that pass."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

_AT_ONCE_BYTES = 1 << 16


class Eavesdropper:
    """Both directions of all connections, in the order heard."""

    def __init__(self, target: str) -> None:
        self._host, _, self._port = target.rpartition(":")
        self.address = ""
        """Whoever dials this reaches the target."""
        self.heard: list[bytearray] = []
        """One for each connection and direction."""

    async def relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Until either end closes."""
        with contextlib.suppress(OSError):
            onward, back = await asyncio.open_connection(self._host, int(self._port))
            await asyncio.gather(self._pass(reader, back), self._pass(onward, writer))
        writer.close()

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heard = bytearray()
        self.heard.append(heard)
        try:
            while piece := await reader.read(_AT_ONCE_BYTES):
                heard += piece
                writer.write(piece)
                await writer.drain()
        finally:
            writer.close()


@asynccontextmanager
async def eavesdropping(target: str) -> AsyncIterator[Eavesdropper]:
    """A relay to host:port, whoever listens there, now or later."""
    between = Eavesdropper(target)
    server = await asyncio.start_server(between.relay, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    between.address = f"{host}:{port}"
    try:
        yield between
    finally:
        server.close()
