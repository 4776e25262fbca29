"""The seats of one pipeline, one event after the other. What any order of events leads to is in test_registration.py."""

from itertools import permutations

import pytest
from roster_stages import HELD, Played, minted, whole

from kvmesh.protocol.directives import Admitted, LinkNext
from kvmesh.protocol.ids import Incarnation, LeaseId
from kvmesh.protocol.members import Member
from kvmesh.protocol.seats import SeatState

# Registration.


def test_one_stage_is_a_pipeline() -> None:
    assert whole(1).roster.whole == minted(1)


def test_the_generation_is_minted_with_the_last_rank_and_handed_up() -> None:
    played = Played(3)
    for rank in range(3):
        played.arrive(rank)
    admitted = [(played.ranks[LeaseId(lease)], said) for lease, said in played.told if isinstance(said, Admitted)]
    assert admitted == [(2, Admitted(minted(1))), (1, Admitted(minted(1))), (0, Admitted(minted(1)))]
    assert [seat.admitted_order for seat in played.roster.seats] == [3, 2, 1]


def test_who_links_is_told_whom_to_and_under_which_generation() -> None:
    played = Played(2)
    played.arrive(1)
    lease = played.arrive(0)
    assert (lease, LinkNext(Member(Incarnation(101), "host1:1"), minted(1))) in played.told


def test_who_waits_is_told_for_whom_and_who_is_missing() -> None:
    """F-D11"""
    played = Played(3)
    played.arrive(0)
    assert played.roster.waits_for(played.lease[0]) == "rank 1 of p0"
    played.arrive(1)
    assert played.roster.waits_for(played.lease[0]) == "rank 1 of p0, which waits for rank 2"
    assert played.roster.waits_for(played.lease[1]) == "rank 2 of p0"
    played.arrive(2)
    assert [played.roster.waits_for(played.lease[rank]) for rank in range(3)] == ["", "", ""]


def test_rank_0_is_not_admitted_before_it_has_opened_its_step_stream() -> None:
    played = Played(2)
    played.deaf = {0}
    played.arrive(1)
    lease = played.arrive(0)
    assert played.states == [SeatState.LINKING, SeatState.ADMITTED]
    assert played.roster.linked(lease, minted(7)) == [], "another generation admits nobody"
    assert not played.roster.whole
    played._carry_out(played.roster.linked(lease, minted(1)))
    assert played.roster.whole == minted(1)
    assert played.roster.linked(lease, minted(1)) == [], "repeated"


# Losses while it forms.


@pytest.mark.parametrize("lost", [1, 2, 3])
def test_a_loss_during_registration_takes_back_the_admissions_before_it(lost: int) -> None:
    played = Played(4)
    for rank in (3, 2, 1):
        played.arrive(rank)
    played.lose(lost)
    assert sorted(played.withdrawn()) == list(range(1, lost))
    assert played.states[lost] is SeatState.EMPTY
    behind = range(lost + 1, 4)
    assert all(played.states[rank] is SeatState.ENDING for rank in behind), "they hear it from their streams"
    for rank in behind:
        played.again(rank)
    played.arrive(lost, incarnation=900)
    played.arrive(0)
    assert played.roster.whole == minted(1 if lost == 4 else 2)


def test_a_stage_lost_before_it_linked_costs_nobody_else_anything() -> None:
    played = Played(3)
    played.deaf = {1}
    played.arrive(2)
    played.arrive(1)
    played.lose(1)
    assert played.withdrawn() == []
    played.deaf = set()
    played.arrive(1, incarnation=900)
    played.arrive(0)
    assert played.roster.whole == minted(1)


# The end of a generation.


