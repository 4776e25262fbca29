"""A roster of one pipeline, and stages that link as they are told; for the tests of rosters."""

from itertools import count

from registry_peers import check_roster, descriptor

from kvmesh.protocol.directives import Action, LinkNext, Tell, Withdrawn
from kvmesh.protocol.ids import Generation, Incarnation, LeaseId, Rank, Term, compose
from kvmesh.protocol.members import Member, Stage
from kvmesh.protocol.mint import Mint
from kvmesh.protocol.roster import Roster
from kvmesh.protocol.seats import SeatState

TERM = Term(3)
HELD = Generation(compose(Term(2), 7))
"""Minted by an earlier registry."""


def minted(number: int) -> Generation:
    """The generation this registry mints as its `number`-th."""
    return Generation(compose(TERM, number))


class Played:
    """A roster, and stages that link as they are told."""

    def __init__(self, pp_size: int) -> None:
        self.pp_size = pp_size
        self.roster = Roster("p0", pp_size, Mint(TERM))
        self._leases = count(1)
        self.lease: dict[int, LeaseId] = {}
        """The latest of each rank."""
        self.told: list[tuple[int, object]] = []
        """(lease, directive), in order."""
        self.ranks: dict[LeaseId, int] = {}
        self.deaf: set[int] = set()
        """Ranks that do not link."""

    def arrive(self, rank: int, incarnation: int | None = None, *, held: int = 0, **changes: object) -> LeaseId:
        lease = LeaseId(next(self._leases))
        stage = Stage(
            lease,
            Member(Incarnation(incarnation or 100 + rank), f"host{rank}:1"),
            "p0",
            Rank(rank),
            self.pp_size,
            descriptor(rank, self.pp_size, **changes),
            held_generation=Generation(held),
        )
        actions = self.roster.register(stage)
        self.lease[rank], self.ranks[lease] = lease, rank
        self._carry_out(actions)
        return lease

    def lose(self, rank: int) -> None:
        self._carry_out(self.roster.lease_lost(self.lease[rank]))

    def again(self, rank: int) -> None:
        """The stage's life ended: it closes its lease and opens another."""
        self.lose(rank)
        self.arrive(rank)

    def _carry_out(self, actions: list[Action]) -> None:
        check_roster(self.roster)
        for action in actions:
            assert isinstance(action, Tell)
            self.told.append((action.lease, action.directive))
            if isinstance(action.directive, LinkNext) and self.ranks[action.lease] not in self.deaf:
                self._carry_out(self.roster.linked(action.lease, action.directive.generation))

    def withdrawn(self) -> list[int]:
        return [self.ranks[LeaseId(lease)] for lease, said in self.told if isinstance(said, Withdrawn)]

    @property
    def states(self) -> list[SeatState]:
        return [seat.state for seat in self.roster.seats]


def whole(pp_size: int, held: int = 0) -> Played:
    played = Played(pp_size)
    for rank in reversed(range(pp_size)):
        played.arrive(rank, held=held)
    assert played.roster.whole
    return played
