"""The seats of one pipeline: who holds each rank, and how a generation is admitted, last rank first.

A seat's lifecycle is the table below; what follows from a change for the other seats is `Roster.advance`, run after every
event. Called by the registry core. Knows no stream and no clock.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

from kvmesh.errors import Misfit
from kvmesh.protocol.descriptors import Descriptor, check_layers, check_same_pipeline
from kvmesh.protocol.ids import Generation, Incarnation, LeaseId, Rank
from kvmesh.protocol.table import Table

NONE = Generation(0)


class SeatState(Enum):
    """Where a rank is."""

    EMPTY = "empty"
    WAITING = "waiting"
    """Held by a process that waits for the next higher rank."""
    LINKING = "linking"
    """Told to open its step stream."""
    ADMITTED = "admitted"
    LOST = "lost"
    """Its lease is over while the generation it was admitted to may still run: a newcomer waits."""


class SeatEvent(Enum):
    """What happens to a seat."""

    REGISTERED = "registered"
    RESEATED = "registered, holding a generation"
    ORDERED = "ordered to link"
    ADMITTED = "admitted"
    WITHDRAWN = "withdrawn"
    LEASE_LOST = "lease lost"
    OVER = "generation over"


class Ask(Enum):
    """What is to be said down the lease of a seat."""

    LINK = "link"
    ADMIT = "admit"
    WITHDRAW = "withdraw"


_E, _W, _L, _A, _X = SeatState.EMPTY, SeatState.WAITING, SeatState.LINKING, SeatState.ADMITTED, SeatState.LOST
SEAT_TABLE: Table[SeatState, SeatEvent, Ask] = Table(
    "seat of a stage",
    {
        (_E, SeatEvent.REGISTERED): (_W, ()),
        (_E, SeatEvent.RESEATED): (_A, (Ask.ADMIT,)),
        (_W, SeatEvent.REGISTERED): (_W, ()),
        (_W, SeatEvent.RESEATED): (_A, (Ask.ADMIT,)),
        (_W, SeatEvent.ORDERED): (_L, (Ask.LINK,)),
        (_W, SeatEvent.ADMITTED): (_A, (Ask.ADMIT,)),
        (_W, SeatEvent.LEASE_LOST): (_E, ()),
        (_L, SeatEvent.REGISTERED): (_W, ()),
        (_L, SeatEvent.RESEATED): (_A, (Ask.ADMIT,)),
        (_L, SeatEvent.ADMITTED): (_A, (Ask.ADMIT,)),
        (_L, SeatEvent.WITHDRAWN): (_W, (Ask.WITHDRAW,)),
        (_L, SeatEvent.LEASE_LOST): (_E, ()),
        (_A, SeatEvent.REGISTERED): (_W, ()),
        (_A, SeatEvent.RESEATED): (_A, (Ask.ADMIT,)),
        (_A, SeatEvent.WITHDRAWN): (_W, (Ask.WITHDRAW,)),
        (_A, SeatEvent.LEASE_LOST): (_X, ()),
        (_X, SeatEvent.REGISTERED): (_W, ()),
        (_X, SeatEvent.RESEATED): (_A, (Ask.ADMIT,)),
        (_X, SeatEvent.OVER): (_E, ()),
    },
)


@dataclass(frozen=True, slots=True)
class Registrant:
    """A stage, as it registers."""

    lease: LeaseId
    incarnation: Incarnation
    address: str
    rank: Rank
    pp_size: int
    descriptor: Descriptor
    held_generation: Generation = NONE


@dataclass(frozen=True, slots=True)
class Directive:
    """Something to say down a lease."""

    lease: LeaseId
    ask: Ask
    generation: Generation
    next: Registrant | None = None
    """With LINK: the stage of rank + 1."""
    reason: str = ""
    """With WITHDRAW."""


@dataclass(slots=True)
class Seat:
    """One rank."""

    rank: Rank
    state: SeatState = SeatState.EMPTY
    holder: Registrant | None = None
    generation: Generation = NONE
    """It was admitted to, or ordered to link under."""
    admitted_order: int = 0
    """From 1, over the registry's life; 0 while not admitted."""


