"""A pairing, seen from the decoder that makes it: links to every stage of a generation, last rank first, then control.

Whole or absent. The ranks above 0 are linked in parallel, rank 0 only when all of them have answered, the control stream
last. Called by the decoder's event loop, which carries out the actions. Knows no stream.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum

from kvmesh.protocol.coverage import ShardSpan, check_tiling
from kvmesh.protocol.ids import Generation, PairingNumber, Rank
from kvmesh.protocol.table import Table


class PairingState(Enum):
    """Where a pairing is."""

    NEW = "new"
    LINKING_TAIL = "linking the ranks above 0"
    LINKING_HEAD = "linking rank 0"
    OPENING_CONTROL = "opening control"
    STANDING = "standing"
    ENDED = "ended"


class PairingEvent(Enum):
    """What happens to a pairing."""

    START = "start"
    TAIL_LINKED = "every rank above 0 linked"
    HEAD_LINKED = "rank 0 linked"
    CONTROL_OPENED = "control opened"
    LOST = "a stream lost"


class Ask(Enum):
    """What a transition asks of the decoder."""

    DIAL_TAIL = "dial the ranks above 0"
    DIAL_HEAD = "dial rank 0"
    OPEN_CONTROL = "open control"
    ANNOUNCE = "announce"
    CLOSE_ALL = "close all streams"


_OPEN = (PairingState.LINKING_TAIL, PairingState.LINKING_HEAD, PairingState.OPENING_CONTROL, PairingState.STANDING)
PAIRING_TABLE: Table[PairingState, PairingEvent, Ask] = Table(
    "pairing",
    {
        (PairingState.NEW, PairingEvent.START): (PairingState.LINKING_TAIL, (Ask.DIAL_TAIL,)),
        (PairingState.LINKING_TAIL, PairingEvent.TAIL_LINKED): (PairingState.LINKING_HEAD, (Ask.DIAL_HEAD,)),
        (PairingState.LINKING_HEAD, PairingEvent.HEAD_LINKED): (PairingState.OPENING_CONTROL, (Ask.OPEN_CONTROL,)),
        (PairingState.OPENING_CONTROL, PairingEvent.CONTROL_OPENED): (PairingState.STANDING, (Ask.ANNOUNCE,)),
        **{(state, PairingEvent.LOST): (PairingState.ENDED, (Ask.CLOSE_ALL,)) for state in _OPEN},
        (PairingState.NEW, PairingEvent.LOST): (PairingState.ENDED, ()),
        (PairingState.ENDED, PairingEvent.LOST): (PairingState.ENDED, ()),
        (PairingState.ENDED, PairingEvent.TAIL_LINKED): (PairingState.ENDED, ()),
        (PairingState.ENDED, PairingEvent.HEAD_LINKED): (PairingState.ENDED, ()),
        (PairingState.ENDED, PairingEvent.CONTROL_OPENED): (PairingState.ENDED, ()),
    },
)


@dataclass(slots=True)
class Pairing:
    """One pairing's progress. Each event returns what to carry out."""

    number: PairingNumber
    generation: Generation
    pp_size: int
    num_layers: int
    num_heads: int
    state: PairingState = PairingState.NEW
    shards: dict[Rank, tuple[ShardSpan, ...]] = field(default_factory=dict)

    @property
    def tail(self) -> list[Rank]:
        """The ranks above 0."""
        return [Rank(r) for r in range(1, self.pp_size)]

    def start(self) -> list[Ask]:
        """Begins. A pipeline of one stage has no tail: its head is dialled at once."""
        asks = self._step(PairingEvent.START)
        if self.pp_size > 1:
            return asks
        return self._step(PairingEvent.TAIL_LINKED)

    def linked(self, rank: Rank, shards: Iterable[ShardSpan]) -> list[Ask]:
        """A stage answered; the shards are what it will send.

        Raises:
            Misfit: the last answer is in and the shards do not tile the model.
        """
        self.shards[rank] = tuple(shards)
        if rank == 0:
            check_tiling([s for own in self.shards.values() for s in own], self.num_layers, self.num_heads)
            return self._step(PairingEvent.HEAD_LINKED)
        if all(r in self.shards for r in self.tail):
            return self._step(PairingEvent.TAIL_LINKED)
        return []

    def control_opened(self) -> list[Ask]:
        """Rank 0 answered on the control stream: the pairing stands."""
        return self._step(PairingEvent.CONTROL_OPENED)

    def lost(self) -> list[Ask]:
        """A stream ended: the pairing is over, whatever its state."""
        return self._step(PairingEvent.LOST)

    def _step(self, event: PairingEvent) -> list[Ask]:
        self.state, asks = PAIRING_TABLE.step(self.state, event)
        return list(asks)
