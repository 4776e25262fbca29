"""Spans: where the time of a room went, one span for each stop of the walk. Used by the services; called with plain values.

Each process keeps its latest spans in a ring, which `kvmesh trace` reads. Where OpenTelemetry's SDK is set up (`otlp`), the
same spans go to a collector, with the same ids. W3C trace context ties them together over gRPC metadata, and, where a
stream carries many rooms, over the message that announces the room. A span never holds a prompt, nor what a client wrote
elsewhere: anyone may read it.
"""

import asyncio
import random
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from time import monotonic, time_ns
from types import TracebackType
from typing import Self

from opentelemetry import trace
from opentelemetry.trace import INVALID_SPAN_CONTEXT, NonRecordingSpan, SpanContext, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from kvmesh.errors import InvalidInput, KvmeshError, UnknownModel
from kvmesh.protocol.ids import short
from kvmesh.telemetry import logs

RING_SPANS = 4096
"""Spans a process keeps: the last thousand rooms or so, in about four megabytes."""

MAX_ERROR_CHARS = 200
_MAX_TRACEPARENT_CHARS = 256
"""Today's have 55, later versions may add to them; OpenTelemetry would log those over 512."""
_CLIENTS_DOING = (InvalidInput, UnknownModel)
"""Errors whose message may repeat what the client wrote."""

_W3C = TraceContextTextMapPropagator()
_TRACER = trace.get_tracer("kvmesh")
_NOT_EXPORTED = NonRecordingSpan(INVALID_SPAN_CONTEXT)

Value = str | int | float


@dataclass(slots=True)
class Span:
    """A piece of work for one room, while it lasts and after."""

    name: str
    context: SpanContext
    parent: SpanContext
    begun: float
    """On the monotonic clock, as is `ended`."""
    begun_ns: int = 0
    """The same on the wall clock, as it was then."""
    room: int = 0
    """0: of no room, yet."""
    ended: float = 0.0
    error: str = ""
    """Why it ended; empty when it ended well."""
    attributes: dict[str, Value] = field(default_factory=dict)
    exported: trace.Span = _NOT_EXPORTED
    """The SDK's, until the end: it is three times as large."""

    @property
    def traceparent(self) -> str:
        """What the next service is told, in W3C's form."""
        carrier: dict[str, str] = {}
        _W3C.inject(carrier, trace.set_span_in_context(NonRecordingSpan(self.context)))
        return carrier.get("traceparent", "")

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """The same, for a gRPC call."""
        return (("traceparent", self.traceparent),)

    def child(self, name: str, *, room: int = 0, begun: float | None = None) -> "Span":
        """A part of this span; of the same room unless another is named."""
        return start(name, parent=self.context, room=room or self.room, begun=begun)

    def end(self, error: str = "", *, ended: float | None = None) -> None:
        """It is over, now or at a time of the monotonic clock. Repeated: nothing."""
        if self.ended:
            return
        self.ended, self.error = monotonic() if ended is None else ended, error[:MAX_ERROR_CHARS]
        RING.add(self)
        if self.exported.is_recording():
            self._export()
        self.exported = _NOT_EXPORTED

    def _export(self) -> None:
        self.exported.set_attribute("kvmesh.process", logs.process_name())
        if self.room:
            self.exported.set_attribute("kvmesh.room", short(self.room))
        self.exported.set_attributes(self.attributes)
        if self.error:
            self.exported.set_status(Status(StatusCode.ERROR, self.error))
        self.exported.end(end_time=self.begun_ns + max(0, int((self.ended - self.begun) * 1e9)))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, frames: TracebackType | None
    ) -> None:
        self.end(_why(error))


