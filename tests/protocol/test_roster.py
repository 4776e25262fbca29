"""Registration: last rank first, whatever the order of arrival and wherever a stage is lost."""

from itertools import count, pairwise, permutations, product

import pytest

from kvmesh.errors import Fault, Misfit
from kvmesh.protocol.descriptors import Descriptor
from kvmesh.protocol.ids import Generation, Incarnation, LeaseId, Rank
from kvmesh.protocol.roster import SEAT_TABLE, Ask, Directive, Registrant, Roster, SeatEvent, SeatState

LAYERS = 12


def descriptor(rank: int, pp_size: int, **changes: object) -> Descriptor:
    values: dict[str, object] = {
        "protocol_version": 1,
        "model_name": "m",
        "model_fingerprint": "f",
        "dtype": 1,
        "num_layers": LAYERS,
        "num_kv_heads": 2,
        "head_dim": 8,
        "page_size": 16,
        "num_pages": 64,
        "max_tokens": 512,
        "layer_begin": rank * LAYERS // pp_size,
        "layer_end": (rank + 1) * LAYERS // pp_size,
        "vocab_size": 320,
    }
    return Descriptor(**(values | changes))  # type: ignore[arg-type]


class Stages:
    """Stages that do as they are told: what a roster says is carried out until nobody has anything to say."""

    def __init__(self, pp_size: int) -> None:
        self.pp_size = pp_size
        generations, orders = count(1), count(1)
        self.roster = Roster("p0", pp_size, lambda: Generation(next(generations)), lambda: next(orders))
        self._leases = count(1)
        self.lease: dict[int, LeaseId] = {}
        self.admissions: list[tuple[int, int]] = []
        """(rank, generation), in the order told."""
        self.withdrawn: list[int] = []
        self.deaf: set[int] = set()
        """Ranks that don't answer LINK."""

    def arrive(self, rank: int, incarnation: int | None = None, *, held: int = 0, **changes: object) -> None:
        lease = LeaseId(next(self._leases))
        stage = Registrant(
            lease,
            Incarnation(incarnation if incarnation is not None else 100 + rank),
            f"host{rank}:1",
            Rank(rank),
            self.pp_size,
            descriptor(rank, self.pp_size, **changes),
            Generation(held),
        )
        self.lease[rank] = lease
        self._carry_out(self.roster.register(stage))

    def lose(self, rank: int) -> None:
        self._carry_out(self.roster.lease_lost(self.lease[rank]))

    def again(self, rank: int) -> None:
        """The stage's life ended: it closes its lease and opens another."""
        self.lose(rank)
        self.arrive(rank)

    def _carry_out(self, directives: list[Directive]) -> None:
        ranks = {lease: rank for rank, lease in self.lease.items()}
        for said in directives:
            rank = ranks[said.lease]
            if said.ask is Ask.ADMIT:
                self.admissions.append((rank, said.generation))
            elif said.ask is Ask.WITHDRAW:
                self.withdrawn.append(rank)
            elif rank not in self.deaf:
                assert said.next is not None
                assert said.next.rank == rank + 1
                self._carry_out(self.roster.linked(said.lease, said.generation))
        self.check()

    def check(self) -> None:
        """Rank r admitted in a generation that is not over ⇒ r + 1 was admitted to it before."""
        seats = self.roster.seats
        for seat, behind in pairwise(seats):
            if seat.state is SeatState.LINKING:
                assert behind.generation == seat.generation
        if self.roster.generation and not any(s.holder and s.holder.held_generation for s in seats):
            orders = [seat.admitted_order for seat in seats]
            assert orders == sorted(orders, reverse=True), "admitted last rank first"

    @property
    def states(self) -> list[SeatState]:
        return [seat.state for seat in self.roster.seats]


@pytest.mark.parametrize(("state", "event"), list(product(SeatState, SeatEvent)))
def test_a_pair_of_the_table_has_a_row_or_is_refused(state: SeatState, event: SeatEvent) -> None:
    if (state, event) in SEAT_TABLE.rows:
        assert isinstance(SEAT_TABLE.step(state, event)[0], SeatState)
    else:
        with pytest.raises(Fault):
            SEAT_TABLE.step(state, event)


@pytest.mark.parametrize("order", [*permutations(range(2)), *permutations(range(3)), *permutations(range(4))])
def test_any_order_of_arrival_is_admitted_last_rank_first(order: tuple[int, ...]) -> None:
    """F-P1, F-N2"""
    stages = Stages(len(order))
    for position, rank in enumerate(order):
        assert not stages.roster.generation, f"whole after {position} of {len(order)}"
        stages.arrive(rank)
    assert [rank for rank, _ in stages.admissions] == list(reversed(range(len(order))))
    assert stages.roster.generation == 1


def test_one_stage_is_a_pipeline() -> None:
    stages = Stages(1)
    stages.arrive(0)
    assert stages.roster.generation == 1


def test_who_waits_is_told_for_whom() -> None:
    stages = Stages(3)
    stages.arrive(0)
    stages.arrive(1)
    assert stages.roster.waits_for(stages.lease[0]) == "rank 1 of p0"
    assert stages.roster.waits_for(stages.lease[1]) == "rank 2 of p0"
    stages.arrive(2)
    assert stages.roster.waits_for(stages.lease[0]) == ""


def test_rank_0_is_not_admitted_before_it_has_opened_its_step_stream() -> None:
    stages = Stages(2)
    stages.deaf = {0}
    stages.arrive(1)
    stages.arrive(0)
    assert stages.states == [SeatState.LINKING, SeatState.ADMITTED]
    assert not stages.roster.generation


