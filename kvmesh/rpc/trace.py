"""TraceService: this process's latest spans, for `kvmesh trace`. Served by the life of every process."""

import grpc

from kvmesh.errors import InvalidInput
from kvmesh.telemetry import logs, traces
from kvmesh.v1 import trace_pb2 as pb
from kvmesh.v1.trace_pb2_grpc import TraceServiceServicer

SERVICE = "kvmesh.v1.TraceService"
MAX_TRACES = 64
TRACE_ID_BYTES, SPAN_ID_BYTES = 16, 8

ListContext = grpc.aio.ServicerContext[pb.ListSpansRequest, pb.ListSpansResponse]


class TraceServicer(TraceServiceServicer):
    """Reads the ring."""

    async def ListSpans(  # noqa: N802
        self,
        request: pb.ListSpansRequest,
        context: ListContext,  # noqa: ARG002
    ) -> pb.ListSpansResponse:
        """The spans of a room and its traces; see trace.proto for the errors."""
        if not request.room and not request.trace_ids:
            raise InvalidInput("name a room or a trace", field="room")
        if len(request.trace_ids) > MAX_TRACES or any(len(t) != TRACE_ID_BYTES for t in request.trace_ids):
            raise InvalidInput(f"at most {MAX_TRACES} ids of {TRACE_ID_BYTES} bytes", field="trace_ids")
        ids = [int.from_bytes(t, "big") for t in request.trace_ids]
        spans = [_span_to(span) for span in traces.RING.of(request.room, ids)]
        return pb.ListSpansResponse(process=logs.process_name(), spans=spans)


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
