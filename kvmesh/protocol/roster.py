"""The seats of one pipeline: who holds each rank, and how a generation is admitted, last rank first.

Each event settles its own seat; `_advance` then carries the others as far as they can go. Called by the registry's core. It
believes the stages: a generation is over when one of its members registers anew, and not because a lease was lost.
"""

from dataclasses import dataclass, field

from kvmesh.errors import Misfit
from kvmesh.protocol.descriptors import check_ends, check_layers, check_same_pipeline
from kvmesh.protocol.directives import Action, Admitted, Directive, LinkNext, Tell, Withdrawn
from kvmesh.protocol.ids import Generation, LeaseId, Rank, short
from kvmesh.protocol.members import NO_GENERATION, Stage
from kvmesh.protocol.mint import Mint
from kvmesh.protocol.seats import Ask, Seat, SeatEvent, SeatState


@dataclass(slots=True)
class Roster:
    """One pipeline, from its first registration until nobody holds or waits for a seat."""

    name: str
    pp_size: int
    mint: Mint
    seats: list[Seat] = field(init=False)
    """Position = rank."""
    newcomers: list[Stage] = field(default_factory=list)
    """Registered for a seat that another process holds: first come, first seated."""
    forming: Generation = NO_GENERATION
    """Begun by the last rank and not whole yet."""

    def __post_init__(self) -> None:
        self.seats = [Seat(Rank(r)) for r in range(self.pp_size)]

    @property
    def whole(self) -> Generation:
        """The generation that every seat is a leased part of; 0 while there is none."""
        generation = self.seats[0].generation
        return generation if all(s.holds(generation) for s in self.seats) else NO_GENERATION

    @property
    def holders(self) -> list[Stage]:
        """Those who hold a seat, by rank."""
        return [s.holder for s in self.seats if s.holder is not None]

    @property
    def stages(self) -> list[Stage]:
        """Everyone in it: holders, then newcomers."""
        return [*self.holders, *self.newcomers]

    def waits_for(self, lease: LeaseId) -> str:
        """Whom the stage on a lease waits for, for people; empty when for nobody."""
        for newcomer in self.newcomers:
            if newcomer.lease == lease:
                seat = self.seats[newcomer.rank]
                until = f", until generation {short(seat.generation)} is over" if seat.generation else ""
                return f"{newcomer.name}, which another process holds{until}"
        own = self._seat_of(lease)
        if own is not None and own.state is SeatState.WAITING:
            return self._peer(Rank(own.rank + 1))
        if own is not None and own.state is SeatState.ENDING:
            return f"the end of its own generation {short(own.generation)}"
        return ""

    # Events.

    def register(self, stage: Stage) -> list[Action]:
        """A stage registers, for the first time or again; one whose seat another process holds waits for it.

        Raises:
            Misfit: it does not fit its peers; nothing is changed.
        """
        self._check_fit(stage)
        seat = self.seats[stage.rank]
        self.newcomers = [n for n in self.newcomers if n.member.incarnation != stage.member.incarnation]
        if seat.holder is not None and seat.holder.member.incarnation != stage.member.incarnation:
            self.newcomers.append(stage)
            return self._advance()
        return self._sit(seat, stage) + self._advance()

    def linked(self, lease: LeaseId, generation: Generation) -> list[Action]:
        """A stage opened its step stream. Late, or under another generation: nothing."""
        seat = self._seat_of(lease)
        if seat is None or seat.generation != generation:
            return []
        return self._step(seat, SeatEvent.LINKED) + self._advance()

    def lease_lost(self, lease: LeaseId) -> list[Action]:
        """A lease ended or expired. Unknown: nothing."""
        self.newcomers = [n for n in self.newcomers if n.lease != lease]
        seat = self._seat_of(lease)
        if seat is None:
            return self._advance()
        actions = []
        if seat.holds(self.forming):
            actions = self._end(self.forming, seat.rank, f"rank {seat.rank} of {self.name} was lost")
        return actions + self._step(seat, SeatEvent.LEASE_LOST) + self._advance()

    # What follows.

    def _advance(self) -> list[Action]:
        """Frees, seats and admits until nothing more can happen."""
        for seat in self.seats:
            if seat.state is SeatState.LOST and not any(s.holds(seat.generation) for s in self.seats):
                seat.step(SeatEvent.OVER)  # nobody here speaks for it any more: as after a restart of the registry
        actions: list[Action] = []
        while newcomer := next((n for n in self.newcomers if self._may_sit(n)), None):
            self.newcomers.remove(newcomer)
            actions += self._seat_newcomer(newcomer)
        for seat in reversed(self.seats):
            actions += self._admit(seat)
        if self.seats[0].holds(self.forming):
            self.forming = NO_GENERATION  # whole
        return actions

    def _admit(self, seat: Seat) -> list[Action]:
        if seat.state is not SeatState.WAITING:
            return []
        if seat.rank == self.pp_size - 1:
            seat.generation = self.forming = self.mint.generation()
            return self._step(seat, SeatEvent.BEGAN)
        if self.forming and self.seats[seat.rank + 1].holds(self.forming):
            seat.generation = self.forming
            return self._step(seat, SeatEvent.ORDERED)
        return []

    def _sit(self, seat: Seat, stage: Stage) -> list[Action]:
        """The seat's holder, or the first after an empty one, registers on a new lease."""
        actions: list[Action] = []
        if seat.state in (SeatState.ADMITTED, SeatState.LOST) and seat.generation != stage.held_generation:
            actions += self._end(seat.generation, seat.rank, f"{stage.name} began anew")
        seat.holder = stage
        if not stage.held_generation:
            return actions + self._step(seat, SeatEvent.REGISTERED)
        seat.generation = stage.held_generation
        actions += self._step(seat, SeatEvent.RESEATED)
        for (
            other
        ) in self.seats:  # it runs, so who said that it is over was heard late (two streams of one process crossed)
            if other.state is SeatState.ENDING and other.generation == stage.held_generation:
                actions += self._step(other, SeatEvent.REVIVED)
        return actions

    def _end(self, generation: Generation, rank: int, reason: str) -> list[Action]:
        """A generation is over from `rank` on. While it was forming, the admissions before `rank` are taken back; otherwise
        its stages hear it from their streams, and register anew."""
        was_forming = generation == self.forming
        if was_forming:
            self.forming = NO_GENERATION
        actions: list[Action] = []
        for seat in self.seats:
            if seat.generation == generation:
                event = SeatEvent.WITHDRAWN if was_forming and seat.rank < rank else SeatEvent.OVER
                actions += self._step(seat, event, reason)
        return actions

    # Newcomers.

    def _may_sit(self, newcomer: Stage) -> bool:
        """Whether the seat is free, or its holder must give way. While the pipeline is not whole, a generation that runs
        goes before one that forms, and of two that run the later: so those who come back to a restarted registry find
        together, whoever came first. It runs when the newcomer and a leased seat hold it."""
        seat, held = self.seats[newcomer.rank], newcomer.held_generation
        if seat.state is SeatState.EMPTY:
            return True
        if self.whole or held in (NO_GENERATION, self.forming):
            return False
        runs = any(s.generation == held and s.leased for s in self.seats)
        return runs and (seat.generation < held or seat.generation == self.forming)

    def _seat_newcomer(self, newcomer: Stage) -> list[Action]:
        seat = self.seats[newcomer.rank]
        actions: list[Action] = []
        if seat.generation == self.forming != NO_GENERATION:
            reason = f"generation {short(newcomer.held_generation)} still runs"
            actions += self._end(self.forming, self.pp_size, reason)
        if seat.holder is not None:
            if seat.leased:
                self.newcomers.append(seat.holder)
            actions += self._step(seat, SeatEvent.DISPLACED)
        return actions + self._sit(seat, newcomer)

    def _check_fit(self, stage: Stage) -> None:
        """Compares a stage with all others here. One that waits for a seat fits its holder, so it may take over any time."""
        if stage.pp_size != self.pp_size:
            raise Misfit(f"pp_size: {stage.name} has {stage.pp_size}, {self.name} has {self.pp_size}", field="pp_size")
        check_ends(stage.rank, stage.descriptor, self.pp_size)
        for other in self.stages:
            if other.member.incarnation != stage.member.incarnation:
                check_same_pipeline(stage.name, stage.descriptor, other.name, other.descriptor)
                check_layers(stage.rank, stage.descriptor, other.rank, other.descriptor)

    # Seats.

    def _seat_of(self, lease: LeaseId) -> Seat | None:
        return next((s for s in self.seats if s.holder is not None and s.leased and s.holder.lease == lease), None)

    def _peer(self, rank: Rank) -> str:
        """A rank that is waited for, and whom it waits for itself."""
        seat, beyond = self.seats[rank], next((s for s in self.seats[rank + 1 :] if not s.leased), None)
        if seat.state is SeatState.ENDING:
            return f"rank {rank} of {self.name}, which still leaves generation {short(seat.generation)}"
        if seat.state is SeatState.WAITING and beyond is not None:
            return f"rank {rank} of {self.name}, which waits for rank {beyond.rank}"
        return f"rank {rank} of {self.name}"

    def _step(self, seat: Seat, event: SeatEvent, reason: str = "") -> list[Action]:
        """Steps one seat and says what the table asks for."""
        holder, generation = seat.holder, seat.generation
        asks = seat.step(event)
        if seat.state is SeatState.ADMITTED and seat.admitted_order == 0:
            seat.admitted_order = self.mint.order()
        if holder is None:
            return []
        return [Tell(holder.lease, self._directive(ask, seat, generation, reason)) for ask in asks]

    def _directive(self, ask: Ask, seat: Seat, generation: Generation, reason: str) -> Directive:
        if ask is Ask.ADMIT:
            return Admitted(generation)
        if ask is Ask.WITHDRAW:
            return Withdrawn(generation, reason)
        behind = self.seats[seat.rank + 1].holder
        assert behind is not None, "a stage links only to one that is admitted"
        return LinkNext(behind.member, generation)
