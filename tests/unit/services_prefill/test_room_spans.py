"""Where a room's time went at a stage, whatever became of it; and its wait, which the last rank tells. Times are given."""

from itertools import count

import pytest
from stage_played import PROMPT_BYTES, PROMPT_LEN, SHARD, admitted, done, shown, spans_of, step

from kvmesh.kv.layout import plan_frames
from kvmesh.protocol.ids import RoomId
from kvmesh.protocol.steps import RoomDone, RoomDropped
from kvmesh.telemetry import traces
from services.prefill.spans import RoomSpans

ROOMS = count(7_000)
WHOLE = (0, PROMPT_LEN)


@pytest.fixture
def room() -> int:
    return next(ROOMS)


def head() -> RoomSpans:
    return RoomSpans(0, SHARD)


def test_a_room_waits_from_its_admit_until_the_worker_takes_it_up(room: int) -> None:
    """Two steps may be written ahead: the room's own begins a second after it was written."""
    spans = head()
    spans.arrived(RoomId(room), "", 10.0)
    spans.applied(done(step(0, admitted(room), work=((room, *WHOLE),)), 11.0, 11.2))
    assert spans_of(room) == {"queue": (10.0, 11.0, ""), "prefill": (11.0, 11.2, "")}


def test_a_room_that_is_admitted_before_there_is_room_for_its_tokens_waits_on(room: int) -> None:
    spans, other = head(), next(ROOMS)
    spans.arrived(RoomId(room), "", 10.0)
    spans.applied(done(step(0, admitted(other), admitted(room), work=((other, *WHOLE),)), 11.0, 12.0))
    assert "queue" not in spans_of(room)
    spans.applied(done(step(1, work=((room, 0, 8),)), 12.5, 13.0))
    spans.applied(done(step(2, work=((room, 8, PROMPT_LEN),)), 14.0, 15.0))
    assert spans_of(room) == {"queue": (10.0, 12.5, ""), "prefill": (12.5, 15.0, "")}


def test_the_wait_is_observed_once_and_travels_with_the_last_tokens(room: int) -> None:
    spans = head()
    name = "kvmesh_admission_seconds"
    before, summed = shown(f"{name}_count"), shown(f"{name}_sum")
    spans.arrived(RoomId(room), "", 10.0)
    first, last = step(0, admitted(room), work=((room, 0, 8),)), step(1, work=((room, 8, PROMPT_LEN),))
    spans.applied(done(first, 12.5, 13.0))
    assert [w.queued_seconds for w in spans.told(first).work] == [0.0]
    spans.applied(done(last, 13.0, 14.0))
    assert [w.queued_seconds for w in spans.told(last).work] == [2.5]
    assert spans.told(last).canonical() == last.canonical(), "no decision is changed by it"
    assert (shown(f"{name}_count"), shown(f"{name}_sum") - summed) == (before + 1, 2.5)


def test_a_rank_above_0_knows_no_wait_and_tells_on_what_it_heard(room: int) -> None:
    spans, before = RoomSpans(1, SHARD), shown("kvmesh_admission_seconds_count")
    heard = step(0, admitted(room), work=((room, *WHOLE),))
    spans.applied(done(heard, 3.0, 4.0))
    assert spans.told(heard) is heard
    assert spans_of(room) == {"prefill": (3.0, 4.0, "")}
    assert shown("kvmesh_admission_seconds_count") == before


def test_compute_is_the_time_of_its_steps_without_those_between(room: int) -> None:
    spans = head()
    spans.applied(done(step(0, admitted(room), work=((room, 0, 8),)), 1.0, 1.5))
    spans.applied(done(step(1, work=((room, 8, PROMPT_LEN),)), 4.0, 4.25))
    (prefill,) = [s for s in traces.RING.all() if s.room == room]
    assert prefill.attributes == {"rank": 0, "tokens": PROMPT_LEN, "steps": 2, "compute_seconds": 0.75}


