"""The log: numbered, immutable steps that rank 0 writes and every stage applies, exactly once and in order.

`AppliedLog` is what a stage knows: its rooms, their pages and a digest. Whatever a stage could decide with is not here.
Called by the stage's worker, on every rank.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import blake2b

from kvmesh.errors import Fault
from kvmesh.protocol.ids import Incarnation, PageId, PairingNumber, RoomId, StepNumber

DIGEST_BYTES = 8


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the last rank draws the first token; the log carries it and does not look inside."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0


@dataclass(frozen=True, slots=True)
class RoomAdmitted:
    """A room begins: everything a stage must know of it. KV of [cached_len, prompt_len) is sent over `pairing`."""

    room: RoomId
    pairing: PairingNumber
    decoder: Incarnation
    prompt_len: int
    cached_len: int
    pages: tuple[PageId, ...]
    sampling: Sampling = Sampling()
    output_index: int = 0
    trace: str = ""
    """The room's W3C traceparent: carried for the eyes, like the sampling not part of the digest."""


@dataclass(frozen=True, slots=True)
class RoomDone:
    """A room ends: its KV was received."""

    room: RoomId


@dataclass(frozen=True, slots=True)
class RoomDropped:
    """A room ends: cancelled, failed, or its pairing is over."""

    room: RoomId


Entry = RoomAdmitted | RoomDone | RoomDropped


@dataclass(frozen=True, slots=True)
class Work:
    """Tokens [begin, end) of one room."""

    room: RoomId
    begin: int
    end: int
    queued_seconds: float = 0.0
    """With the last tokens of a room, from rank 0 on: its wait there. Carried for the eyes, no part of the digest."""


@dataclass(frozen=True, slots=True)
class Step:
    """One step: entries, applied in order, then the micro-batch."""

    number: StepNumber
    entries: tuple[Entry, ...] = ()
    work: tuple[Work, ...] = ()

    @property
    def num_tokens(self) -> int:
        """Rows of the micro-batch."""
        return sum(w.end - w.begin for w in self.work)

    def canonical(self) -> bytes:
        """The bytes the digest is taken of: every decision, but not the payload that the log only carries."""
        entries = [
            (e.room, e.pairing, e.decoder, e.prompt_len, e.cached_len, e.pages, e.output_index)
            if isinstance(e, RoomAdmitted)
            else (type(e).__name__, e.room)
            for e in self.entries
        ]
        return repr((self.number, entries, [(w.room, w.begin, w.end) for w in self.work])).encode()


@dataclass(slots=True)
class RoomOnStage:
    """A room as a stage holds it."""

    admitted: RoomAdmitted
    computed_len: int = 0

    @property
    def pages(self) -> tuple[PageId, ...]:
        """Page ids, in token order."""
        return self.admitted.pages


@dataclass(slots=True)
class AppliedLog:
    """What one stage has applied in one generation."""

    num_pages: int
    page_size: int
    next_number: StepNumber = StepNumber(0)
    digest: bytes = bytes(DIGEST_BYTES)
    _rooms: dict[RoomId, RoomOnStage] = field(default_factory=dict)
    _holder: dict[PageId, RoomId] = field(default_factory=dict)

    @property
    def rooms(self) -> Mapping[RoomId, RoomOnStage]:
        """Rooms between their admission and their terminal entry."""
        return self._rooms

    @property
    def free_pages(self) -> int:
        """Pages that no room holds."""
        return self.num_pages - len(self._holder)

    def apply(self, step: Step) -> None:
        """Applies the next step.

        Raises:
            Fault: the number is not the next, a room is unknown or known twice, a page is held or outside the pool, or the
                work does not continue where its room stands. The generation is over then.
        """
        if step.number != self.next_number:
            raise Fault(f"step {step.number} came where step {self.next_number} is next")
        for entry in step.entries:
            if isinstance(entry, RoomAdmitted):
                self._admit(entry)
            else:
                self._end(entry.room)
        for work in step.work:
            self._advance(work)
        self.digest = blake2b(self.digest + step.canonical(), digest_size=DIGEST_BYTES).digest()
        self.next_number = StepNumber(step.number + 1)

    def _admit(self, entry: RoomAdmitted) -> None:
        if entry.room in self._rooms:
            raise Fault(f"room {entry.room} was admitted twice")
        if not 0 <= entry.cached_len < entry.prompt_len:
            raise Fault(f"room {entry.room}: cached_len {entry.cached_len} is outside [0, {entry.prompt_len})")
        if len(entry.pages) * self.page_size < entry.prompt_len:
            raise Fault(f"room {entry.room}: {len(entry.pages)} pages do not hold {entry.prompt_len} tokens")
        for page in entry.pages:
            if not 0 <= page < self.num_pages:
                raise Fault(f"room {entry.room}: page {page} is outside a pool of {self.num_pages}")
            if page in self._holder:
                raise Fault(f"room {entry.room}: page {page} is held by room {self._holder[page]}")
            self._holder[page] = entry.room
        self._rooms[entry.room] = RoomOnStage(entry)

    def _end(self, room: RoomId) -> None:
        held = self._rooms.pop(room, None)
        if held is None:
            raise Fault(f"room {room} ended and is unknown")
        for page in held.pages:
            del self._holder[page]

    def _advance(self, work: Work) -> None:
        room = self._rooms.get(work.room)
        if room is None:
            raise Fault(f"work for room {work.room}, which is unknown")
        if not room.computed_len == work.begin < work.end <= room.admitted.prompt_len:
            raise Fault(
                f"room {work.room}: work [{work.begin}, {work.end}) does not continue at {room.computed_len} "
                f"of {room.admitted.prompt_len}"
            )
        room.computed_len = work.end
