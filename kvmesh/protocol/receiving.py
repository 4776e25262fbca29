"""The decoder's side of the plan, at the write: which frame may be written, into whose pages, and when a room is complete.

A room's pages belong to the copier, which writes them, until the room is complete; then to the decode worker, until it lets
the room go. A room whose pages the worker still holds for an earlier one has no grant: what arrives for it is put aside.
Called by the decoder's copier and by the simulator's, with everything in one order. Touches no page itself.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Generic, TypeVar

from kvmesh.errors import Corrupt
from kvmesh.protocol.coverage import Arrival, Coverage, ShardSpan
from kvmesh.protocol.ids import PageId, PairingNumber, Rank, RoomId

Item = TypeVar("Item")
"""What the caller takes for one arrival."""


class Outcome(Enum):
    """What became of a frame or a first token."""

    WRITTEN = "written"
    REPEATED = "repeated"
    LATE = "late"
    """Its room is not open here."""
    FOREIGN = "foreign"
    """Its room belongs to another pairing than the link it came on."""


@dataclass(slots=True)
class OpenedRoom(Generic[Item]):
    """A room whose KV may be written once it has its grant."""

    pairing: PairingNumber
    pages: tuple[PageId, ...]
    coverage: Coverage
    awaited: set[RoomId]
    """Closed rooms that the worker has not let go of, and whose pages these are; none: the room has its grant."""
    last_rank: Rank
    """Which draws the first token."""
    put_aside: list[Item] = field(default_factory=list)
    """What came before the grant, in order."""
    first_token: int | None = None
    handed_over: bool = False
    """The worker's: complete, nothing more is written."""

    @property
    def complete(self) -> bool:
        """Every shard and the first token are here."""
        return self.first_token is not None and self.coverage.complete


class Receiving(Generic[Item]):
    """The rooms open at one decoder's copier, and those whose pages the worker still holds."""

    def __init__(self) -> None:
        self._rooms: dict[RoomId, OpenedRoom[Item]] = {}
        self._held: dict[RoomId, tuple[PageId, ...]] = {}

    @property
    def rooms(self) -> Mapping[RoomId, OpenedRoom[Item]]:
        """Those that are open."""
        return self._rooms

    @property
    def held(self) -> Mapping[RoomId, tuple[PageId, ...]]:
        """Rooms that were closed while they were the worker's, until it lets them go: their pages, which it may write."""
        return self._held

    def open(
        self,
        room: RoomId,
        pairing: PairingNumber,
        shards: Mapping[Rank, Sequence[ShardSpan]],
        pages: tuple[PageId, ...],
        *,
        begin: int,
        end: int,
    ) -> OpenedRoom[Item]:
        """A room holds pages; KV of tokens [begin, end) is planned."""
        awaited = {other for other, held in self._held.items() if not set(held).isdisjoint(pages)}
        opened = self._rooms[room] = OpenedRoom[Item](
            pairing, pages, Coverage(shards, begin, end), awaited, max(shards)
        )
        return opened

    def put_aside(self, room: RoomId, pairing: PairingNumber, link: tuple[PairingNumber, Rank], item: Item) -> bool:
        """Keeps what arrived for a room without a grant, until it is due. False: it is due now.

        Args:
            pairing, link: as for `frame`; what is foreign to the room does not wait for it.
        """
        opened, _ = self._fenced(room, pairing, link[0])
        if opened is None or not opened.awaited:
            return False
        opened.put_aside.append(item)
        return True

    def close(self, room: RoomId) -> list[Item]:
        """The room is over: nothing is written for it from here on. Unknown: nothing. `held` now: the worker must be told.

        Returns:
            What was put aside for it and is due, in order; all of it late.
        """
        opened = self._rooms.pop(room, None)
        if opened is None:
            return []
        if opened.handed_over:
            self._held[room] = opened.pages
        return opened.put_aside

    def hand_over(self, opened: OpenedRoom[Item]) -> bool:
        """Whether a room is complete only now: from here on it is the worker's, to whom the caller hands it."""
        if opened.handed_over or not opened.complete:
            return False
        opened.handed_over = True
        return True

    def let_go(self, room: RoomId) -> list[Item]:
        """The worker is done with a room: no step that reads or writes its pages is under way, and none will be.

        Returns:
            What was put aside and is due, in order: rooms that waited for nothing else have their grant.
        """
        self._rooms.pop(room, None)
        self._held.pop(room, None)
        due: list[Item] = []
        for opened in self._rooms.values():
            if room in opened.awaited:
                opened.awaited.remove(room)
                if not opened.awaited:
                    due += opened.put_aside
                    opened.put_aside = []
        return due

    def frame(
        self,
        room: RoomId,
        pairing: PairingNumber,
        link: tuple[PairingNumber, Rank],
        piece: ShardSpan,
        begin: int,
        end: int,
    ) -> Outcome:
        """A KV frame of tokens [begin, end) that is due. WRITTEN: the caller writes it, now, into the room's pages.

        Args:
            pairing: as the frame says.
            link: the pairing and rank of the link it came on.

        Raises:
            Corrupt: it lies outside the plan, or repeats in part: the room's attempt fails.
        """
        opened, refused = self._fenced(room, pairing, link[0])
        if opened is None:
            return refused
        if opened.handed_over:  # complete: nothing that still comes can add to it
            return Outcome.REPEATED
        arrival = opened.coverage.offer(link[1], piece, begin, end)
        return Outcome.REPEATED if arrival is Arrival.REPEAT else Outcome.WRITTEN

    def first_token(
        self, room: RoomId, pairing: PairingNumber, link: tuple[PairingNumber, Rank], token: int, vocab_size: int
    ) -> Outcome:
        """The last rank drew a room's first token; it is due.

        Raises:
            Corrupt: it is no token of the vocabulary, or from another rank.
        """
        opened, refused = self._fenced(room, pairing, link[0])
        if opened is None:
            return refused
        if link[1] != opened.last_rank:
            raise Corrupt(f"rank {link[1]} sent a first token, rank {opened.last_rank} draws it", reason="outside_plan")
        if opened.first_token is not None:
            return Outcome.REPEATED
        if not 0 <= token < vocab_size:
            raise Corrupt("the first token is no token of the vocabulary", reason="bad_token")
        opened.first_token = token
        return Outcome.WRITTEN

    def _fenced(
        self, room: RoomId, pairing: PairingNumber, link: PairingNumber
    ) -> tuple[OpenedRoom[Item] | None, Outcome]:
        opened = self._rooms.get(room)
        if opened is None:
            return None, Outcome.LATE
        if not opened.pairing == link == pairing:
            return None, Outcome.FOREIGN
        return opened, Outcome.WRITTEN