def test_kv_that_leaves_while_its_step_computes_is_part_of_the_sending(room: int) -> None:
    spans, whole = head(), step(0, admitted(room), work=((room, *WHOLE),))
    spans.begun(whole)
    spans.to_send(RoomId(room), 1.5)
    spans.sent(RoomId(room), PROMPT_BYTES // 2, 1.6)
    spans.begun(whole)
    spans.applied(done(whole, 1.0, 2.0))
    spans.to_send(RoomId(room), 2.0)
    spans.sent(RoomId(room), PROMPT_BYTES // 2, 2.25)
    assert spans_of(room) == {"prefill": (1.0, 2.0, ""), "send": (1.5, 2.25, "")}


# Rooms that end before they were whole.


def test_a_room_dropped_while_it_waits_shows_how_long_it_waited_and_why_it_ended(room: int) -> None:
    spans = head()
    spans.arrived(RoomId(room), "", 10.0)
    spans.left(RoomId(room), "dropped", 13.0)
    spans.close("over", 20.0)
    assert spans_of(room) == {"queue": (10.0, 13.0, "dropped")}


def test_a_room_dropped_after_its_admission_and_before_its_tokens_shows_its_wait(room: int) -> None:
    spans = head()
    spans.arrived(RoomId(room), "", 10.0)
    spans.applied(done(step(0, admitted(room)), 11.0, 12.0))
    spans.applied(done(step(1, RoomDropped(RoomId(room))), 13.0, 13.5))
    assert spans_of(room) == {"queue": (10.0, 13.5, "dropped")}


def test_a_room_cancelled_in_the_middle_ends_its_prefill_and_its_sending_with_the_reason(room: int) -> None:
    spans = head()
    spans.applied(done(step(0, admitted(room), work=((room, 0, 8),)), 1.0, 2.0))
    spans.to_send(RoomId(room), 2.0)
    spans.applied(done(step(1, RoomDropped(RoomId(room))), 5.0, 5.5))
    spans.sent(RoomId(room), 8 * SHARD.bytes_per_token, 6.0)
    assert spans_of(room) == {"prefill": (1.0, 5.5, "dropped"), "send": (2.0, 5.5, "dropped")}


def test_a_room_that_is_tried_again_has_spans_of_its_own(room: int) -> None:
    spans, again = head(), next(ROOMS)
    for number, one in enumerate((room, again)):
        spans.arrived(RoomId(one), "", 10.0 * number)
        spans.applied(done(step(2 * number, admitted(one), work=((one, 0, 8),)), 10.0 * number + 1, 10.0 * number + 2))
        spans.applied(done(step(2 * number + 1, RoomDropped(RoomId(one))), 10.0 * number + 3, 10.0 * number + 4))
    assert spans_of(room) == {"queue": (0.0, 1.0, ""), "prefill": (1.0, 4.0, "dropped")}
    assert spans_of(again) == {"queue": (10.0, 11.0, ""), "prefill": (11.0, 14.0, "dropped")}


def test_the_end_of_a_generation_ends_every_wait_prefill_and_sending_with_its_reason(room: int) -> None:
    spans, waits = head(), next(ROOMS)
    spans.arrived(RoomId(waits), "", 0.5)
    spans.applied(done(step(0, admitted(room), work=((room, 0, 8),)), 1.0, 2.0))
    spans.to_send(RoomId(room), 2.0)
    spans.close("rank 1 of p0 was lost", 9.0)
    why = "rank 1 of p0 was lost"
    assert spans_of(room) == {"prefill": (1.0, 9.0, why), "send": (2.0, 9.0, why)}
    assert spans_of(waits) == {"queue": (0.5, 9.0, why)}


# Sending.


def test_sending_begins_when_there_is_kv_to_send_and_ends_with_the_last_frame(room: int) -> None:
    """A prompt of one frame, which waits three seconds for the decoder's credit."""
    assert len(plan_frames(SHARD, *WHOLE)) == 1
    spans = RoomSpans(1, SHARD)
    spans.applied(done(step(0, admitted(room), work=((room, *WHOLE),)), 0.8, 1.0))
    spans.to_send(RoomId(room), 1.0)
    spans.sent(RoomId(room), 0, 1.1)  # the first token's record
    assert "send" not in spans_of(room)
    spans.sent(RoomId(room), PROMPT_BYTES, 4.0)
    spans.applied(done(step(1, RoomDone(RoomId(room))), 5.0, 5.0))
    assert spans_of(room) == {"prefill": (0.8, 1.0, ""), "send": (1.0, 4.0, "")}


def test_a_link_that_never_gets_credit_shows_in_the_spans_of_its_rooms(room: int) -> None:
    spans = RoomSpans(1, SHARD)
    spans.applied(done(step(0, admitted(room), work=((room, *WHOLE),)), 0.8, 1.0))
    spans.to_send(RoomId(room), 1.0)
    spans.applied(done(step(1, RoomDropped(RoomId(room))), 3.0, 3.5))
    assert spans_of(room)["send"] == (1.0, 3.5, "dropped")


def test_nothing_of_a_room_that_ended_is_kept(room: int) -> None:
    spans = head()
    spans.arrived(RoomId(room), "", 0.0)
    spans.applied(done(step(0, admitted(room), work=((room, *WHOLE),)), 1.0, 2.0))
    spans.applied(done(step(1, RoomDone(RoomId(room))), 3.0, 4.0))
    assert not spans._rooms
    assert not spans._waiting
