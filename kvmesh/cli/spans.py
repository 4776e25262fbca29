"""The spans of one room, asked of every process of a mesh and laid on one time line. Called by `kvmesh trace`.

Each host has its own clock. A process whose spans do not lie inside the spans they are part of is shifted until they do.
"""

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from kvmesh.errors import KvmeshError
from kvmesh.rpc.channels import dial
from kvmesh.rpc.status import peer_errors
from kvmesh.v1 import bootstrap_pb2, trace_pb2
from kvmesh.v1.trace_pb2_grpc import TraceServiceStub

ANSWER_SECONDS = 3.0
_TOLERANCE_SECONDS = 0.005
"""By which clocks of one host may seem to differ: spans are stamped a moment after what they tell of."""


@dataclass(frozen=True, slots=True)
class Row:
    """One span, in seconds after the first began."""

    process: str
    span_id: bytes
    parent_id: bytes
    name: str
    begun: float
    seconds: float
    attributes: Mapping[str, str]
    error: str
    depth: int = 0

    @property
    def ended(self) -> float:
        """When it was over."""
        return self.begun + self.seconds


def members(picture: bootstrap_pb2.WatchMeshResponse) -> list[str]:
    """Addresses of all stages and decoders."""
    seats = [seat.member for pipeline in picture.pipelines for seat in pipeline.seats]
    return [m.address for m in [*seats, *(d.member for d in picture.decoders)] if m.address]


async def collect(addresses: Iterable[str], room: int) -> tuple[list[trace_pb2.ListSpansResponse], list[str]]:
    """What each process knows of a room, and of every trace that any of them says the room is part of.

    Returns:
        The answers, and what was wrong with those who gave none.
    """
    asked = list(dict.fromkeys(addresses))
    first = await asyncio.gather(*(_ask(address, trace_pb2.ListSpansRequest(room=room)) for address in asked))
    traces = sorted({s.trace_id for a in first if not isinstance(a, str) for s in a.spans})
    if traces:
        again = trace_pb2.ListSpansRequest(room=room, trace_ids=traces[:64])
        first = await asyncio.gather(*(_ask(address, again) for address in asked))
    return [a for a in first if not isinstance(a, str)], [a for a in first if isinstance(a, str)]


async def _ask(address: str, request: trace_pb2.ListSpansRequest) -> trace_pb2.ListSpansResponse | str:
    try:
        async with dial(address) as channel:
            with peer_errors(address):
                return await TraceServiceStub(channel).ListSpans(request, timeout=ANSWER_SECONDS)
    except KvmeshError as error:
        return error.message


def rows(answers: Sequence[trace_pb2.ListSpansResponse]) -> list[Row]:
    """All spans on one time line: each after the one it is part of, by their begin."""
    found = {s.span_id: _row(a.process, s) for a in answers for s in a.spans}
    aligned = _aligned(found)
    if not aligned:
        return []
    origin = min(row.begun for row in aligned.values())
    return _in_order({key: replace(row, begun=row.begun - origin) for key, row in aligned.items()})


def _row(process: str, span: trace_pb2.Span) -> Row:
    begun, seconds = span.start.ToNanoseconds() / 1e9, span.duration.ToNanoseconds() / 1e9
    return Row(process, span.span_id, span.parent_span_id, span.name, begun, seconds, dict(span.attributes), span.error)


def _aligned(found: Mapping[bytes, Row]) -> dict[bytes, Row]:
    shifts: dict[str, float] = {}
    for row in _parents_first(found):
        parent = found.get(row.parent_id)
        if parent is not None and parent.process != row.process and row.process not in shifts:
            shifts[row.process] = _shift(row, parent, shifts.get(parent.process, 0.0))
    return {key: replace(row, begun=row.begun + shifts.get(row.process, 0.0)) for key, row in found.items()}


def _shift(row: Row, parent: Row, parent_shift: float) -> float:
    """What brings a span into the middle of the one it is part of; 0 when it lies there already."""
    begun, ended = parent.begun + parent_shift, parent.ended + parent_shift
    inside = begun - _TOLERANCE_SECONDS <= row.begun and row.ended <= ended + _TOLERANCE_SECONDS
    return 0.0 if inside else begun + max(0.0, parent.seconds - row.seconds) / 2 - row.begun


def _parents_first(found: Mapping[bytes, Row]) -> list[Row]:
    return sorted(found.values(), key=lambda row: (_depth(found, row), row.begun))


def _depth(found: Mapping[bytes, Row], row: Row) -> int:
    depth, seen = 0, {row.span_id}
    while (row.parent_id in found) and row.parent_id not in seen:
        row = found[row.parent_id]
        seen.add(row.span_id)
        depth += 1
    return depth


def _in_order(found: Mapping[bytes, Row]) -> list[Row]:
    """Depth first."""
    ordered: list[Row] = []

    def add(row: Row, depth: int) -> None:
        ordered.append(replace(row, depth=depth))
        parts = [r for r in found.values() if r.parent_id == row.span_id != r.span_id]
        for part in sorted(parts, key=lambda r: r.begun):
            add(part, depth + 1)

    for row in sorted(found.values(), key=lambda r: r.begun):
        if row.parent_id not in found:
            add(row, 0)
    return ordered
