"""What observes a process, as a table: each function that records, and what stands there when it is off.

On is the product as it is: a function is put back on its class or module, not wrapped. Installed by `process.py`. A test
holds the table against what the services call.
"""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from time import monotonic
from typing import Any

from opentelemetry.trace import INVALID_SPAN_CONTEXT, NonRecordingSpan, SpanContext
from prometheus_client import Counter, Gauge, Histogram
from prometheus_client.metrics import MetricWrapperBase

from kvmesh.telemetry import traces
from kvmesh.telemetry.traces import Span

_NOT_EXPORTED = NonRecordingSpan(INVALID_SPAN_CONTEXT)


def _nothing(*_: object, **__: object) -> None:
    pass


def _itself(metric: MetricWrapperBase, *_: object, **__: object) -> MetricWrapperBase:
    return metric


def _untimed(_: MetricWrapperBase) -> AbstractContextManager[None]:
    return nullcontext()


def _bare_span(name: str, *, parent: SpanContext, room: int = 0, begun: float | None = None) -> Span:  # noqa: ARG001
    """Times alone, which services read; no ids, no parent."""
    at = monotonic() if begun is None else begun
    return Span(name, INVALID_SPAN_CONTEXT, INVALID_SPAN_CONTEXT, at, room=room, exported=_NOT_EXPORTED)


def _ended(span: Span, error: str = "", *, ended: float | None = None) -> None:
    """The same for the end: kept nowhere."""
    if not span.ended:
        span.ended, span.error = monotonic() if ended is None else ended, error


def _heard_nothing(_: object) -> SpanContext:
    return INVALID_SPAN_CONTEXT


@dataclass(frozen=True, slots=True)
class Recorder:
    """A function that records, where it lies, and what stands there when it is off."""

    owner: Any
    """A class or a module."""
    name: str
    on: object
    off: object

    @classmethod
    def of(cls, owner: Any, name: str, off: object) -> "Recorder":
        """The function as it lies there now."""
        return cls(owner, name, vars(owner)[name], off)

    def turn(self, *, on: bool) -> None:
        """Puts it back, or what stands for it."""
        setattr(self.owner, self.name, self.on if on else self.off)


RECORDERS = (
    Recorder.of(Counter, "inc", _nothing),
    Recorder.of(Gauge, "inc", _nothing),
    Recorder.of(Gauge, "dec", _nothing),
    Recorder.of(Gauge, "set", _nothing),
    Recorder.of(Histogram, "observe", _nothing),
    Recorder.of(Histogram, "time", _untimed),
    Recorder.of(MetricWrapperBase, "labels", _itself),
    Recorder.of(traces, "start", _bare_span),
    Recorder.of(traces, "heard", _heard_nothing),
    Recorder.of(traces, "of_call", _heard_nothing),
    Recorder.of(Span, "end", _ended),
    Recorder.of(Span, "traceparent", property(lambda _: "")),
    Recorder.of(Span, "metadata", property(lambda _: ())),
)


def turn(*, on: bool) -> None:
    """Turns all that observes this process on or off, from the next call of each function on; from any thread."""
    for recorder in RECORDERS:
        recorder.turn(on=on)
