"""A real server on a free port for the tests of kvmesh.rpc."""

from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import Any

import grpc

from kvmesh.rpc.channels import dial, server_options
from kvmesh.rpc.interceptors import ErrorInterceptor


@asynccontextmanager
async def served(
    *,
    handlers: Iterable[grpc.GenericRpcHandler] = (),
    add: Any = None,
    watchdog_seconds: float = 2.0,
    connection_seconds: float = 0.0,
    resend_unsent: bool = False,
    host: str = "127.0.0.1",
) -> AsyncIterator[grpc.aio.Channel]:
    """A server with the mesh's interceptor and options on a free port, and a channel to it."""
    server = grpc.aio.server(
        interceptors=[ErrorInterceptor()], options=server_options(watchdog_seconds, connection_seconds)
    )
    server.add_generic_rpc_handlers(tuple(handlers))
    if add is not None:
        add(server)
    port = server.add_insecure_port(f"{host}:0")
    await server.start()
    try:
        address = f"{host}:{port}"
        async with dial(address, watchdog_seconds=watchdog_seconds, resend_unsent=resend_unsent) as channel:
            yield channel
    finally:
        await server.stop(0)
