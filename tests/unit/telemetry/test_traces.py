import asyncio
import time

import pytest
from opentelemetry.trace import INVALID_SPAN_CONTEXT, SpanContext

from kvmesh.telemetry import traces
from kvmesh.telemetry.traces import Ring, Span, heard, of_call, start

SENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture(autouse=True)
def ring(monkeypatch: pytest.MonkeyPatch) -> Ring:
    fresh = Ring(8)
    monkeypatch.setattr(traces, "RING", fresh)
    return fresh


def names(spans: list[Span]) -> list[str]:
    return [s.name for s in spans]


def test_a_span_continues_the_trace_of_its_caller() -> None:
    span = start("request", parent=of_call([("traceparent", SENT), ("other", b"\xff")]))
    assert f"{span.context.trace_id:032x}" == SENT[3:35]
    assert f"{span.parent.span_id:016x}" == SENT[36:52]
    assert span.context.span_id != span.parent.span_id


def test_what_a_span_tells_is_what_the_next_service_hears() -> None:
    span = start("request", parent=INVALID_SPAN_CONTEXT)
    there = heard(span.traceparent)
    assert (there.trace_id, there.span_id) == (span.context.trace_id, span.context.span_id)
    assert of_call(span.metadata) == there
    assert len(span.traceparent) == len(SENT)


@pytest.mark.parametrize("nonsense", ["", "x", SENT[:-3], SENT.replace("b7ad6b7169203331", "0" * 16), "é" * 70])
def test_nonsense_begins_a_trace_of_its_own(nonsense: str) -> None:
    assert not heard(nonsense).is_valid
    assert start("x", parent=heard(nonsense)).context.is_valid


def test_a_call_without_metadata_begins_a_trace_of_its_own() -> None:
    assert not of_call(None).is_valid


def test_a_span_is_kept_once_it_has_ended_and_once(ring: Ring) -> None:
    span = start("request", parent=INVALID_SPAN_CONTEXT, room=5)
    assert ring.of(5, []) == []
    span.end("first")
    span.end("second")
    assert [(s.name, s.error) for s in ring.of(5, [])] == [("request", "first")]


def test_a_part_belongs_to_the_room_of_the_whole_unless_it_names_another() -> None:
    span = start("request", parent=INVALID_SPAN_CONTEXT, room=5)
    part, other = span.child("check"), span.child("room", room=6)
    assert (part.room, other.room) == (5, 6)
    assert part.parent == other.parent == span.context


def test_a_room_brings_its_whole_trace_and_no_other(ring: Ring) -> None:
    request = start("request", parent=INVALID_SPAN_CONTEXT)
    request.child("assign", begun=3.0).end()
    request.child("room", room=7, begun=2.0).end()
    request.begun = 1.0
    request.end()
    start("another", parent=INVALID_SPAN_CONTEXT, room=8).end()
    assert names(ring.of(7, [])) == ["request", "room", "assign"]
    assert names(ring.of(0, [request.context.trace_id])) == ["request", "room", "assign"]
    assert ring.of(9, []) == ring.of(0, []) == []


def test_the_oldest_make_room(ring: Ring) -> None:
    for room in range(1, 20):
        start("x", parent=INVALID_SPAN_CONTEXT, room=room).end()
    assert [room for room in range(1, 20) if ring.of(room, [])] == list(range(12, 20))


@pytest.mark.parametrize(
    ("raised", "said"),
    [
        (ValueError("no"), "ValueError: no"),
        (ValueError(), "ValueError"),
        (asyncio.CancelledError(), "cancelled"),
        (GeneratorExit(), "cancelled"),
    ],
)
def test_a_span_says_why_it_ended(raised: BaseException, said: str) -> None:
    span = start("x", parent=INVALID_SPAN_CONTEXT)
    with pytest.raises(type(raised)), span:
        raise raised
    assert span.error == said


def test_a_time_of_the_monotonic_clock_has_a_date() -> None:
    assert abs(traces.wall_ns(time.monotonic() - 10) - (time.time_ns() - 10 * 10**9)) < 10**8


def test_the_flag_of_the_caller_is_passed_on() -> None:
    unsampled = heard(SENT[:-2] + "00")
    assert isinstance(unsampled, SpanContext)
    assert start("x", parent=unsampled).traceparent.endswith("-00")
    assert start("x", parent=INVALID_SPAN_CONTEXT).traceparent.endswith("-01")
