"""A collector of OpenTelemetry as a test plays it: one that takes spans, refuses them, or says nothing at all."""

import asyncio
import socket
import threading
from collections.abc import AsyncIterator
from concurrent import futures
from contextlib import asynccontextmanager
from dataclasses import dataclass

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

SECONDS = 20


@dataclass(frozen=True)
class Sent:
    """A span that came."""

    service: str
    name: str
    trace: str
    attributes: dict[str, str]


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """What a collector is sent."""

    def __init__(self) -> None:
        self.spans: list[Sent] = []
        self.refuses = False
        self._calls = 0
        self._called = threading.Condition()

    def Export(  # noqa: N802
        self, request: trace_service_pb2.ExportTraceServiceRequest, context: grpc.ServicerContext
    ) -> trace_service_pb2.ExportTraceServiceResponse:
        with self._called:
            self._calls += 1
            self._called.notify_all()
        if self.refuses:
            context.abort(grpc.StatusCode.PERMISSION_DENIED, f"call {self._calls}")
        for of in request.resource_spans:
            (service,) = [a.value.string_value for a in of.resource.attributes if a.key == "service.name"]
            for span in (s for scope in of.scope_spans for s in scope.spans):
                told = {a.key: a.value.string_value or str(a.value.int_value) for a in span.attributes}
                self.spans.append(Sent(service, span.name, span.trace_id.hex(), told))
        return trace_service_pb2.ExportTraceServiceResponse()

    async def called_again(self, times: int) -> None:
        """Waits for so many more calls."""
        wanted = self._calls + times

        def wait() -> bool:
            with self._called:
                return self._called.wait_for(lambda: self._calls >= wanted, SECONDS)

        assert await asyncio.to_thread(wait), "the collector was not called"


@asynccontextmanager
async def collector() -> AsyncIterator[tuple[Collector, str]]:
    """One that answers, and its endpoint."""
    played, server = Collector(), grpc.server(futures.ThreadPoolExecutor(4))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(played, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield played, f"http://127.0.0.1:{port}"
    finally:
        await asyncio.to_thread(server.stop(None).wait)


@asynccontextmanager
async def silent_collector() -> AsyncIterator[tuple[asyncio.Event, str]]:
    """One whose port takes connections, and that never says a word. Set once somebody came."""
    came, loop = asyncio.Event(), asyncio.get_running_loop()
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        held: list[socket.socket] = []

        def accept() -> None:
            held.append(server.accept()[0])
            came.set()

        loop.add_reader(server, accept)
        try:
            yield came, f"http://127.0.0.1:{server.getsockname()[1]}"
        finally:
            loop.remove_reader(server)
            for connection in held:
                connection.close()
