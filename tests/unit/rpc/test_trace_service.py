import asyncio
from collections.abc import AsyncIterator
from threading import Event

import pytest
from opentelemetry.trace import INVALID_SPAN_CONTEXT
from rpc_serving import served

from kvmesh.errors import Full, InvalidInput
from kvmesh.rpc import trace
from kvmesh.rpc.status import peer_errors
from kvmesh.rpc.trace import MAX_OPEN, MAX_SPANS, MAX_TRACES, TraceServicer
from kvmesh.telemetry import traces
from kvmesh.telemetry.traces import RING_SPANS, Ring, heard, start
from kvmesh.v1 import trace_pb2 as pb
from kvmesh.v1.trace_pb2_grpc import TraceServiceStub, add_TraceServiceServicer_to_server

SENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
TRACE, PARENT = bytes.fromhex(SENT[3:35]), bytes.fromhex(SENT[36:52])


@pytest.fixture(autouse=True)
def ring(monkeypatch: pytest.MonkeyPatch) -> Ring:
    fresh = Ring(RING_SPANS)
    monkeypatch.setattr(traces, "RING", fresh)
    return fresh


@pytest.fixture
async def asked() -> AsyncIterator[TraceServiceStub]:
    async with served(add=lambda server: add_TraceServiceServicer_to_server(TraceServicer(), server)) as channel:
        with peer_errors("it"):
            yield TraceServiceStub(channel)


async def test_a_span_is_told_with_all_that_it_has(asked: TraceServiceStub) -> None:
    span = start("send", parent=heard(SENT), room=7, begun=10.0)
    span.attributes |= {"bytes": 5, "compute_seconds": 0.25}
    span.end("stage_lost: gone", ended=10.5)
    answer = await asked.ListSpans(pb.ListSpansRequest(room=7))
    (told,) = answer.spans
    assert (told.trace_id, told.parent_span_id) == (TRACE, PARENT)
    assert told.span_id == span.context.span_id.to_bytes(8, "big")
    assert (told.name, told.room, told.error) == ("send", 7, "stage_lost: gone")
    assert told.duration.ToMilliseconds() == 500
    assert dict(told.attributes) == {"bytes": "5", "compute_seconds": "0.25"}
    assert abs(told.start.ToNanoseconds() - traces.wall_ns(10.0)) < 10**9
    assert not answer.truncated


async def test_the_first_of_a_trace_has_no_parent_and_one_that_ends_before_its_begin_takes_no_time(
    asked: TraceServiceStub,
) -> None:
    start("request", parent=INVALID_SPAN_CONTEXT, room=7, begun=10.0).end(ended=9.0)
    (told,) = (await asked.ListSpans(pb.ListSpansRequest(room=7))).spans
    assert told.parent_span_id == b""
    assert told.duration.ToNanoseconds() == 0


async def test_a_room_that_is_unknown_has_none(asked: TraceServiceStub) -> None:
    assert not (await asked.ListSpans(pb.ListSpansRequest(room=7))).spans
    assert not (await asked.ListSpans(pb.ListSpansRequest(trace_ids=[bytes(16)]))).spans


@pytest.mark.parametrize(
    "request_",
    [
        pb.ListSpansRequest(),
        pb.ListSpansRequest(trace_ids=[b"short"]),
        pb.ListSpansRequest(room=1, trace_ids=[bytes(17)]),
        pb.ListSpansRequest(trace_ids=[bytes(16)] * (MAX_TRACES + 1)),
    ],
)
async def test_who_names_nothing_or_too_much_is_refused(asked: TraceServiceStub, request_: pb.ListSpansRequest) -> None:
    with pytest.raises(InvalidInput), peer_errors("it"):
        await asked.ListSpans(request_)


async def test_an_answer_has_an_end_and_says_so(asked: TraceServiceStub) -> None:
    for room in range(1, MAX_SPANS + 10):
        start("x", parent=heard(SENT), room=room).end()
    answer = await asked.ListSpans(pb.ListSpansRequest(room=1, trace_ids=[TRACE]))
    assert (len(answer.spans), answer.truncated) == (MAX_SPANS, True)
    assert answer.spans[0].room == 1, "the room that was asked for is among them"


async def test_a_full_ring_is_looked_through_beside_the_event_loop(
    asked: TraceServiceStub, monkeypatch: pytest.MonkeyPatch
) -> None:
    goes_on, look = Event(), traces.chosen

    def waits(*what: object) -> object:
        assert goes_on.wait(10), "the loop stood still"
        return look(*what)  # type: ignore[arg-type]

    monkeypatch.setattr(trace.traces, "chosen", waits)
    calls = [asyncio.ensure_future(asked.ListSpans(pb.ListSpansRequest(room=7))) for _ in range(MAX_OPEN + 4)]
    refused = 0
    for call in asyncio.as_completed(calls):
        try:
            with peer_errors("it"):
                await call
        except Full as error:
            refused += 1
            assert error.retry_after_seconds == 1.0
        if refused == 4:
            goes_on.set()
    assert refused == 4, "those who came when enough were waiting"
    await asked.ListSpans(pb.ListSpansRequest(room=7))
