import pytest

from kvmesh.errors import Fenced
from kvmesh.protocol.fence import Fence
from kvmesh.protocol.ids import MAX_COUNT, MAX_TERM, Generation, RoomId, Term, compose, short, term_of


def test_a_member_obeys_the_highest_term_it_has_seen() -> None:
    fence = Fence()
    fence.hear_term(Term(3))
    fence.hear_term(Term(3))
    with pytest.raises(Fenced, match="term 2 is below 3"):
        fence.hear_term(Term(2))
    fence.hear_term(Term(4))
    assert fence.term == 4


def test_a_room_of_a_lower_term_is_refused() -> None:
    fence = Fence()
    fence.hear_term(Term(3))
    fence.hear_room(RoomId(compose(Term(3), 1)))
    with pytest.raises(Fenced, match="minted below term 3"):
        fence.hear_room(RoomId(compose(Term(2), 9)))


def test_room_0_is_no_room() -> None:
    """F-R8"""
    with pytest.raises(Fenced):
        Fence().hear_room(RoomId(0))


def test_generations_only_rise() -> None:
    fence = Fence()
    fence.begin(Generation(5))
    for stale in (5, 4):
        with pytest.raises(Fenced, match="not above"):
            fence.begin(Generation(stale))
    fence.begin(Generation(6))


@pytest.mark.parametrize(("term", "count"), [(1, 1), (MAX_TERM, MAX_COUNT), (1, MAX_COUNT), (7, 12)])
def test_an_id_is_63_bits_and_never_0(term: int, count: int) -> None:
    """F-R7, F-R8"""
    identity = compose(Term(term), count)
    assert 0 < identity < 1 << 63
    assert term_of(identity) == term
    assert short(identity) == f"{term}.{count}"


@pytest.mark.parametrize(("term", "count"), [(0, 1), (1, 0), (MAX_TERM + 1, 1), (1, MAX_COUNT + 1), (-1, 1)])
def test_what_does_not_fit_an_id_is_refused(term: int, count: int) -> None:
    with pytest.raises(ValueError, match="outside"):
        compose(Term(term), count)
