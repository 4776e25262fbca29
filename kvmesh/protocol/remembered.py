"""Rooms that ended, remembered so that a second use is refused. Kept by rank 0 and by a decoder, each for its own rooms."""

from dataclasses import dataclass, field

from kvmesh.protocol.ids import RoomId

REMEMBERED_ROOMS = 1 << 16
"""Ids are minted once, so this only has to outlive what the network may still bring."""


@dataclass(slots=True)
class Remembered:
    """The latest rooms that ended."""

    _rooms: dict[RoomId, None] = field(default_factory=dict)

    def __contains__(self, room: RoomId) -> bool:
        return room in self._rooms

    def add(self, room: RoomId) -> None:
        """A room ended; the oldest remembered one may be forgotten for it."""
        self._rooms[room] = None
        if len(self._rooms) > REMEMBERED_ROOMS:
            del self._rooms[next(iter(self._rooms))]