@pytest.mark.parametrize(("pp_size", "lost"), [(n, r) for n in (1, 2, 3) for r in range(n)])
def test_a_stage_lost_from_a_whole_pipeline_is_replaced_in_the_next_generation(pp_size: int, lost: int) -> None:
    """F-D3, F-D7: the survivors keep their processes and register anew; the newcomer waits for them."""
    played = whole(pp_size)
    played.lose(lost)
    assert not played.roster.whole, "out of placement at once"
    played.arrive(lost, incarnation=900)
    survivors = [rank for rank in range(pp_size) if rank != lost]
    if survivors:
        assert "until generation 3.1 is over" in played.roster.waits_for(played.lease[lost])
    for rank in survivors:
        played.again(rank)
    assert played.roster.whole == minted(2)
    assert played.withdrawn() == []
    admitted = [seat.admitted_order for seat in played.roster.seats]
    assert admitted == sorted(admitted, reverse=True)


def test_one_member_that_registers_anew_ends_the_generation_for_all() -> None:
    played = whole(3)
    played.arrive(1)
    assert played.states == [SeatState.ENDING, SeatState.WAITING, SeatState.ENDING]
    assert not played.roster.whole
    assert played.withdrawn() == [], "the end of a generation comes from the chain, never from the registry"
    assert "which still leaves generation 3.1" in played.roster.waits_for(played.lease[1])
    for rank in (0, 2):
        played.again(rank)
    assert played.roster.whole == minted(2)


def test_the_next_generation_begins_with_the_last_rank() -> None:
    played = whole(2)
    played.again(0)
    assert played.states == [SeatState.WAITING, SeatState.ENDING], "nobody links to a stage whose generation is over"
    played.again(1)
    assert played.roster.whole == minted(2)


def test_a_generation_that_nobody_leases_any_more_frees_its_seats() -> None:
    played = whole(2)
    played.lose(0)
    assert played.states[0] is SeatState.LOST
    played.lose(1)
    assert played.states == [SeatState.EMPTY, SeatState.EMPTY]


# Leases that come back.


def test_a_lease_that_comes_back_with_its_generation_makes_the_pipeline_whole_again() -> None:
    played = whole(2)
    played.lose(0)
    assert not played.roster.whole
    played.arrive(0, held=minted(1))
    assert played.roster.whole == minted(1)


@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_a_restarted_registry_seats_those_who_hold_a_generation_as_they_come(order: tuple[int, ...]) -> None:
    """F-D15: running rooms do not notice."""
    played = Played(3)
    for rank in order:
        assert not played.roster.whole
        played.arrive(rank, held=HELD)
    assert played.roster.whole == HELD
    assert played.withdrawn() == []


def test_a_lease_lost_before_all_are_back_ends_nothing() -> None:
    played = Played(3)
    played.arrive(1, held=HELD)
    played.arrive(2, held=HELD)
    played.lose(2)
    assert played.states == [SeatState.EMPTY, SeatState.ADMITTED, SeatState.LOST]
    assert played.withdrawn() == []
    played.arrive(2, held=HELD)
    played.arrive(0, held=HELD)
    assert played.roster.whole == HELD


def test_a_stage_that_registers_anew_beside_a_running_generation_is_not_told_to_link_into_it() -> None:
    played = Played(2)
    played.arrive(1, held=HELD)
    played.arrive(0, incarnation=900)
    assert played.states == [SeatState.WAITING, SeatState.ADMITTED]


def test_one_that_was_not_whole_when_the_registry_went_begins_anew() -> None:
    played = Played(2)
    played.arrive(1, held=HELD)
    played.arrive(0)
    played.again(1)
    assert played.roster.whole == minted(1)


def test_a_second_stream_of_the_same_process_replaces_the_first() -> None:
    played = Played(2)
    first = played.arrive(1)
    played.arrive(1)
    played._carry_out(played.roster.lease_lost(first))
    played.arrive(0)
    assert played.roster.whole


def test_a_registration_that_was_overtaken_by_a_later_one_does_not_end_the_generation_for_good() -> None:
    """Two streams of one process may be heard in the wrong order; the process speaks again, for its older one is closed."""
    played = whole(2)
    played.arrive(0)  # sent before the registration that led to the generation
    assert played.states == [SeatState.WAITING, SeatState.ENDING]
    played.arrive(0, held=minted(1))
    assert played.roster.whole == minted(1)