@dataclass(slots=True)
class Roster:
    """One pipeline."""

    name: str
    pp_size: int
    mint: Callable[[], Generation]
    """Makes the next generation."""
    order: Callable[[], int]
    """Makes the next order of admission."""
    seats: list[Seat] = field(init=False)
    newcomers: list[Registrant] = field(default_factory=list)
    """Registered for a seat that another process holds; first come, first seated."""
    _over_through: Generation = NONE
    """Generations up to this one are over."""
    _whole_through: Generation = NONE
    """The last one that was whole."""

    def __post_init__(self) -> None:
        self.seats = [Seat(Rank(r)) for r in range(self.pp_size)]

    @property
    def generation(self) -> Generation:
        """The generation that is whole, every seat leased; or 0."""
        first = self.seats[0].generation
        whole = all(s.state is SeatState.ADMITTED and s.generation == first for s in self.seats)
        return first if whole and first > self._over_through else NONE

    @property
    def empty(self) -> bool:
        """Nobody holds or waits for a seat."""
        return not self.newcomers and all(seat.holder is None for seat in self.seats)

    def waits_for(self, lease: LeaseId) -> str:
        """Whom a lease waits for, for people; empty when for nobody."""
        for newcomer in self.newcomers:
            if newcomer.lease == lease:
                return f"the seat of rank {newcomer.rank} of {self.name}, which another process holds"
        for seat in self.seats:
            if seat.holder is not None and seat.holder.lease == lease and seat.state is SeatState.WAITING:
                return f"rank {seat.rank + 1} of {self.name}"
        return ""

    # Events.

    def register(self, stage: Registrant) -> list[Directive]:
        """A stage registers, or registers again; one whose seat another process holds waits.

        Raises:
            Misfit: it does not fit its peers; nothing is changed.
        """
        self._check_fit(stage)
        seat = self.seats[stage.rank]
        self.newcomers = [n for n in self.newcomers if n.incarnation != stage.incarnation]
        if seat.holder is not None and seat.holder.incarnation != stage.incarnation:
            self.newcomers.append(stage)
            return self.advance()
        return [*self._seat(seat, stage), *self.advance()]

    def linked(self, lease: LeaseId, generation: Generation) -> list[Directive]:
        """A stage opened its step stream. Late, or under another generation: nothing."""
        seat = self._held_by(lease)
        if seat is None or seat.state is not SeatState.LINKING or seat.generation != generation:
            return []
        return [*self._step(seat, SeatEvent.ADMITTED), *self.advance()]

    def lease_lost(self, lease: LeaseId) -> list[Directive]:
        """A lease ended or expired. Unknown: nothing."""
        self.newcomers = [n for n in self.newcomers if n.lease != lease]
        seat = self._held_by(lease)
        if seat is not None:
            if seat.state is SeatState.ADMITTED and seat.generation > self._whole_through:
                self._end(seat.generation)
            self._step(seat, SeatEvent.LEASE_LOST)
        return self.advance()

    # What follows.

    def advance(self) -> list[Directive]:
        """Carries the pipeline as far as it can go."""
        said = self._clear()
        for newcomer in list(self.newcomers):
            seat = self.seats[newcomer.rank]
            if seat.holder is None:
                self.newcomers.remove(newcomer)
                said += self._seat(seat, newcomer)
        for seat in reversed(self.seats):
            said += self._admit(seat)
        self._whole_through = max(self._whole_through, self.generation)
        return said

    def _clear(self) -> list[Directive]:
        """Frees the seats of generations that are over; takes back what never became whole."""
        for seat in self.seats:
            if seat.state is SeatState.LOST and not self._runs(seat.generation):
                self._end(seat.generation)
        said: list[Directive] = []
        for seat in self.seats:
            if not NONE < seat.generation <= self._over_through:
                continue
            if seat.state is SeatState.LOST:
                self._step(seat, SeatEvent.OVER)
            elif self._leads_nowhere(seat):
                reason = f"rank {seat.rank + 1} of {self.name} was lost"
                said += self._step(seat, SeatEvent.WITHDRAWN, reason)
        return said

    def _leads_nowhere(self, seat: Seat) -> bool:
        """Whether a seat of an ended generation that never was whole lies before the loss. Those behind it hear it from
        their streams, as everyone does once a generation was whole."""
        if seat.generation <= self._whole_through or seat.state not in (SeatState.LINKING, SeatState.ADMITTED):
            return False
        behind = self.seats[seat.rank + 1 :]
        return any(s.state is not SeatState.ADMITTED or s.generation != seat.generation for s in behind)

    def _runs(self, generation: Generation) -> bool:
        """Whether some stage still leases its seat in the generation."""
        return any(s.state is SeatState.ADMITTED and s.generation == generation for s in self.seats)

    def _admit(self, seat: Seat) -> list[Directive]:
        if seat.state is not SeatState.WAITING:
            return []
        if seat.rank == self.pp_size - 1:
            seat.generation = self.mint()
            return self._step(seat, SeatEvent.ADMITTED)
        behind = self.seats[seat.rank + 1]
        if behind.state is SeatState.ADMITTED and behind.generation > self._over_through:
            seat.generation = behind.generation
            return self._step(seat, SeatEvent.ORDERED)
        return []

    def _seat(self, seat: Seat, stage: Registrant) -> list[Directive]:
        if seat.state in (SeatState.ADMITTED, SeatState.LOST) and not stage.held_generation:
            self._end(seat.generation)  # a stage begins anew only when its generation is over
        seat.holder = stage
        seat.generation = stage.held_generation
        return self._step(seat, SeatEvent.RESEATED if stage.held_generation else SeatEvent.REGISTERED)

    def _end(self, generation: Generation) -> None:
        self._over_through = max(self._over_through, generation)

    def _held_by(self, lease: LeaseId) -> Seat | None:
        return next((s for s in self.seats if s.holder is not None and s.holder.lease == lease), None)

    def _check_fit(self, stage: Registrant) -> None:
        who = f"rank {stage.rank} of {self.name}"
        if stage.pp_size != self.pp_size:
            raise Misfit(f"pp_size: {who} has {stage.pp_size}, its pipeline has {self.pp_size}", field="pp_size")
        held = {s.rank: s.holder.descriptor for s in self.seats if s.holder is not None and s.rank != stage.rank}
        for rank, descriptor in held.items():
            check_same_pipeline(who, stage.descriptor, f"rank {rank}", descriptor)
        check_layers({**held, stage.rank: stage.descriptor}, stage.rank, self.pp_size)

    # The one writer of a seat's state.

    def _step(self, seat: Seat, event: SeatEvent, reason: str = "") -> list[Directive]:
        seat.state, asks = SEAT_TABLE.step(seat.state, event)
        behind = self.seats[seat.rank + 1].holder if Ask.LINK in asks else None
        holder = seat.holder
        said = [Directive(holder.lease, ask, seat.generation, behind, reason) for ask in asks] if holder else []
        seat.admitted_order = self.order() if seat.state is SeatState.ADMITTED else 0
        if seat.state in (SeatState.EMPTY, SeatState.WAITING):
            seat.generation = NONE
        if seat.state is SeatState.EMPTY:
            seat.holder = None
        return said
