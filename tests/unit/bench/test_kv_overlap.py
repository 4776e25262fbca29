"""The figures of bench.kv_overlap, on spans made by hand; and its link, between two real processes."""

import pytest

from bench.kv_overlap.__main__ import main, report
from bench.kv_overlap.link import RoomShape, receiving
from bench.kv_overlap.tails import Tail, tail_of
from kvmesh.v1.trace_pb2 import ListSpansResponse, Span

ROOM = 9
HOURS = 1_800_000_000
"""On a wall clock: seconds as large as they are in life."""


def told(process: str, **spans: tuple[float, float]) -> ListSpansResponse:
    """Args: spans: begin and end, in seconds."""
    made = ListSpansResponse(process=process)
    for name, (begun, ended) in spans.items():
        span = Span(span_id=f"{process}{name}".encode(), name=name, room=ROOM)
        span.start.FromNanoseconds(HOURS * 10**9 + round(begun * 1e9))
        span.duration.FromNanoseconds(round((ended - begun) * 1e9))
        if name == "receive":
            span.attributes["write_seconds"] = "0.0005"
        made.spans.append(span)
    return made


FIRST = told("prefill p0/0", prefill=(0, 4.0), send=(1, 4.01))
LAST = told("prefill p0/1", prefill=(1, 5.0), send=(2, 5.004))
DECODER = told("decode", receive=(0, 5.005), decode=(5.005, 6))


def test_the_tail_begins_with_the_end_of_the_last_compute_and_ends_when_all_is_written() -> None:
    tail = tail_of([FIRST, LAST, DECODER], ROOM)
    assert (tail.send, tail.arrive, tail.write) == pytest.approx((0.004, 0.001, 0.0005), abs=1e-7)
    assert tail.seconds == pytest.approx(0.0055, abs=1e-7)


@pytest.mark.parametrize("answers", [[FIRST, LAST], [FIRST, DECODER, told("prefill p0/1", prefill=(1, 5.0))], []])
def test_a_room_of_which_a_stop_is_missing_has_no_tail(answers: list[ListSpansResponse]) -> None:
    with pytest.raises(ValueError, match="room 9"):
        tail_of(answers, ROOM)


@pytest.mark.parametrize(("tail", "hidden"), [(0.009, True), (0.011, False)])
def test_a_tenth_of_the_transfers_time_may_be_left(tail: float, hidden: bool) -> None:
    figures = report([Tail(tail, 0.0, 0.0)] * 3, [0.1, 0.1, 0.3], 10**8)
    assert figures["hidden_share"] == pytest.approx(1 - tail / 0.1)
    assert (figures["is_hidden"], figures["transfer_seconds"], figures["link_bytes_per_second"]) == (hidden, 0.1, 10**9)


async def test_a_room_goes_over_the_link_as_often_as_it_is_asked_for() -> None:
    shape = RoomShape(6, 2, 16, "fp32", pp=2, prompt_len=300, step_tokens=128)
    assert shape.num_bytes == 300 * 6 * 2 * 2 * 16 * 4
    assert len(shape.frames()) == 2 * 3
    async with receiving(shape) as receiver:
        receiver._pool.slots.zero_()
        for _ in range(2):
            assert await receiver.room() > 0
        assert (receiver._pool.slots[:, :, :, :300] == 0.5).all()
        assert (receiver._pool.slots[:, :, :, 300:] == 0).all()


@pytest.mark.parametrize("flags", [["--requests", "1"], ["--prompt-len", "0"], ["--step-tokens", "0"]])
def test_what_can_not_be_asked_is_refused(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        main(flags)
    assert refused.value.code == 2
    assert flags[0] in capsys.readouterr().err
