import asyncio
import logging
import time
from collections.abc import Collection

import pytest
from opentelemetry.trace import INVALID_SPAN_CONTEXT, SpanContext

from kvmesh.errors import Full, InvalidInput, Unavailable, UnknownModel
from kvmesh.telemetry import traces
from kvmesh.telemetry.traces import MAX_ERROR_CHARS, Ring, Span, chosen, heard, of_call, start

SENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture(autouse=True)
def ring(monkeypatch: pytest.MonkeyPatch) -> Ring:
    fresh = Ring(8)
    monkeypatch.setattr(traces, "RING", fresh)
    return fresh


def of(ring: Ring, room: int, trace_ids: Collection[int] = ()) -> list[Span]:
    spans, truncated = chosen(ring.all(), room, trace_ids, 100)
    assert not truncated
    return spans


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


@pytest.mark.parametrize(
    "nonsense", ["", "x", SENT[:-3], SENT.replace("b7ad6b7169203331", "0" * 16), "é" * 70, SENT + "-" + "x" * 8000]
)
def test_nonsense_begins_a_trace_of_its_own_and_is_not_logged(nonsense: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        assert not heard(nonsense).is_valid
        assert start("x", parent=heard(nonsense)).context.is_valid
    assert not caplog.records


@pytest.mark.parametrize("state", ["vendor=1", "patient name Jane Doe", "=," * 4000, "x" * 9000])
def test_a_tracestate_is_neither_read_nor_logged(state: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        context = of_call([("tracestate", state), ("traceparent", SENT)])
    assert context.is_valid
    assert not context.trace_state
    assert not caplog.records


def test_a_call_without_metadata_begins_a_trace_of_its_own() -> None:
    assert not of_call(None).is_valid


def test_a_span_is_kept_once_it_has_ended_and_once(ring: Ring) -> None:
    span = start("request", parent=INVALID_SPAN_CONTEXT, room=5)
    assert of(ring, 5) == []
    span.end("first")
    span.end("second")
    assert [(s.name, s.error) for s in of(ring, 5)] == [("request", "first")]


def test_a_part_belongs_to_the_room_of_the_whole_unless_it_names_another() -> None:
    span = start("request", parent=INVALID_SPAN_CONTEXT, room=5)
    part, other = span.child("check"), span.child("room", room=6)
    assert (part.room, other.room) == (5, 6)
    assert part.parent == other.parent == span.context


def test_a_room_brings_its_whole_request_and_no_other(ring: Ring) -> None:
    request = start("request", parent=INVALID_SPAN_CONTEXT)
    request.child("assign", begun=3.0).end()
    request.child("room", room=7, begun=2.0).end()
    request.begun = 1.0
    request.end()
    start("another", parent=INVALID_SPAN_CONTEXT, room=8).end()
    assert names(of(ring, 7)) == ["request", "room", "assign"]
    assert names(of(ring, 0, [request.context.trace_id])) == ["request", "room", "assign"]
    assert of(ring, 9) == of(ring, 0) == []


def test_a_room_does_not_bring_the_other_requests_of_its_client_s_trace(ring: Ring) -> None:
    for room in (5, 6, 7):
        request = start(f"request of {room}", parent=heard(SENT), begun=float(room))
        request.child(f"room {room}", room=room, begun=room + 0.5).end()
        request.end()
    assert names(of(ring, 6)) == ["request of 6", "room 6"]
    assert len(of(ring, 6, [heard(SENT).trace_id])) == 6, "unless the trace is named"


def test_of_too_many_the_room_s_come_first_and_then_the_latest(ring: Ring) -> None:
    start("asked for", parent=heard(SENT), room=5, begun=1.0).end()
    for number in range(2, 7):
        start(f"later {number}", parent=heard(SENT), room=number + 10, begun=float(number)).end()
    spans, truncated = chosen(ring.all(), 5, [heard(SENT).trace_id], 3)
    assert (names(spans), truncated) == (["asked for", "later 5", "later 6"], True)


def test_a_long_line_of_spans_is_followed_in_time_that_grows_with_its_length() -> None:
    line = [start("first", parent=INVALID_SPAN_CONTEXT, room=5)]
    for _ in range(4000):
        line.append(line[-1].child("next", room=6))
    begun = time.process_time()
    spans, _ = chosen(line, 5, [], 5000)
    assert len(spans) == len(line)
    assert time.process_time() - begun < 1


def test_the_oldest_make_room(ring: Ring) -> None:
    for room in range(1, 20):
        start("x", parent=INVALID_SPAN_CONTEXT, room=room).end()
    assert [room for room in range(1, 20) if of(ring, room)] == list(range(12, 20))


@pytest.mark.parametrize(
    ("raised", "said"),
    [
        (ValueError("the prompt was: secret"), "ValueError"),
        (ExceptionGroup("secret", [ValueError("secret")]), "ExceptionGroup"),
        (UnknownModel("model 'Jane Doe, diabetes' is not served here"), "unknown_model"),
        (InvalidInput("role 'Jane Doe' is unknown", field="chat", reason="too_long"), "too_long"),
        (Full("16 rooms wait already"), "full: 16 rooms wait already"),
        (Unavailable("x" * 999, reason="stage_lost"), ("stage_lost: " + "x" * 999)[:MAX_ERROR_CHARS]),
        (asyncio.CancelledError(), "cancelled"),
        (GeneratorExit(), "cancelled"),
    ],
)
def test_a_span_says_why_it_ended_and_nothing_that_its_client_wrote(raised: BaseException, said: str) -> None:
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
