import time

import pytest
from told_spans import GATEWAY, ROOM, process, span

from kvmesh.cli.spans import Row, rows


def at(found: list[Row], process: str, name: str) -> int:
    (row,) = [r for r in found if (r.process, r.name) == (process, name)]
    return round(row.begun * 1e3)


def test_each_span_follows_the_one_it_is_part_of() -> None:
    decoder = process("decode", span(4, 3, "reserve", 12, 1), span(3, 2, "room at decoder", 12, 70))
    found = rows([decoder, GATEWAY], ROOM)
    assert [(r.depth, r.name) for r in found] == [(0, "request"), (1, "room"), (2, "room at decoder"), (3, "reserve")]
    assert at(found, "decode", "reserve") == 12


@pytest.mark.parametrize("skew_ms", [-60_000, -30, 20_000, 3_600_000])
def test_a_process_whose_clock_is_off_is_shifted_as_a_whole(skew_ms: int) -> None:
    decoder = process("decode", span(3, 2, "room at decoder", 12 + skew_ms, 70), span(4, 3, "reserve", 13 + skew_ms, 1))
    stage = process("prefill p0/0", span(5, 3, "prefill", 20, 30))
    found = rows([stage, decoder, GATEWAY], ROOM)
    assert at(found, "decode", "room at decoder") == 15
    assert at(found, "decode", "reserve") == 16
    assert at(found, "prefill p0/0", "prefill") == 20, "its own clock is right"


def test_a_step_of_a_cancelled_room_is_shown_where_it_ran_on() -> None:
    gateway = process("gateway", span(1, 0, "request", 0, 5050), span(2, 1, "room", 5, 5045))
    decoder = process("decode", span(3, 2, "room at decoder", 6, 5044))
    first = process("prefill p0/0", span(4, 3, "queue", 10, 4990), span(5, 3, "prefill", 5000, 150))
    second = process("prefill p0/1", span(6, 3, "prefill", 5150, 150))
    third = process("prefill p0/2", span(7, 3, "prefill", 5005, 500))
    found = rows([gateway, decoder, first, second, third], ROOM)
    assert at(found, "prefill p0/0", "prefill") == 5000
    assert at(found, "prefill p0/1", "prefill") == 5150, "it began after all others had ended"
    assert at(found, "prefill p0/2", "prefill") == 5005, "it began in time and ended late"


def test_spans_whose_parent_is_lost_are_shown_all_the_same() -> None:
    found = rows(
        [process("decode", span(3, 99, "room at decoder", 5, 10)), process("x", span(6, 6, "own parent", 7, 1))], ROOM
    )
    assert [r.name for r in found if r.depth == 0] == ["room at decoder"]
    assert rows([], ROOM) == []


def test_other_requests_of_the_same_trace_are_left_out_and_other_rooms_of_the_same_request_are_not() -> None:
    gateway = process(
        "gateway",
        *(span(1, 77, "request", 0, 100), span(2, 1, "lost room", 10, 30, room=ROOM - 1), span(3, 1, "room", 50, 40)),
        *(span(4, 77, "another", 200, 100, room=ROOM + 1), span(5, 4, "its room", 210, 80, room=ROOM + 1)),
    )
    decoders = [
        process("decode a", span(6, 2, "lost room at decoder", 12, 20, room=ROOM - 1)),
        process("decode b", span(7, 5, "its room at decoder", 215, 20, room=ROOM + 1)),
    ]
    names = [row.name for row in rows([gateway, *decoders], ROOM)]
    assert names == ["request", "lost room", "lost room at decoder", "room"]


def test_thousands_of_spans_are_ordered_at_once_however_they_hang_together() -> None:
    beside = [span(number, 1, "x", number, 1) for number in range(2, 5000)]
    below = [span(number, number - 1, "y", number, 1) for number in range(5000, 10_000)]
    begun = time.process_time()
    found = rows([process("gateway", span(1, 0, "request", 0, 20_000), *beside), process("z", *below)], ROOM)
    assert len(found) == 9999
    assert time.process_time() - begun < 2


def test_a_duration_below_zero_is_none() -> None:
    (row,) = rows([process("x", span(1, 0, "y", 0, -5000))], ROOM)
    assert row.seconds == 0
