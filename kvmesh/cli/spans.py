"""The spans of one room, asked of every process of a mesh and laid on one time line. Called by `kvmesh trace`.

Each host has its own clock. A process whose spans begin before those they are part of is shifted; what outlives its whole is
not: a step of a room that was cancelled runs on.
"""

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from kvmesh.cli.shown import shown
from kvmesh.errors import KvmeshError
from kvmesh.rpc.channels import dial
from kvmesh.rpc.status import peer_errors
from kvmesh.rpc.tls import Tls
from kvmesh.v1 import bootstrap_pb2, trace_pb2
from kvmesh.v1.trace_pb2_grpc import TraceServiceStub

ANSWER_SECONDS = 3.0
_TOLERANCE_SECONDS = 0.005
"""By which clocks of one host may seem to differ: spans are stamped a moment after what they tell of."""
_LATEST_SECONDS = 10.0
"""After the end of its whole a part may still begin, by a step behind others; later than that, it is a clock that is ahead."""
_MAX_TRACES = 64
"""That one call may name."""


@dataclass(frozen=True, slots=True)
class Row:
    """One span, in seconds after the first began."""

    process: str
    span_id: bytes
    parent_id: bytes
    name: str
    room: int
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
    return [*stages(picture), *(d.member.address for d in picture.decoders if d.member.address)]


def stages(picture: bootstrap_pb2.WatchMeshResponse) -> list[str]:
    """Addresses of all stages: the ones that may have TLS."""
    return [seat.member.address for pipeline in picture.pipelines for seat in pipeline.seats if seat.member.address]


async def collect(
    addresses: Iterable[str], room: int, over_tls: Mapping[str, Tls] = MappingProxyType({})
) -> tuple[list[trace_pb2.ListSpansResponse], list[str]]:
    """What each process knows of a room, and of every trace that any of them says the room is part of.

    Args:
        addresses: whom to ask.
        room: of what.
        over_tls: with what to dial those of the addresses that are not dialled in plain text.

    Returns:
        The answers, and what is missing: who gave none, or not all.
    """
    asked = list(dict.fromkeys(addresses))

    async def ask(address: str, request: trace_pb2.ListSpansRequest) -> trace_pb2.ListSpansResponse | str:
        return await _ask(address, request, over_tls.get(address))

    given = await asyncio.gather(*(ask(address, trace_pb2.ListSpansRequest(room=room)) for address in asked))
    traces = sorted({s.trace_id for a in given if not isinstance(a, str) for s in a.spans})[:_MAX_TRACES]
    if traces:
        again = trace_pb2.ListSpansRequest(room=room, trace_ids=traces)
        heard = [address for address, a in zip(asked, given, strict=True) if not isinstance(a, str)]
        given += await asyncio.gather(*(ask(address, again) for address in heard))
    answers = [a for a in given if not isinstance(a, str)]
    missing = [a if isinstance(a, str) else f"{a.process}: told a part only" for a in given if _lacks(a)]
    return answers, list(dict.fromkeys(missing))


def _lacks(given: trace_pb2.ListSpansResponse | str) -> bool:
    return isinstance(given, str) or given.truncated


async def _ask(address: str, request: trace_pb2.ListSpansRequest, tls: Tls | None) -> trace_pb2.ListSpansResponse | str:
    try:
        async with dial(address, tls=tls) as channel:
            with peer_errors(address):
                return shown(await TraceServiceStub(channel).ListSpans(request, timeout=ANSWER_SECONDS))
    except KvmeshError as error:
        return f"no answer: {error.message}"


def rows(answers: Sequence[trace_pb2.ListSpansResponse], room: int) -> list[Row]:
    """A room's request on one time line: each span after the one it is part of, by their begin.

    Other requests of the same trace are left out: a client may have made many in one.
    """
    found = {s.span_id: _row(a.process, s) for a in answers for s in a.spans}
    trees = [tree for tree in _trees(found) if any(row.room == room for row in tree)]
    aligned = _aligned([row for tree in trees for row in tree])
    if not aligned:
        return []
    origin = min(row.begun for row in aligned.values())
    placed = {key: replace(row, begun=row.begun - origin) for key, row in aligned.items()}
    return [row for tree in _trees(placed) for row in tree]


def _row(process: str, span: trace_pb2.Span) -> Row:
    begun, seconds = span.start.ToNanoseconds() / 1e9, max(0.0, span.duration.ToNanoseconds() / 1e9)
    return Row(
        *(process, span.span_id, span.parent_span_id, span.name, span.room, begun, seconds),
        attributes=dict(span.attributes),
        error=span.error,
    )


def _trees(found: Mapping[bytes, Row]) -> list[list[Row]]:
    """Each span that is part of none here, with all its parts after it, depth first; by their begin."""
    parts: dict[bytes, list[Row]] = {}
    for row in sorted(found.values(), key=lambda r: r.begun, reverse=True):
        parts.setdefault(row.parent_id if row.parent_id in found else b"", []).append(row)
    trees = []
    for root in reversed(parts.pop(b"", [])):
        tree, stack = [], [replace(root, depth=0)]
        while stack:
            tree.append(row := stack.pop())
            stack += [replace(part, depth=row.depth + 1) for part in parts.pop(row.span_id, ())]
        trees.append(tree)
    return trees


def _aligned(found: Sequence[Row]) -> dict[bytes, Row]:
    by_id = {row.span_id: row for row in found}
    shifts: dict[str, float] = {}
    for row in sorted(found, key=lambda r: (r.depth, r.begun)):
        parent = by_id.get(row.parent_id)
        if parent is not None and parent.process != row.process and row.process not in shifts:
            shifts[row.process] = _shift(row, parent, shifts.get(parent.process, 0.0))
    return {key: replace(row, begun=row.begun + shifts.get(row.process, 0.0)) for key, row in by_id.items()}


def _shift(row: Row, parent: Row, parent_shift: float) -> float:
    """What brings a span into the middle of the one it is part of; 0 where its begin may be right."""
    begun, ended = parent.begun + parent_shift, parent.ended + parent_shift
    if begun - _TOLERANCE_SECONDS <= row.begun <= ended + _LATEST_SECONDS:
        return 0.0
    return begun + max(0.0, parent.seconds - row.seconds) / 2 - row.begun
