"""Which pair a room goes to: the least loaded of those that stand. Called by the registry core. Pure arithmetic."""

from collections.abc import Iterable
from dataclasses import dataclass

from kvmesh.errors import Full
from kvmesh.protocol.ids import Generation, Incarnation


@dataclass(slots=True)
class Load:
    """What a member said with its last heartbeat, and what was placed on it since."""

    waiting_rooms: int = 0
    running_rooms: int = 0
    free_pages: int = 0
    queued_tokens: int = 0
    draining: bool = False
    paired_generations: tuple[Generation, ...] = ()
    placed_rooms: int = 0
    """Since that heartbeat."""
    placed_tokens: int = 0

    def place(self, tokens: int) -> None:
        """Counts a room until the next heartbeat tells."""
        self.placed_rooms += 1
        self.placed_tokens += tokens


@dataclass(frozen=True, slots=True)
class Pair:
    """A whole pipeline and a decoder that stands paired with it."""

    pipeline: str
    generation: Generation
    decoder: Incarnation
    head: Load
    """Of rank 0."""
    tail: Load
    """Of the decoder."""

    @property
    def cost(self) -> tuple[int, int, int, int]:
        """Smaller is better: rooms that wait, prompt tokens to compute, rooms that decode, pages in use."""
        waiting = self.head.waiting_rooms + self.tail.waiting_rooms
        tokens = self.head.queued_tokens + self.head.placed_tokens
        return waiting, tokens, self.tail.running_rooms + self.tail.placed_rooms, -self.tail.free_pages


def least_loaded(pairs: Iterable[Pair], max_waiting_rooms: int) -> Pair | None:
    """The pair for the next room; None when none stands. Equal ones: the first.

    Raises:
        Full: pairs stand, and every one's queue is at the limit.
    """
    standing = [p for p in pairs if not (p.head.draining or p.tail.draining)]
    open_ = [p for p in standing if max(p.head.waiting_rooms, p.tail.waiting_rooms) < max_waiting_rooms]
    if standing and not open_:
        raise Full(f"every queue holds {max_waiting_rooms} rooms", retry_after_seconds=1.0)
    return min(open_, key=lambda p: p.cost, default=None)
