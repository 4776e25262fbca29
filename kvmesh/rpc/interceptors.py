"""The one place where errors leave a service. Every server of the mesh has this interceptor and no other.

Servicers raise; nothing else calls `context.abort`. A streaming servicer's generator is closed at once when its call ends,
however it ends, so that what it acquired is released then and not by the garbage collector.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any

import grpc

from kvmesh.rpc.status import is_expected, to_status, told
from kvmesh.rpc.streams import has_left
from kvmesh.telemetry import logs, metrics

log = logs.get(__name__)

_Behaviour = Callable[[Any, Any], Any]
_Continuation = Callable[[grpc.HandlerCallDetails], Awaitable["grpc.RpcMethodHandler[Any, Any] | None"]]


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """Turns what a servicer raises into a status; what is no KvmeshError is logged, once, with its traceback."""

    async def intercept_service(
        self, continuation: _Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        """Wraps the method that was called; None where there is none."""
        method = await continuation(handler_call_details)
        if method is None:
            return None
        name = handler_call_details.method
        make, behaviour = _kind(method)
        wrapped = _streaming(name, behaviour) if method.response_streaming else _unary(name, behaviour)
        return make(
            wrapped,
            request_deserializer=method.request_deserializer,
            response_serializer=method.response_serializer,
        )


def _kind(method: grpc.RpcMethodHandler[Any, Any]) -> tuple[Callable[..., grpc.RpcMethodHandler[Any, Any]], _Behaviour]:
    """How a method of this kind is made, and what it does."""
    make: Callable[..., grpc.RpcMethodHandler[Any, Any]]
    behaviour: Any
    if method.request_streaming and method.response_streaming:
        make, behaviour = grpc.stream_stream_rpc_method_handler, method.stream_stream
    elif method.request_streaming:
        make, behaviour = grpc.stream_unary_rpc_method_handler, method.stream_unary
    elif method.response_streaming:
        make, behaviour = grpc.unary_stream_rpc_method_handler, method.unary_stream
    else:
        make, behaviour = grpc.unary_unary_rpc_method_handler, method.unary_unary
    return make, behaviour


def _unary(name: str, behaviour: _Behaviour) -> _Behaviour:
    async def answer(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        try:
            return await behaviour(request, context)
        except Exception as error:
            await _abort(name, error, context)

    return answer


def _streaming(name: str, behaviour: _Behaviour) -> _Behaviour:
    async def stream(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        try:
            if inspect.isasyncgenfunction(behaviour):
                await _write_all(behaviour(request, context), context)
            else:
                await behaviour(request, context)
        except Exception as error:
            await _abort(name, error, context)

    return stream


async def _write_all(answers: AsyncIterator[Any], context: grpc.aio.ServicerContext[Any, Any]) -> None:
    async with aclosing(answers) as closing:  # type: ignore[type-var]  # an async generator has aclose
        async for answer in closing:
            await context.write(answer)


async def _abort(name: str, error: Exception, context: grpc.aio.ServicerContext[Any, Any]) -> None:
    """Ends the call with the error's status."""
    if isinstance(error, grpc.aio.AbortError):
        raise error  # ended already, by a servicer that is not ours
    if has_left(error, context):
        log.debug("%s: the client left while it was written to", name)
        raise asyncio.CancelledError from error  # what gRPC would have raised a moment later
    if not is_expected(error):
        log.error("%s failed", name, exc_info=error)
    known = told(error)
    metrics.RPC_ERRORS_TOTAL.labels(method=name, code=known.code, reason=known.label).inc()
    await context.abort_with_status(to_status(known))
