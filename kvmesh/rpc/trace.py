"""TraceService: this process's latest spans, for `kvmesh trace`. Served by the life of every process.

Anyone may ask, so that no answer is long and none holds the event loop up: one thread looks for one at a time.
"""

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import grpc

from kvmesh.errors import Full, InvalidInput
from kvmesh.telemetry import logs, traces
from kvmesh.v1 import trace_pb2 as pb
from kvmesh.v1.trace_pb2_grpc import TraceServiceServicer

SERVICE = "kvmesh.v1.TraceService"
MAX_TRACES = 64
MAX_SPANS = 512
"""Told in one answer: a request has about 15, so these are 30 attempts."""
MAX_OPEN = 16
"""Calls that wait for the thread or hold it."""
TRACE_ID_BYTES, SPAN_ID_BYTES = 16, 8

ListContext = grpc.aio.ServicerContext[pb.ListSpansRequest, pb.ListSpansResponse]


class TraceServicer(TraceServiceServicer):
    """Reads the ring."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "spans")
        self._open = 0

    async def ListSpans(  # noqa: N802
        self,
        request: pb.ListSpansRequest,
        context: ListContext,  # noqa: ARG002
    ) -> pb.ListSpansResponse:
        """The spans of a room and of traces; see trace.proto for the errors."""
        if not request.room and not request.trace_ids:
            raise InvalidInput("name a room or a trace", field="room")
        if len(request.trace_ids) > MAX_TRACES or any(len(t) != TRACE_ID_BYTES for t in request.trace_ids):
            raise InvalidInput(f"at most {MAX_TRACES} ids of {TRACE_ID_BYTES} bytes", field="trace_ids")
        if self._open >= MAX_OPEN:
            raise Full(f"{MAX_OPEN} calls wait for spans already", retry_after_seconds=1.0)
        self._open += 1
        try:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._thread, _answer, request, traces.RING.all())
        finally:
            self._open -= 1


def _answer(request: pb.ListSpansRequest, latest: Sequence[traces.Span]) -> pb.ListSpansResponse:
    ids = {int.from_bytes(t, "big") for t in request.trace_ids}
    spans, truncated = traces.chosen(latest, request.room, ids, MAX_SPANS)
    return pb.ListSpansResponse(
        process=logs.process_name(), spans=[_span_to(span) for span in spans], truncated=truncated
    )


def _span_to(span: traces.Span) -> pb.Span:
    told = pb.Span(
        trace_id=span.context.trace_id.to_bytes(TRACE_ID_BYTES, "big"),
        span_id=span.context.span_id.to_bytes(SPAN_ID_BYTES, "big"),
        name=span.name,
        room=span.room,
        attributes=traces.attributes_text(span.attributes),
        error=span.error,
    )
    if span.parent.is_valid:
        told.parent_span_id = span.parent.span_id.to_bytes(SPAN_ID_BYTES, "big")
    told.start.FromNanoseconds(traces.wall_ns(span.begun))
    told.duration.FromNanoseconds(max(0, int((span.ended - span.begun) * 1e9)))
    return told
