"""A decoder's rooms as its calls see them: how each is counted when it ends, and where its time went. No worker, no stream."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import pytest
from opentelemetry.trace import INVALID_SPAN_CONTEXT

from kvmesh.errors import Full, InvalidInput, Unavailable
from kvmesh.protocol.ids import Generation, PairingNumber, RoomId
from kvmesh.protocol.rooms import Limits
from kvmesh.telemetry import metrics, traces
from kvmesh.v1 import decode_pb2
from kvmesh.v1 import prefill_pb2 as pb
from kvmesh.v1.types_pb2 import FINISH_REASON_LENGTH, FINISH_REASON_UNSPECIFIED, RoomAssignment
from services.decode.records import FirstTokenArrived, RoomComplete, TokenDrawn
from services.decode.rooms import LiveRoom, Rooms
from services.decode.servicer import _timing

ROOMS = count(11_000)
G, NUMBER = Generation(4), PairingNumber(1)
LIMITS = Limits(num_pages=8, page_size=4, max_tokens=32, max_running_rooms=1, max_waiting_rooms=1)
REASONS = ("finished", "cancelled", "too_long", "full", "stage_lost", "queue_full", "handed_over")


@dataclass
class PlayedPairing:
    """Notes what rank 0 is told."""

    generation: Generation = G
    number: PairingNumber = NUMBER
    shards: dict[Any, Any] = field(default_factory=dict)
    told: list[pb.ControlRequest] = field(default_factory=list)

    def send(self, message: pb.ControlRequest) -> None:
        self.told.append(message)


@dataclass
class PlayedWorker:
    """Notes what it is asked."""

    posted: list[Any] = field(default_factory=list)

    def post(self, record: Any) -> None:
        self.posted.append(record)


@pytest.fixture
async def rooms() -> Rooms:
    return Rooms(LIMITS, PlayedWorker(), lambda: None)  # type: ignore[arg-type]


def opened(rooms: Rooms, prompt_len: int = 4) -> LiveRoom:
    room = next(ROOMS)
    request = decode_pb2.GenerateRoomRequest(
        assignment=RoomAssignment(room=room, generation=G), prompt=[1] * prompt_len, max_output_len=4
    )
    span = traces.start("room at decoder", parent=INVALID_SPAN_CONTEXT, room=room, begun=1.0)
    return rooms.open(request, PlayedPairing(), span)  # type: ignore[arg-type]


def drawn(room: RoomId, at: float, *, last: bool = False) -> TokenDrawn:
    return TokenDrawn(room, 7, FINISH_REASON_LENGTH if last else FINISH_REASON_UNSPECIFIED, at)


@contextmanager
def ended(**wanted: int) -> Iterator[None]:
    """What was counted inside, by reason; nothing else was."""

    def counted() -> dict[str, float]:
        page = metrics.page_of("decode")
        return {r: page.get_sample_value("kvmesh_rooms_ended_total", {"reason": r}) or 0.0 for r in REASONS}

    before = counted()
    yield
    now = counted()
    assert {r: now[r] - before[r] for r in REASONS if now[r] != before[r]} == wanted


def spans_of(live: LiveRoom) -> dict[str, tuple[float, float]]:
    return {span.name: (span.begun, span.ended) for span in [s for s in traces.RING.all() if s.room == live.room]}


async def test_a_room_counts_as_finished_when_its_call_ends_however_that_ends(rooms: Rooms) -> None:
    live = opened(rooms)
    with ended():
        rooms.completed(RoomComplete(live.room, 2.0, 2.0))
        rooms.drew(drawn(live.room, 3.0, last=True))
    with ended(finished=1):
        rooms.close(live)


async def test_a_room_whose_caller_leaves_counts_as_cancelled(rooms: Rooms) -> None:
    live, waits = opened(rooms), opened(rooms)
    with ended(cancelled=2):
        rooms.close(waits)
        rooms.close(live)


@pytest.mark.parametrize("pairing", [NUMBER, PairingNumber(NUMBER + 1)])
async def test_only_its_own_rank_0_may_refuse_a_room_and_only_one_that_it_was_given(
    rooms: Rooms, pairing: PairingNumber
) -> None:
    given, waits = opened(rooms), opened(rooms)
    for live in (waits, given):
        rooms.refused(pairing, pb.RoomRefused(room=live.room, reason="full"))
    assert (given.error is not None) == (pairing == NUMBER)
    assert waits.error is None
    rooms.close(waits)
    rooms.close(given)


async def test_a_room_whose_end_fails_is_forgotten_all_the_same(rooms: Rooms, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the process would wait for it when it leaves."""

    def fails(*_: object) -> None:
        raise RuntimeError("no stream")

    live = opened(rooms)
    monkeypatch.setattr(live.pairing, "send", fails)
    with pytest.raises(RuntimeError, match="no stream"):
        rooms.close(live)
    assert rooms.empty.is_set()


async def test_a_room_that_is_lost_counts_by_why(rooms: Rooms) -> None:
    live = opened(rooms)
    rooms.pairing_lost(G, Unavailable("rank 1 was lost", reason="stage_lost"))
    with ended(stage_lost=1):
        rooms.close(live)
    refused = opened(rooms)
    rooms.refused(NUMBER, pb.RoomRefused(room=refused.room, reason="queue_full"))
    with ended(queue_full=1):
        rooms.close(refused)
    rest = opened(rooms)
    rooms.fail_all(Unavailable("the decoder leaves", reason="handed_over"))
    with ended(handed_over=1):
        rooms.close(rest)


async def test_a_room_that_is_not_taken_counts_by_the_reason_of_its_refusal(rooms: Rooms) -> None:
    with ended(too_long=1), pytest.raises(InvalidInput):
        opened(rooms, prompt_len=40)
    held = [opened(rooms), opened(rooms)]
    with ended(full=1), pytest.raises(Full):
        opened(rooms)
    for live in held:
        rooms.close(live)


async def test_decoding_ends_with_the_last_token_however_slow_its_reader_is(rooms: Rooms) -> None:
    live = opened(rooms)
    rooms.completed(RoomComplete(live.room, 2.0, 2.0))
    rooms.drew(drawn(live.room, 2.5))
    rooms.drew(drawn(live.room, 3.0, last=True))
    rooms.close(live)  # now, which is much later
    assert spans_of(live)["decode"] == (2.0, 3.0)


async def test_a_room_that_ends_in_its_decoding_shows_it_until_then(rooms: Rooms) -> None:
    live = opened(rooms)
    rooms.completed(RoomComplete(live.room, 2.0, 2.0))
    rooms.drew(drawn(live.room, 2.5))
    rooms.close(live)
    begun, until = spans_of(live)["decode"]
    assert (begun, until > 3.0) == (2.0, True)


async def test_what_a_busy_decoder_adds_is_join_and_not_the_transfer(rooms: Rooms) -> None:
    """The worker took the last frame up 0.3 s after it came, since it was in a step."""
    live = opened(rooms)
    live.times.admit_sent = 1.5
    rooms.prefilled(FirstTokenArrived(live.room, 2.0, queued_seconds=0.2))
    rooms.completed(RoomComplete(live.room, 2.125, 2.4375))
    timing = _timing(live, 2.5)
    parts = {name: getattr(timing, name).ToMilliseconds() for name in ("reserve", "transfer_tail", "join")}
    assert parts == {"reserve": 500, "transfer_tail": 125, "join": 375}
    rooms.close(live)
    (receive,) = [s for s in traces.RING.all() if s.room == live.room and s.name == "receive"]
    assert (receive.ended, receive.attributes) == (2.125, {"write_seconds": 0.3125})