def test_linked_under_another_generation_admits_nobody() -> None:
    stages = Stages(2)
    stages.deaf = {0}
    stages.arrive(1)
    stages.arrive(0)
    assert stages.roster.linked(stages.lease[0], Generation(7)) == []
    assert stages.states[0] is SeatState.LINKING


@pytest.mark.parametrize("lost", [1, 2, 3])
def test_a_loss_during_registration_takes_back_the_admissions_before_it(lost: int) -> None:
    stages = Stages(4)
    for rank in (3, 2, 1):
        stages.arrive(rank)
    stages.lose(lost)
    assert sorted(stages.withdrawn) == list(range(1, lost))
    assert stages.states[lost] is SeatState.EMPTY
    for rank in range(lost + 1, 4):  # those behind it hear it from their streams, and begin anew
        stages.again(rank)
    stages.arrive(lost, incarnation=900)
    stages.arrive(0)
    assert stages.roster.generation > 1
    assert len({seat.generation for seat in stages.roster.seats}) == 1


@pytest.mark.parametrize(("pp_size", "lost"), [(n, r) for n in (1, 2, 3) for r in range(n)])
def test_a_stage_lost_from_a_whole_pipeline_is_replaced_in_the_next_generation(pp_size: int, lost: int) -> None:
    """F-D3, F-D7: the survivors keep their processes and register again; the newcomer waits for them."""
    stages = Stages(pp_size)
    for rank in range(pp_size):
        stages.arrive(rank)
    stages.lose(lost)
    assert not stages.roster.generation
    stages.arrive(lost, incarnation=900)
    survivors = [r for r in range(pp_size) if r != lost]
    if survivors:
        assert stages.roster.waits_for(stages.lease[lost]), "the old generation may still run"
    for rank in survivors:
        stages.again(rank)
    assert stages.roster.generation > 1
    assert [r for r, g in stages.admissions if g == stages.roster.generation] == list(reversed(range(pp_size)))


def test_a_newcomer_waits_while_the_holder_of_its_rank_lives() -> None:
    """F-S1: nobody takes a rank over by asking for it."""
    stages = Stages(2)
    stages.arrive(1)
    stages.arrive(0)
    holder = stages.lease[1]
    stages.arrive(1, incarnation=900)
    assert stages.roster.generation == 1
    assert "another process holds" in stages.roster.waits_for(stages.lease[1])
    assert stages.roster.seats[1].holder is not None
    assert stages.roster.seats[1].holder.lease == holder


def test_a_second_stream_of_the_same_process_replaces_the_first() -> None:
    stages = Stages(2)
    stages.arrive(1)
    first = stages.lease[1]
    stages.arrive(1)
    stages._carry_out(stages.roster.lease_lost(first))
    stages.arrive(0)
    assert stages.roster.generation


@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_a_restarted_registry_seats_those_who_hold_a_generation_as_they_come(order: tuple[int, ...]) -> None:
    """F-D15: running rooms do not notice."""
    stages = Stages(3)
    for rank in order:
        assert not stages.roster.generation
        stages.arrive(rank, held=77)
    assert stages.roster.generation == 77
    assert not stages.withdrawn


def test_a_lease_that_comes_back_with_its_generation_makes_the_pipeline_whole_again() -> None:
    stages = Stages(2)
    stages.arrive(1)
    stages.arrive(0)
    stages.lose(0)
    assert not stages.roster.generation, "out of placement at once"
    assert stages.states[0] is SeatState.LOST
    stages.arrive(0, held=1)
    assert stages.roster.generation == 1


def test_nobody_links_to_a_stage_whose_generation_is_over() -> None:
    stages = Stages(2)
    stages.arrive(1)
    stages.arrive(0)
    stages.again(0)
    assert stages.states[0] is SeatState.WAITING, "rank 1 has not begun anew yet"
    stages.again(1)
    assert stages.roster.generation == 2


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"page_size": 32}, "page_size: rank 0 of p0 has 32, rank 1 has 16"),
        ({"num_pages": 65}, "num_pages: rank 0 of p0 has 65, rank 1 has 64"),
        ({"dtype": 2}, "dtype: rank 0 of p0 has 2, rank 1 has 1"),
        ({"model_fingerprint": "g"}, "model_fingerprint: rank 0 of p0 has g, rank 1 has f"),
        ({"max_tokens": 511}, "max_tokens: rank 0 of p0 has 511, rank 1 has 512"),
        ({"layer_end": 5}, r"rank 0 holds layers \[0, 5\), and rank 1 holds \[6, 12\): they must meet"),
        ({"layer_end": 7}, "they must meet"),
        ({"layer_begin": 1}, "the model begins at layer 0"),
    ],
)
def test_a_misfit_is_refused_with_both_values_and_changes_nothing(changes: dict[str, object], says: str) -> None:
    """F-M1, F-M2, F-M8"""
    stages = Stages(2)
    stages.arrive(1)
    with pytest.raises(Misfit, match=says):
        stages.arrive(0, **changes)
    assert stages.states == [SeatState.EMPTY, SeatState.ADMITTED]
    stages.arrive(0)
    assert stages.roster.generation


def test_the_last_rank_ends_where_the_model_ends() -> None:
    with pytest.raises(Misfit, match="the model ends at layer 12"):
        Stages(2).arrive(1, layer_end=11)


def test_stages_agree_on_the_size_of_their_pipeline() -> None:
    stages = Stages(2)
    stages.arrive(1)
    stages.pp_size = 3
    with pytest.raises(Misfit, match="pp_size: rank 2 of p0 has 3, its pipeline has 2"):
        stages.arrive(2)
