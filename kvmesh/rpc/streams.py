"""Typed reading and truthful writing of streams. Called by whoever holds a long stream to a peer, or answers with one.

gRPC's `read` may return its EOF object, which no type checker can tell from a message, and its `write` to a call that has
ended raises something that is no status.
"""

import asyncio
from typing import Any, TypeVar, cast

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


def has_left(error: BaseException, context: grpc.aio.ServicerContext[Any, Any]) -> bool:
    """Whether an error of a servicer's write only says that the client has left."""
    return isinstance(error, grpc.aio.InternalError) or (isinstance(error, grpc.aio.UsageError) and context.done())


async def answer(context: grpc.aio.ServicerContext[Any, _Sent], message: _Sent) -> None:
    """Writes a message to the client.

    Raises:
        asyncio.CancelledError: it has left; what gRPC would have raised a moment later.
    """
    try:
        await context.write(message)
    except (grpc.aio.InternalError, grpc.aio.UsageError) as error:
        if has_left(error, context):
            raise asyncio.CancelledError from error
        raise
