"""The decoder's side of the plan, at the write: which frame may be written, and when a room is complete.

Rooms open and close and frames come in one order; a frame is fenced by its room and its link's own pairing. Called by the
decoder's worker, which writes the pages, and by the simulator. Touches no page itself.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from kvmesh.errors import Corrupt
from kvmesh.protocol.coverage import Arrival, Coverage, ShardSpan
from kvmesh.protocol.ids import PageId, PairingNumber, Rank, RoomId


class Outcome(Enum):
    """What became of a frame or a first token."""

    WRITTEN = "written"
    REPEATED = "repeated"
    LATE = "late"
    """Its room is not open here."""
    FOREIGN = "foreign"
    """Its room belongs to another pairing than the link it came on."""


@dataclass(slots=True)
class OpenedRoom:
    """A room whose KV may be written."""

    room: RoomId
    pairing: PairingNumber
    pages: tuple[PageId, ...]
    coverage: Coverage
    first_token: int | None = None
    joined: bool = False
    """In the decode batch: complete, nothing more is written."""

    @property
    def complete(self) -> bool:
        """Every shard and the first token are here."""
        return self.first_token is not None and self.coverage.complete


class Receiving:
    """The rooms open at one decoder's worker."""

    def __init__(self) -> None:
        self._rooms: dict[RoomId, OpenedRoom] = {}

    @property
    def rooms(self) -> Mapping[RoomId, OpenedRoom]:
        """Those that are open."""
        return self._rooms

    def open(
        self,
        room: RoomId,
        pairing: PairingNumber,
        shards: Mapping[Rank, Sequence[ShardSpan]],
        pages: tuple[PageId, ...],
        *,
        begin: int,
        end: int,
    ) -> OpenedRoom:
        """A room holds pages; KV of tokens [begin, end) is planned."""
        opened = self._rooms[room] = OpenedRoom(room, pairing, pages, Coverage(shards, begin, end))
        return opened

    def close(self, room: RoomId) -> None:
        """The room is over: nothing is written for it from here on. Unknown: nothing."""
        self._rooms.pop(room, None)

    def frame(
        self,
        room: RoomId,
        pairing: PairingNumber,
        link: tuple[PairingNumber, Rank],
        piece: ShardSpan,
        begin: int,
        end: int,
    ) -> Outcome:
        """A KV frame of tokens [begin, end). WRITTEN: the caller writes it, now, into the room's pages.

        Args:
            pairing: as the frame says.
            link: the pairing and rank of the link it came on.

        Raises:
            Corrupt: it lies outside the plan, or repeats in part: the room's attempt fails.
        """
        opened, refused = self._fenced(room, pairing, link[0])
        if opened is None:
            return refused
        if opened.joined:  # complete: nothing that still comes can add to it
            return Outcome.REPEATED
        arrival = opened.coverage.offer(link[1], piece, begin, end)
        return Outcome.REPEATED if arrival is Arrival.REPEAT else Outcome.WRITTEN

    def first_token(
        self, room: RoomId, pairing: PairingNumber, link: tuple[PairingNumber, Rank], token: int, vocab_size: int
    ) -> Outcome:
        """The last rank drew a room's first token.

        Raises:
            Corrupt: it is no token of the vocabulary.
        """
        opened, refused = self._fenced(room, pairing, link[0])
        if opened is None:
            return refused
        if opened.first_token is not None:
            return Outcome.REPEATED
        if not 0 <= token < vocab_size:
            raise Corrupt("the first token is no token of the vocabulary", reason="bad_token")
        opened.first_token = token
        return Outcome.WRITTEN

    def _fenced(self, room: RoomId, pairing: PairingNumber, link: PairingNumber) -> tuple[OpenedRoom | None, Outcome]:
        opened = self._rooms.get(room)
        if opened is None:
            return None, Outcome.LATE
        if not opened.pairing == link == pairing:
            return None, Outcome.FOREIGN
        return opened, Outcome.WRITTEN
