"""What may be written at a decoder, by room, pairing and plan."""

import pytest

from kvmesh.errors import Corrupt
from kvmesh.protocol.coverage import ShardSpan
from kvmesh.protocol.ids import PageId, PairingNumber, Rank, RoomId
from kvmesh.protocol.receiving import Outcome, Receiving

ROOM, PAIRING = RoomId(9), PairingNumber(4)
SHARDS = {Rank(0): (ShardSpan(0, 1, 0, 2),), Rank(1): (ShardSpan(1, 2, 0, 2),)}


@pytest.fixture
def receiving() -> Receiving:
    own = Receiving()
    own.open(ROOM, PAIRING, SHARDS, (PageId(0),), begin=0, end=6)
    return own


def frame(own: Receiving, rank: int, begin: int = 0, end: int = 6, room: int = ROOM, link: int = PAIRING) -> Outcome:
    of_link = (PairingNumber(link), Rank(rank))
    return own.frame(RoomId(room), PAIRING, of_link, SHARDS[Rank(rank)][0], begin, end)


def first(own: Receiving, token: int = 3) -> Outcome:
    return own.first_token(ROOM, PAIRING, (PAIRING, Rank(1)), token, vocab_size=10)


def test_a_room_is_complete_with_every_shard_and_the_first_token_in_any_order(receiving: Receiving) -> None:
    """F-C1"""
    room = receiving.rooms[ROOM]
    for arrive in (lambda: first(receiving), lambda: frame(receiving, 1, 3, 6), lambda: frame(receiving, 0)):
        assert not room.complete
        assert arrive() is Outcome.WRITTEN
    assert not room.complete
    assert frame(receiving, 1, 0, 3) is Outcome.WRITTEN
    assert room.complete


def test_what_comes_for_a_closed_room_is_late(receiving: Receiving) -> None:
    """F-A3, F-C5: its pages may be another room's by then."""
    receiving.close(ROOM)
    assert frame(receiving, 0) is Outcome.LATE
    assert first(receiving) is Outcome.LATE


def test_what_comes_over_another_pairings_link_is_foreign(receiving: Receiving) -> None:
    assert frame(receiving, 0, link=5) is Outcome.FOREIGN
    assert receiving.first_token(ROOM, PAIRING, (PairingNumber(5), Rank(1)), 3, 10) is Outcome.FOREIGN


def test_a_repeat_is_not_written_twice(receiving: Receiving) -> None:
    frame(receiving, 0)
    assert frame(receiving, 0) is Outcome.REPEATED
    first(receiving)
    assert first(receiving, 4) is Outcome.REPEATED
    assert receiving.rooms[ROOM].first_token == 3


def test_nothing_is_written_to_a_room_that_decodes(receiving: Receiving) -> None:
    receiving.rooms[ROOM].joined = True
    assert frame(receiving, 0) is Outcome.REPEATED


def test_what_lies_outside_the_plan_is_refused(receiving: Receiving) -> None:
    with pytest.raises(Corrupt):
        frame(receiving, 0, 0, 7)
    with pytest.raises(Corrupt):
        first(receiving, 10)
