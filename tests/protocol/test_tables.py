"""Every lifecycle table over all pairs of state and event."""

from enum import Enum
from itertools import product

import pytest

from kvmesh.errors import Fault
from kvmesh.protocol import head_room, life, pairing, rooms
from kvmesh.protocol.table import Table

TABLES = [
    (head_room.ROOM_TABLE, head_room.RoomState, head_room.RoomEvent),
    (rooms.ROOM_TABLE, rooms.RoomState, rooms.RoomEvent),
    (pairing.PAIRING_TABLE, pairing.PairingState, pairing.PairingEvent),
    (life.LIFE_TABLE, life.LifeState, life.LifeEvent),
]
PAIRS = [
    pytest.param(table, state, event, id=f"{table.name}: {event.value} while {state.value}")
    for table, states, events in TABLES
    for state, event in product(states, events)
]


@pytest.mark.parametrize(("table", "state", "event"), PAIRS)
def test_a_pair_either_has_a_row_or_is_refused(table: Table, state: Enum, event: Enum) -> None:
    if (state, event) in table.rows:
        after, asks = table.step(state, event)
        assert after in type(state)
        assert len(set(asks)) == len(asks)
    else:
        with pytest.raises(Fault, match=r"cannot happen") as caught:
            table.step(state, event)
        assert state.value in caught.value.message
        assert event.value in caught.value.message


@pytest.mark.parametrize(
    ("table", "end"),
    [(rooms.ROOM_TABLE, rooms.RoomState.ENDED), (pairing.PAIRING_TABLE, pairing.PairingState.ENDED)],
)
def test_the_terminal_state_absorbs_and_asks_nothing(table: Table, end: Enum) -> None:
    rows = {event: row for (state, event), row in table.rows.items() if state is end}
    assert rows
    assert all(row == (end, ()) for row in rows.values())


@pytest.mark.parametrize("state", [s for s in rooms.RoomState if s is not rooms.RoomState.ENDED])
def test_a_decoder_room_can_be_cancelled_in_every_state(state: rooms.RoomState) -> None:
    """F-A2: a cancel is effective in every state, and gives back what the state holds."""
    after, asks = rooms.ROOM_TABLE.step(state, rooms.RoomEvent.CANCELLED)
    assert after is rooms.RoomState.ENDED
    holds = state is not rooms.RoomState.WAITING
    assert (rooms.Ask.RELEASE in asks) is holds


def test_a_room_that_was_asked_for_ends_with_exactly_one_of_drop_and_received() -> None:
    """F-P5: over every path from Admit to the end, unless rank 0 itself ended the room."""
    ended_by_rank_0 = {rooms.RoomEvent.PAIRING_LOST}

    def walk(state: rooms.RoomState, said: int, depth: int) -> None:
        if state is rooms.RoomState.ENDED:
            assert said == 1
            return
        if depth == 0:
            return
        for (before, event), (after, asks) in rooms.ROOM_TABLE.rows.items():
            if before is state and event not in ended_by_rank_0:
                words = sum(a in (rooms.Ask.RECEIVED, rooms.Ask.DROP) for a in asks)
                walk(after, said + words, depth - 1)

    walk(rooms.RoomState.RECEIVING, 0, 6)


def test_a_table_draws_itself() -> None:
    drawn = rooms.ROOM_TABLE.drawn()
    assert drawn.count("\n") == len(rooms.ROOM_TABLE.rows) + 1
    assert "| receiving | complete | running | received |" in drawn
