"""Streams of raw bytes: no protobuf around megabytes. Called by services for methods that stand in a proto in words only.

A raw method lives beside the protobuf methods of the same service name; gRPC asks one set of methods after the other.
"""

from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from typing import Any

import grpc

RawMethod = Callable[[AsyncIterator[bytes], Any], AsyncIterator[bytes] | Coroutine[Any, Any, None]]
"""(messages of the caller, context) → messages to the caller."""


def raw_stream_handler(service: str, methods: Mapping[str, RawMethod]) -> grpc.GenericRpcHandler:
    """Methods that carry bytes both ways, for `server.add_generic_rpc_handlers`.

    Args:
        service: full service name, e.g. "kvmesh.v1.PrefillService".
        methods: by their names in that service; each an async generator function, or a coroutine that writes to its context.
    """
    return grpc.method_handlers_generic_handler(
        service, {name: grpc.stream_stream_rpc_method_handler(method) for name, method in methods.items()}
    )


def raw_stream_call(
    channel: grpc.aio.Channel, path: str, *, timeout: float | None = None
) -> grpc.aio.StreamStreamCall[bytes, bytes]:
    """Opens a stream of bytes.

    Args:
        channel: to the peer.
        path: e.g. "/kvmesh.v1.PrefillService/Link".
        timeout: seconds the stream may live; None for no end.
    """
    method: grpc.aio.StreamStreamMultiCallable[bytes, bytes] = channel.stream_stream(path)
    return method(timeout=timeout)
