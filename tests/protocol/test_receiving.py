"""What may be written at a decoder, by room, pairing and plan."""

import pytest

from kvmesh.errors import Corrupt
from kvmesh.protocol.coverage import ShardSpan
from kvmesh.protocol.ids import PageId, PairingNumber, Rank, RoomId
from kvmesh.protocol.receiving import Outcome, Receiving

ROOM, PAIRING = RoomId(9), PairingNumber(4)
LINK = (PAIRING, Rank(0))
SHARDS = {Rank(0): (ShardSpan(0, 1, 0, 2),), Rank(1): (ShardSpan(1, 2, 0, 2),)}


@pytest.fixture
def receiving() -> Receiving[str]:
    own: Receiving[str] = Receiving()
    own.open(ROOM, PAIRING, SHARDS, (PageId(0),), begin=0, end=6)
    return own


def frame(
    own: Receiving[str], rank: int, begin: int = 0, end: int = 6, room: int = ROOM, link: int = PAIRING
) -> Outcome:
    of_link = (PairingNumber(link), Rank(rank))
    return own.frame(RoomId(room), PAIRING, of_link, SHARDS[Rank(rank)][0], begin, end)


def first(own: Receiving[str], token: int = 3) -> Outcome:
    return own.first_token(ROOM, PAIRING, (PAIRING, Rank(1)), token, vocab_size=10)


def test_a_room_is_complete_with_every_shard_and_the_first_token_in_any_order(receiving: Receiving[str]) -> None:
    """F-C1"""
    room = receiving.rooms[ROOM]
    for arrive in (lambda: first(receiving), lambda: frame(receiving, 1, 3, 6), lambda: frame(receiving, 0)):
        assert not room.complete
        assert arrive() is Outcome.WRITTEN
    assert not room.complete
    assert frame(receiving, 1, 0, 3) is Outcome.WRITTEN
    assert room.complete


def test_what_comes_for_a_closed_room_is_late(receiving: Receiving[str]) -> None:
    """F-A3, F-C5: its pages may be another room's by then."""
    receiving.close(ROOM)
    assert frame(receiving, 0) is Outcome.LATE
    assert first(receiving) is Outcome.LATE


def test_what_comes_over_another_pairings_link_is_foreign(receiving: Receiving[str]) -> None:
    assert frame(receiving, 0, link=5) is Outcome.FOREIGN
    assert receiving.first_token(ROOM, PAIRING, (PairingNumber(5), Rank(1)), 3, 10) is Outcome.FOREIGN


def test_a_repeat_is_not_written_twice(receiving: Receiving[str]) -> None:
    frame(receiving, 0)
    assert frame(receiving, 0) is Outcome.REPEATED
    first(receiving)
    assert first(receiving, 4) is Outcome.REPEATED
    assert receiving.rooms[ROOM].first_token == 3


def test_nothing_is_written_to_a_room_that_decodes(receiving: Receiving[str]) -> None:
    receiving.rooms[ROOM].handed_over = True
    assert frame(receiving, 0) is Outcome.REPEATED


def test_what_lies_outside_the_plan_is_refused(receiving: Receiving[str]) -> None:
    with pytest.raises(Corrupt):
        frame(receiving, 0, 0, 7)
    with pytest.raises(Corrupt):
        first(receiving, 10)


NEXT, OTHER = RoomId(10), RoomId(11)


@pytest.fixture
def held(receiving: Receiving[str]) -> Receiving[str]:
    """The first room was handed over and closed; the worker has not let it go."""
    complete(receiving)
    receiving.close(ROOM)
    return receiving


def complete(own: Receiving[str]) -> None:
    frame(own, 0)
    frame(own, 1)
    first(own)
    assert own.hand_over(own.rooms[ROOM])


def opened(own: Receiving[str], room: RoomId, *pages: int) -> None:
    own.open(room, PAIRING, SHARDS, tuple(PageId(p) for p in pages), begin=0, end=6)


def test_a_room_is_handed_over_once_and_when_it_is_complete(receiving: Receiving[str]) -> None:
    room = receiving.rooms[ROOM]
    frame(receiving, 0)
    first(receiving)
    assert not receiving.hand_over(room)
    frame(receiving, 1)
    assert receiving.hand_over(room)
    assert not receiving.hand_over(room)


def test_a_room_in_pages_that_the_worker_holds_waits_until_they_are_let_go(held: Receiving[str]) -> None:
    opened(held, NEXT, 0, 1)
    assert held.put_aside(NEXT, PAIRING, LINK, "a")
    assert held.put_aside(NEXT, PAIRING, LINK, "b")
    assert held.let_go(ROOM) == ["a", "b"]
    assert not held.put_aside(NEXT, PAIRING, LINK, "c"), "it is due at once"
    assert not held.held


@pytest.mark.parametrize(("pairing", "link"), [(PAIRING, 9), (9, PAIRING), (9, 9)])
def test_what_is_foreign_to_a_room_does_not_wait_for_its_grant(held: Receiving[str], pairing: int, link: int) -> None:
    opened(held, NEXT, 0, 1)
    assert not held.put_aside(NEXT, PairingNumber(pairing), (PairingNumber(link), Rank(0)), "a")


def test_a_first_token_of_any_rank_but_the_last_breaks_the_room(receiving: Receiving[str]) -> None:
    with pytest.raises(Corrupt, match="rank 0 sent a first token, rank 1 draws it"):
        receiving.first_token(ROOM, PAIRING, (PAIRING, Rank(0)), 3, vocab_size=10)
    assert first(receiving) is Outcome.WRITTEN


def test_a_room_in_other_pages_does_not_wait(held: Receiving[str]) -> None:
    opened(held, NEXT, 1, 2)
    assert not held.put_aside(NEXT, PAIRING, LINK, "a")


def test_a_room_waits_for_the_last_of_its_pages(held: Receiving[str]) -> None:
    opened(held, NEXT, 1)
    own = held.rooms[NEXT]
    for rank, (shard,) in SHARDS.items():
        held.frame(NEXT, PAIRING, (PAIRING, rank), shard, 0, 6)
    held.first_token(NEXT, PAIRING, (PAIRING, Rank(1)), 3, vocab_size=10)
    assert held.hand_over(own)
    held.close(NEXT)
    opened(held, OTHER, 1, 0)
    held.put_aside(OTHER, PAIRING, LINK, "a")
    assert held.let_go(NEXT) == []
    assert held.put_aside(OTHER, PAIRING, LINK, "b")
    assert held.let_go(ROOM) == ["a", "b"]


def test_what_was_put_aside_is_due_when_its_room_closes_and_is_late(held: Receiving[str]) -> None:
    opened(held, NEXT, 0)
    held.put_aside(NEXT, PAIRING, LINK, "a")
    assert held.close(NEXT) == ["a"]
    assert not held.put_aside(NEXT, PAIRING, LINK, "a")
    assert frame(held, 0, room=NEXT) is Outcome.LATE
    assert held.let_go(ROOM) == []


def test_a_room_that_was_never_handed_over_leaves_its_pages_at_once(receiving: Receiving[str]) -> None:
    frame(receiving, 0)
    receiving.close(ROOM)
    assert not receiving.held
    opened(receiving, NEXT, 0)
    assert not receiving.put_aside(NEXT, PAIRING, LINK, "a")


def test_a_room_that_ended_at_the_worker_is_gone_before_it_is_closed(receiving: Receiving[str]) -> None:
    complete(receiving)
    assert receiving.let_go(ROOM) == []
    assert receiving.close(ROOM) == []
    assert not (receiving.rooms or receiving.held)
