"""What the SDK is given at the end of a span."""

import gc
from typing import Any

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import INVALID_SPAN_CONTEXT

from kvmesh.protocol.ids import Term, compose
from kvmesh.telemetry import logs, traces
from kvmesh.telemetry.traces import Ring, start


@pytest.fixture
def exported(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    """What was exported so far, by an SDK of this test alone."""
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(traces, "_TRACER", provider.get_tracer("kvmesh"))
    monkeypatch.setattr(traces, "RING", Ring(8))
    monkeypatch.setitem(logs._process, "service", "prefill")
    monkeypatch.setitem(logs._process, "member", "p0/1")
    return exporter


def test_it_tells_what_the_ring_tells(exported: InMemorySpanExporter) -> None:
    span = start("send", parent=INVALID_SPAN_CONTEXT, room=compose(Term(1), 24))
    span.attributes["bytes"] = 5
    span.end("stage_lost: gone")
    (got,) = exported.get_finished_spans()
    (kept,) = traces.RING.all()
    assert dict(got.attributes or {}) == {"bytes": 5, "kvmesh.room": "1.24", "kvmesh.process": "prefill p0/1"}
    assert got.status.description == kept.error
    assert got.context is not None
    assert (got.context.trace_id, got.context.span_id) == (kept.context.trace_id, kept.context.span_id)


@pytest.mark.parametrize("step_ns", [-(10**9), 10**9], ids=["back", "ahead"])
def test_a_wall_clock_that_is_set_changes_no_duration(
    exported: InMemorySpanExporter, monkeypatch: pytest.MonkeyPatch, step_ns: int
) -> None:
    span, real = start("x", parent=INVALID_SPAN_CONTEXT), traces.time_ns
    monkeypatch.setattr(traces, "time_ns", lambda: real() + step_ns)
    span.end(ended=span.begun + 0.25)
    (got,) = exported.get_finished_spans()
    assert got.start_time is not None
    assert got.end_time is not None
    assert abs(got.end_time - got.start_time - 250_000_000) < 1000


def test_the_sdk_s_span_is_let_go_with_the_end(exported: InMemorySpanExporter) -> None:
    span = start("x", parent=INVALID_SPAN_CONTEXT)
    theirs: Any = span.exported
    assert theirs.is_recording()
    span.end()
    assert not [r for r in gc.get_referrers(theirs) if r is span]
    assert not span.exported.is_recording()