def start(name: str, *, parent: SpanContext, room: int = 0, begun: float | None = None) -> Span:
    """A span that begins now, or began at a time of the monotonic clock.

    Args:
        parent: `INVALID_SPAN_CONTEXT` for the first of a trace.
    """
    at = monotonic() if begun is None else begun
    begun_ns = wall_ns(at)
    within = trace.set_span_in_context(NonRecordingSpan(parent))
    exported = _TRACER.start_span(name, context=within, start_time=begun_ns)
    context = exported.get_span_context()
    if not context.is_valid or context.span_id == parent.span_id:  # no SDK made one
        context = SpanContext(
            parent.trace_id if parent.is_valid else random.getrandbits(128),
            random.getrandbits(64),
            is_remote=False,
            trace_flags=parent.trace_flags if parent.is_valid else trace.TraceFlags(trace.TraceFlags.SAMPLED),
        )
    return Span(name, context, parent, at, begun_ns, room=room, exported=exported)


def heard(traceparent: str) -> SpanContext:
    """The context a message carries; invalid where it carries none, or nonsense."""
    if len(traceparent) > _MAX_TRACEPARENT_CHARS:
        return INVALID_SPAN_CONTEXT
    return trace.get_current_span(_W3C.extract({"traceparent": traceparent})).get_span_context()


def of_call(metadata: Iterable[tuple[str, str | bytes]] | None) -> SpanContext:
    """The context that the metadata of a call carries; invalid where it carries none, or nonsense. A `tracestate` is for
    other vendors, and not passed on."""
    return heard(next((str(value) for key, value in metadata or () if key == "traceparent"), ""))


def wall_ns(at: float) -> int:
    """A time of the monotonic clock as Unix nanoseconds: for people and collectors, never for a decision."""
    return time_ns() - int((monotonic() - at) * 1e9)


def _why(error: BaseException | None) -> str:
    if isinstance(error, asyncio.CancelledError | GeneratorExit):
        return "cancelled"
    if isinstance(error, KvmeshError):
        return error.reason if isinstance(error, _CLIENTS_DOING) else f"{error.reason}: {error.message}"
    return type(error).__name__ if error is not None else ""


class Ring:
    """The latest spans of this process."""

    def __init__(self, num_spans: int) -> None:
        self._spans: deque[Span] = deque(maxlen=num_spans)

    def add(self, span: Span) -> None:
        """Keeps a span that has ended, in the place of the oldest."""
        self._spans.append(span)

    def all(self) -> list[Span]:
        """A copy, which another thread may look through."""
        return list(self._spans)


RING = Ring(RING_SPANS)


def chosen(spans: Sequence[Span], room: int, trace_ids: Collection[int], most: int) -> tuple[list[Span], bool]:
    """The spans of a room, with all that they are part of and all parts of that; and those of the traces named.

    One trace of a client may hold many requests, so a room does not bring its trace.

    Args:
        room: 0 for none.
        most: where there are more, those of the room come first, then the latest.

    Returns:
        The spans by their begin, and whether some were left out.
    """
    traces = set(trace_ids) | {s.context.trace_id for s in spans if room and s.room == room}
    found = {s.context.span_id: s for s in spans if s.context.trace_id in traces}
    roots = _roots(found)
    of_room = {roots[key] for key, span in found.items() if room and span.room == room}
    own = [s for key, s in found.items() if roots[key] in of_room]
    others = [s for key, s in found.items() if roots[key] not in of_room and s.context.trace_id in trace_ids]
    kept = [*own[::-1], *others[::-1]][:most]
    return sorted(kept, key=lambda s: s.begun), len(own) + len(others) > most


def _roots(found: Mapping[int, Span]) -> dict[int, int]:
    """The first of those above each span, by their ids; each is looked at once."""
    roots: dict[int, int] = {}
    for key in found:
        path, at = [], key
        while at not in roots and (above := found[at].parent.span_id) in found:
            roots[at] = at  # ends a circle, were there one
            path.append(at)
            at = above
        roots |= dict.fromkeys([*path, at], roots.get(at, at))
    return roots


def attributes_text(attributes: Mapping[str, Value]) -> dict[str, str]:
    """Attributes as people read them."""
    return {name: f"{value:g}" if isinstance(value, float) else str(value) for name, value in dict(attributes).items()}
