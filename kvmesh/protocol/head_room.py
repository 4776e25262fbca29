"""A room at rank 0: its lifecycle as a table, and what rank 0 keeps of it. Stepped by the scheduler alone."""

from dataclasses import dataclass
from enum import Enum

from kvmesh.protocol.ids import PageId, PairingKey, RoomId
from kvmesh.protocol.steps import Sampling
from kvmesh.protocol.table import Table


class RoomState(Enum):
    """Where a room is at rank 0. A room that is not here has no state: it never came, or its terminal entry is written."""

    WAITING = "waiting"
    """In the queue; holds nothing."""
    PREFILLING = "prefilling"
    """Admitted by the log; tokens are left to schedule."""
    PREFILLED = "prefilled"
    """All its tokens are scheduled; its decoder has not said Received."""
    ENDING = "ending"
    """Its terminal entry is due in the next step."""
    GONE = "gone"
    """Left before it was admitted: the log never knew it."""


class RoomEvent(Enum):
    """What happens to a room at rank 0."""

    ADMIT = "admit"
    LAST_CHUNK = "last chunk"
    RECEIVED = "received"
    DROP = "drop"
    UNPAIRED = "unpaired"


class Ask(Enum):
    """What a transition asks of the scheduler."""

    WRITE_DONE = "write done"
    WRITE_DROP = "write drop"


_W, _P, _F, _E = RoomState.WAITING, RoomState.PREFILLING, RoomState.PREFILLED, RoomState.ENDING
ROOM_TABLE: Table[RoomState, RoomEvent, Ask] = Table(
    "room at rank 0",
    {
        (_W, RoomEvent.ADMIT): (_P, ()),
        (_W, RoomEvent.DROP): (RoomState.GONE, ()),
        (_W, RoomEvent.UNPAIRED): (RoomState.GONE, ()),
        (_P, RoomEvent.LAST_CHUNK): (_F, ()),
        (_P, RoomEvent.DROP): (_E, (Ask.WRITE_DROP,)),
        (_P, RoomEvent.UNPAIRED): (_E, (Ask.WRITE_DROP,)),
        (_F, RoomEvent.RECEIVED): (_E, (Ask.WRITE_DONE,)),
        (_F, RoomEvent.DROP): (_E, (Ask.WRITE_DROP,)),
        (_F, RoomEvent.UNPAIRED): (_E, (Ask.WRITE_DROP,)),
        (_E, RoomEvent.DROP): (_E, ()),
        (_E, RoomEvent.UNPAIRED): (_E, ()),
    },
)


@dataclass(slots=True)
class HeadRoom:
    """One room that rank 0 knows."""

    room: RoomId
    key: PairingKey
    prompt_len: int
    cached_len: int
    sampling: Sampling
    output_index: int
    trace: str = ""
    state: RoomState = RoomState.WAITING
    pages: tuple[PageId, ...] = ()
    scheduled_len: int = 0
