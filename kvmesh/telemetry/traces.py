"""Spans: where the time of a room went, one span for each stop of the walk. Used by the services; called with plain values.

Each process keeps its latest spans in a ring, which `kvmesh trace` reads. Where OpenTelemetry's SDK is set up (`otlp`), the
same spans go to a collector, with the same ids. W3C trace context ties them together over gRPC metadata, and, where a
stream carries many rooms, over the message that announces the room. A span never holds a prompt.
"""

import asyncio
import random
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from time import monotonic, time_ns
from types import TracebackType
from typing import Self

from opentelemetry import trace
from opentelemetry.trace import INVALID_SPAN_CONTEXT, NonRecordingSpan, SpanContext, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

RING_SPANS = 4096
"""Spans a process keeps: the last thousand rooms or so, in about four megabytes."""

_W3C = TraceContextTextMapPropagator()
_TRACER = trace.get_tracer("kvmesh")

Value = str | int | float


@dataclass(slots=True)
class Span:
    """A piece of work for one room, while it lasts and after."""

    name: str
    context: SpanContext
    parent: SpanContext
    begun: float
    """On the monotonic clock, as is `ended`."""
    room: int = 0
    """0: of no room, yet."""
    ended: float = 0.0
    error: str = ""
    """Why it ended; empty when it ended well."""
    attributes: dict[str, Value] = field(default_factory=dict)
    exported: trace.Span = field(default_factory=lambda: NonRecordingSpan(INVALID_SPAN_CONTEXT))

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
        self.ended, self.error = monotonic() if ended is None else ended, error
        RING.add(self)
        if self.exported.is_recording():
            self._export()

    def _export(self) -> None:
        if self.room:
            self.exported.set_attribute("kvmesh.room", self.room)
        self.exported.set_attributes(self.attributes)
        if self.error:
            self.exported.set_status(Status(StatusCode.ERROR, self.error))
        self.exported.end(end_time=wall_ns(self.ended))

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
    within = trace.set_span_in_context(NonRecordingSpan(parent))
    exported = _TRACER.start_span(name, context=within, start_time=wall_ns(at))
    context = exported.get_span_context()
    if not context.is_valid or context.span_id == parent.span_id:  # no SDK made one
        context = SpanContext(
            parent.trace_id if parent.is_valid else random.getrandbits(128),
            random.getrandbits(64),
            is_remote=False,
            trace_flags=parent.trace_flags if parent.is_valid else trace.TraceFlags(trace.TraceFlags.SAMPLED),
        )
    return Span(name, context, parent, at, room=room, exported=exported)


def heard(traceparent: str) -> SpanContext:
    """The context a message carries; invalid where it carries none, or nonsense."""
    return trace.get_current_span(_W3C.extract({"traceparent": traceparent})).get_span_context()


def of_call(metadata: Iterable[tuple[str, str | bytes]] | None) -> SpanContext:
    """The context that the metadata of a call carries; invalid where it carries none, or nonsense."""
    carried = {key: str(value) for key, value in metadata or () if key in ("traceparent", "tracestate")}
    return trace.get_current_span(_W3C.extract(carried)).get_span_context()


def wall_ns(at: float) -> int:
    """A time of the monotonic clock as Unix nanoseconds: for people and collectors, never for a decision."""
    return time_ns() - int((monotonic() - at) * 1e9)


def _why(error: BaseException | None) -> str:
    if isinstance(error, asyncio.CancelledError | GeneratorExit):
        return "cancelled"
    return f"{type(error).__name__}: {error}".strip(": ") if error is not None else ""


class Ring:
    """The latest spans of this process."""

    def __init__(self, num_spans: int) -> None:
        self._spans: deque[Span] = deque(maxlen=num_spans)

    def add(self, span: Span) -> None:
        """Keeps a span that has ended, in the place of the oldest."""
        self._spans.append(span)

    def of(self, room: int, trace_ids: Iterable[int]) -> list[Span]:
        """The spans of a room, of the traces named, and all others of any trace that had the room; by their begin."""
        wanted = set(trace_ids) | {s.context.trace_id for s in self._spans if room and s.room == room}
        return sorted((s for s in self._spans if s.context.trace_id in wanted), key=lambda s: s.begun)


RING = Ring(RING_SPANS)


def attributes_text(attributes: Mapping[str, Value]) -> dict[str, str]:
    """Attributes as people read them."""
    return {name: f"{value:g}" if isinstance(value, float) else str(value) for name, value in attributes.items()}
