"""Who takes a seat that another process holds, and who fits a pipeline at all."""

from itertools import permutations

import pytest
from roster_stages import HELD, Played, minted, whole

from kvmesh.errors import Misfit
from kvmesh.protocol.directives import Withdrawn
from kvmesh.protocol.ids import Generation
from kvmesh.protocol.seats import SeatState

# Turns.


def test_a_newcomer_waits_while_the_holder_of_its_rank_lives() -> None:
    """Nobody takes a rank over by asking for it."""
    played = whole(2)
    holder = played.lease[1]
    newcomer = played.arrive(1, incarnation=900)
    assert played.roster.whole == minted(1)
    assert (
        played.roster.waits_for(newcomer) == "rank 1 of p0, which another process holds, until generation 3.1 is over"
    )
    assert played.roster.seats[1].holder is not None
    assert played.roster.seats[1].holder.lease == holder


def test_newcomers_are_seated_first_come_first_served_and_may_leave() -> None:
    played = Played(1)
    played.arrive(0)
    holder = played.lease[0]
    gone = played.arrive(0, incarnation=900)
    played.arrive(0, incarnation=901)
    played._carry_out(played.roster.lease_lost(gone))
    played._carry_out(played.roster.lease_lost(holder))
    assert played.roster.seats[0].holder is not None
    assert played.roster.seats[0].holder.member.incarnation == 901


def test_a_newcomer_waits_also_while_only_the_lease_of_its_rank_is_lost() -> None:
    """An expired lease only stops placement: the chain may still run."""
    played = whole(2)
    played.lose(1)
    played.arrive(1, incarnation=900)
    assert played.states == [SeatState.ADMITTED, SeatState.LOST]
    played.arrive(1, held=minted(1))
    assert played.roster.whole == minted(1)


@pytest.mark.parametrize("order", list(permutations(["newcomer", "last", "first"])))
def test_a_running_generation_gets_its_seats_back_from_a_newcomer_that_came_first(order: tuple[str, ...]) -> None:
    """After a restart of the registry, whatever the order: what runs goes before what forms."""
    played = Played(2)
    for who in order:
        if who == "newcomer":
            played.arrive(1, incarnation=900)
        else:
            played.arrive({"last": 1, "first": 0}[who], held=HELD)
    assert played.roster.whole == HELD
    assert [n.member.incarnation for n in played.roster.newcomers] == [900]


def test_who_gives_way_while_a_generation_forms_is_told_so() -> None:
    played = Played(3)
    for rank in (2, 1):
        played.arrive(rank, incarnation=900 + rank)
    newcomers = [played.lease[2], played.lease[1]]
    for rank in range(3):
        played.arrive(rank, held=HELD)
    assert played.roster.whole == HELD
    assert {lease for lease, said in played.told if isinstance(said, Withdrawn)} == set(newcomers)
    assert sorted(n.member.incarnation for n in played.roster.newcomers) == [901, 902]


def test_of_two_generations_that_run_under_one_name_the_later_is_seated() -> None:
    played = Played(2)
    later = Generation(HELD + 1)
    played.arrive(0, incarnation=10, held=later)
    played.arrive(1, incarnation=20, held=HELD)
    played.arrive(1, incarnation=21, held=later)
    assert played.roster.whole == later
    played.arrive(0, incarnation=11, held=HELD)
    assert played.roster.whole == later, "a whole pipeline gives no seat away"


# Fit.


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"page_size": 32}, "page_size: rank 0 of p0 has 32, rank 1 of p0 has 16"),
        ({"num_pages": 65}, "num_pages: rank 0 of p0 has 65, rank 1 of p0 has 64"),
        ({"dtype": "bf16"}, "dtype: rank 0 of p0 has bf16, rank 1 of p0 has fp32"),
        ({"model_fingerprint": "g"}, "model_fingerprint: rank 0 of p0 has g, rank 1 of p0 has f"),
        ({"max_tokens": 511}, "max_tokens: rank 0 of p0 has 511, rank 1 of p0 has 512"),
        ({"layer_end": 5}, r"layers: rank 0 has \[0, 5\), rank 1 has \[6, 12\)"),
    ],
)
def test_a_misfit_is_refused_with_both_values_and_changes_nothing(changes: dict[str, object], says: str) -> None:
    """F-M1, F-M2, F-M8. F-P7, impossible: one page more than the others have is refused too."""
    played = Played(2)
    played.arrive(1)
    with pytest.raises(Misfit, match=says):
        played.arrive(0, **changes)
    assert played.states == [SeatState.EMPTY, SeatState.ADMITTED]
    played.arrive(0)
    assert played.roster.whole


def test_a_newcomer_fits_the_holder_of_its_seat_or_is_refused() -> None:
    """Else it could take the seat in a moment when its peers are away, and the registry would turn those down."""
    played = Played(2)
    played.arrive(0)
    with pytest.raises(Misfit, match="num_pages: rank 0 of p0 has 32, rank 0 of p0 has 64"):
        played.arrive(0, incarnation=900, num_pages=32)
    with pytest.raises(Misfit, match=r"layers: rank 0 has \[0, 5\), rank 0 has \[0, 6\)"):
        played.arrive(0, incarnation=900, layer_end=5)
    assert not played.roster.newcomers


def test_stages_agree_on_the_size_of_their_pipeline() -> None:
    played = Played(2)
    played.arrive(1)
    played.pp_size = 3
    with pytest.raises(Misfit, match="pp_size: rank 2 of p0 has 3, p0 has 2"):
        played.arrive(2)
