"""Spans of players of the trace service, for the tests of `kvmesh trace`."""

from kvmesh.v1 import trace_pb2 as pb

ROOM = (1 << 40) + 24
"""1.24"""


def span(number: int, parent: int, name: str, begin_ms: float, ms: float, error: str = "", room: int = ROOM) -> pb.Span:
    told = pb.Span(trace_id=bytes(16), span_id=number.to_bytes(4, "big"), name=name, error=error, room=room)
    if parent:
        told.parent_span_id = parent.to_bytes(4, "big")
    told.start.FromNanoseconds(1_700_000_000_000_000_000 + int(begin_ms * 10**6))
    told.duration.FromNanoseconds(int(ms * 10**6))
    return told


def process(name: str, *spans: pb.Span) -> pb.ListSpansResponse:
    return pb.ListSpansResponse(process=name, spans=spans)


GATEWAY = process("gateway", span(1, 0, "request", 0, 100), span(2, 1, "room", 10, 80))
