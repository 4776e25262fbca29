"""The lifecycle of a seat, over all pairs of state and event."""

from itertools import product

import pytest
from registry_peers import descriptor
from roster_stages import HELD

from kvmesh.errors import Fault
from kvmesh.protocol.ids import Incarnation, LeaseId, Rank
from kvmesh.protocol.members import Member, Stage
from kvmesh.protocol.seats import SEAT_TABLE, Seat, SeatEvent, SeatState


@pytest.mark.parametrize(("state", "event"), list(product(SeatState, SeatEvent)))
def test_an_event_of_a_seat_has_a_row_or_raises_and_changes_nothing(state: SeatState, event: SeatEvent) -> None:
    holder = None if state is SeatState.EMPTY else stage_of(0)
    seat = Seat(Rank(0), state, holder, HELD, 4)
    if (state, event) in SEAT_TABLE.rows:
        after, asks = SEAT_TABLE.rows[state, event]
        assert (seat.step(event), seat.state) == (asks, after)
        assert seat.holder is (None if after is SeatState.EMPTY else holder)
    else:
        with pytest.raises(Fault, match="cannot happen"):
            seat.step(event)
        assert (seat.state, seat.holder, seat.generation, seat.admitted_order) == (state, holder, HELD, 4)


def stage_of(rank: int, pp_size: int = 2) -> Stage:
    member = Member(Incarnation(1), "a:1")
    return Stage(LeaseId(1), member, "p0", Rank(rank), pp_size, descriptor(rank, pp_size))


def test_an_empty_seat_is_only_taken_by_who_registers() -> None:
    taken = {event for (state, event) in SEAT_TABLE.rows if state is SeatState.EMPTY}
    assert taken == {SeatEvent.REGISTERED, SeatEvent.RESEATED}


def test_only_who_waits_can_begin_or_be_ordered_to_link() -> None:
    for event in (SeatEvent.BEGAN, SeatEvent.ORDERED):
        assert [state for (state, e) in SEAT_TABLE.rows if e is event] == [SeatState.WAITING]
