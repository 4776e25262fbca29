"""Coroutines that live and end together. Called by services for the reader, the writer and the end of one stream."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

import grpc

from kvmesh.errors import KvmeshError

_Result = TypeVar("_Result")


async def race(*work: Coroutine[Any, Any, None]) -> None:
    """Runs all of `work` until one ends, then cancels the others and waits for them.

    Raises:
        Exception: what ended it, if it was an error; of several at the same moment one that nobody expects (no KvmeshError,
            none of gRPC) before the others, and any before an ordinary end.
    """
    tasks = [asyncio.ensure_future(w) for w in work]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    errors = [error for task in done if (error := task.exception()) is not None]
    for error in sorted(errors, key=_is_expected):
        raise error


def _is_expected(error: BaseException) -> bool:
    """Also what gRPC raises, no status, where one writes to a stream that has just ended."""
    return isinstance(error, KvmeshError | grpc.RpcError | grpc.aio.BaseError)


async def together(*work: Coroutine[Any, Any, _Result]) -> list[_Result]:
    """What all of `work` return. When one fails, the others are cancelled and waited for.

    Raises:
        Exception: the first error.
    """
    tasks = [asyncio.ensure_future(w) for w in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def until(task: asyncio.Future[None]) -> None:
    """Waits for a task that lives longer than the wait: being cancelled here does not cancel it.

    Raises:
        Exception: what the task raised.
    """
    await asyncio.shield(task)
