"""A seat: one rank of one pipeline, and its lifecycle as a table.

Stepped by the roster alone, which works out what one seat's change means for the others. Knows no stream and no clock.
"""

from dataclasses import dataclass
from enum import Enum

from kvmesh.protocol.ids import Generation, Rank
from kvmesh.protocol.members import NO_GENERATION, Stage
from kvmesh.protocol.table import Table


class SeatState(Enum):
    """Where a rank is."""

    EMPTY = "empty"
    WAITING = "waiting"
    """Held by a process that waits for the next higher rank."""
    LINKING = "linking"
    """Told to open its step stream."""
    ADMITTED = "admitted"
    LOST = "lost"
    """Its lease is over, but the generation may still run: a newcomer waits."""
    ENDING = "ending"
    """Its generation is over, another rank said; its holder has not registered anew yet."""


class SeatEvent(Enum):
    """What happens to a seat."""

    REGISTERED = "registered anew"
    RESEATED = "registered, holding a generation"
    ORDERED = "ordered to link"
    LINKED = "linked"
    BEGAN = "began a generation"
    """As last rank, which has no one to link to."""
    WITHDRAWN = "next rank lost while forming"
    OVER = "generation over"
    REVIVED = "generation held by another rank after all"
    LEASE_LOST = "lease lost"
    DISPLACED = "displaced by a stage of a running generation"


class Ask(Enum):
    """What is to be said to the seat's holder."""

    LINK = "link"
    ADMIT = "admit"
    WITHDRAW = "withdraw"


_E, _W, _L, _A, _X, _N = (
    SeatState.EMPTY,
    SeatState.WAITING,
    SeatState.LINKING,
    SeatState.ADMITTED,
    SeatState.LOST,
    SeatState.ENDING,
)
SEAT_TABLE: Table[SeatState, SeatEvent, Ask] = Table(
    "seat",
    {
        (_E, SeatEvent.REGISTERED): (_W, ()),
        (_E, SeatEvent.RESEATED): (_A, (Ask.ADMIT,)),
        (_W, SeatEvent.REGISTERED): (_W, ()),
        (_W, SeatEvent.RESEATED): (_A, (Ask.ADMIT,)),
        (_W, SeatEvent.ORDERED): (_L, (Ask.LINK,)),
        (_W, SeatEvent.BEGAN): (_A, (Ask.ADMIT,)),
        (_W, SeatEvent.LINKED): (_W, ()),
        (_W, SeatEvent.LEASE_LOST): (_E, ()),
        (_W, SeatEvent.DISPLACED): (_E, ()),
        (_L, SeatEvent.REGISTERED): (_W, ()),
        (_L, SeatEvent.RESEATED): (_A, (Ask.ADMIT,)),
        (_L, SeatEvent.LINKED): (_A, (Ask.ADMIT,)),
        (_L, SeatEvent.WITHDRAWN): (_W, (Ask.WITHDRAW,)),
        (_L, SeatEvent.LEASE_LOST): (_E, ()),
        (_A, SeatEvent.RESEATED): (_A, (Ask.ADMIT,)),
        (_A, SeatEvent.LINKED): (_A, ()),
        (_A, SeatEvent.WITHDRAWN): (_W, (Ask.WITHDRAW,)),
        (_A, SeatEvent.OVER): (_N, ()),
        (_A, SeatEvent.LEASE_LOST): (_X, ()),
        (_A, SeatEvent.DISPLACED): (_E, ()),
        (_X, SeatEvent.RESEATED): (_A, (Ask.ADMIT,)),
        (_X, SeatEvent.OVER): (_E, ()),
        (_X, SeatEvent.DISPLACED): (_E, ()),
        (_N, SeatEvent.REGISTERED): (_W, ()),
        (_N, SeatEvent.RESEATED): (_A, (Ask.ADMIT,)),
        (_N, SeatEvent.LINKED): (_N, ()),
        (_N, SeatEvent.OVER): (_N, ()),
        (_N, SeatEvent.REVIVED): (_A, ()),
        (_N, SeatEvent.LEASE_LOST): (_E, ()),
        (_N, SeatEvent.DISPLACED): (_E, ()),
    },
)


@dataclass(slots=True)
class Seat:
    """One rank. `step` alone writes the state, and what follows from it."""

    rank: Rank
    state: SeatState = SeatState.EMPTY
    holder: Stage | None = None
    generation: Generation = NO_GENERATION
    """It is linking under, or was admitted to."""
    admitted_order: int = 0
    """Among all admissions of the registry's life; 0 while not admitted."""

    @property
    def leased(self) -> bool:
        """Whether its holder's lease runs."""
        return self.holder is not None and self.state is not SeatState.LOST

    def holds(self, generation: Generation) -> bool:
        """Whether it is an admitted and leased part of `generation`."""
        return self.state is SeatState.ADMITTED and self.generation == generation

    def step(self, event: SeatEvent) -> tuple[Ask, ...]:
        """Returns what is to be said to its holder.

        Raises:
            Fault: the event can't happen in this state; nothing is changed.
        """
        self.state, asks = SEAT_TABLE.step(self.state, event)
        if self.state in (SeatState.EMPTY, SeatState.WAITING):
            self.generation = NO_GENERATION
        if self.state is not SeatState.ADMITTED:
            self.admitted_order = 0
        if self.state is SeatState.EMPTY:
            self.holder = None
        return asks
