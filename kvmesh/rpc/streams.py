"""Typed reading and truthful writing of client streams. Called by whoever holds a long stream to a peer.

gRPC's `read` may return its EOF object, which no type checker can tell from a message, and its `write` to a call that has
ended raises something that is no status.
"""

import asyncio
from typing import TypeVar, cast

import grpc

_Sent = TypeVar("_Sent")
_Received = TypeVar("_Received")


async def read(call: grpc.aio.StreamStreamCall[_Sent, _Received]) -> _Received | None:
    """The next message; None when the peer ended the stream well.

    Raises:
        grpc.aio.AioRpcError: it ended otherwise.
    """
    message = await call.read()
    return None if message is grpc.aio.EOF else cast("_Received", message)


async def write(call: grpc.aio.StreamStreamCall[_Sent, _Received], message: _Sent) -> None:
    """Writes a message.

    Raises:
        grpc.aio.AioRpcError: the call has ended; the status it ended with.
    """
    try:
        await call.write(message)
    except asyncio.InvalidStateError:
        raise grpc.aio.AioRpcError(
            await call.code(), await call.initial_metadata(), await call.trailing_metadata(), await call.details()
        ) from None
