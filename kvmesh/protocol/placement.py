"""Which pair a room goes to: the least loaded of those that stand. Called by the registry's core. Pure arithmetic.

A pair is a whole pipeline and a decoder that says it is paired with that generation. What was placed since the last heartbeat
counts as if the member had told it, so a burst does not pile up on one pair.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvmesh.errors import Full, InvalidInput
from kvmesh.protocol.ids import Generation, Incarnation
from kvmesh.protocol.leases import Lease
from kvmesh.protocol.members import Load
from kvmesh.protocol.pages import pages_for


@dataclass(frozen=True, slots=True)
class RoomRequest:
    """What a room is asked for."""

    model: str
    """Empty: the one served."""
    prompt_len: int
    """Tokens of prompt and output so far."""
    max_output_len: int
    """Tokens that may still be produced."""
    lost_generations: tuple[Generation, ...] = ()
    """With which this request had a room before, and lost it: others go first."""
    lost_decoders: tuple[Incarnation, ...] = ()
    """The same."""

    @property
    def total_len(self) -> int:
        """Tokens the decoder must hold."""
        return self.prompt_len + self.max_output_len


@dataclass(frozen=True, slots=True)
class Pair:
    """A whole pipeline, by rank 0, and a decoder that stands paired with it."""

    pipeline: str
    generation: Generation
    head: Lease
    decoder: Lease

    def most_tokens(self) -> tuple[int, int]:
        """The longest prompt, and the longest prompt plus output, that it could hold when idle."""
        head, decoder = self.head.member.descriptor, self.decoder.member.descriptor
        most = min(head.max_tokens, decoder.max_tokens, decoder.pool_tokens)
        return min(head.pool_tokens, most - 1), most

    def is_full(self, max_waiting_rooms: int) -> bool:
        """Whether a queue of it is at the limit."""
        return max(self.head.expected.waiting_rooms, self.decoder.expected.waiting_rooms) >= max_waiting_rooms

    def loads_with(self, room: RoomRequest) -> tuple[Load, Load]:
        """What rank 0 and the decoder would tell with one more room."""
        head = _with(self.head, room.prompt_len)
        decoder = _with(self.decoder, room.total_len)
        return replace(head, queued_tokens=head.queued_tokens + room.prompt_len), decoder

    def cost_of(self, room: RoomRequest) -> tuple[int, int, int, int, int]:
        """Smaller is better: what lost a room of this request, rooms that wait for pages, prompt tokens to compute, pages free
        at the decoder, at the head."""
        head, decoder = self.loads_with(room)
        lost = (self.generation in room.lost_generations) + (self._decoder_incarnation in room.lost_decoders)
        waiting = head.waiting_rooms + decoder.waiting_rooms
        return lost, waiting, head.queued_tokens, -decoder.free_pages, -head.free_pages

    @property
    def _decoder_incarnation(self) -> Incarnation:
        return self.decoder.member.member.incarnation

    def place(self, room: RoomRequest) -> None:
        """Counts a room until the next heartbeats tell of it."""
        self.head.expected, self.decoder.expected = self.loads_with(room)


def least_loaded(pairs: Sequence[Pair], room: RoomRequest, max_waiting_rooms: int, retry_after_seconds: float) -> Pair:
    """The pair for a room; of equal ones the first.

    Args:
        pairs: those that stand, at least one.
        retry_after_seconds: when the loads may have changed.

    Raises:
        InvalidInput: none could hold the room even when idle.
        Full: every pair that could has a queue at its limit.
    """
    able = [p for p in pairs if room.prompt_len <= p.most_tokens()[0] and room.total_len <= p.most_tokens()[1]]
    if not able:
        raise _too_long(pairs, room)
    open_pairs = [p for p in able if not p.is_full(max_waiting_rooms)]
    if not open_pairs:
        raise Full(
            f"{max_waiting_rooms} rooms wait at every pipeline or decoder", retry_after_seconds=retry_after_seconds
        )
    return min(open_pairs, key=lambda p: p.cost_of(room))


def _with(lease: Lease, tokens: int) -> Load:
    """A member's load with one more room of so many tokens: it runs where it fits, else it waits."""
    load = lease.expected
    pages = pages_for(tokens, lease.member.descriptor.page_size)
    if pages > load.free_pages:
        return replace(load, waiting_rooms=load.waiting_rooms + 1)
    return replace(load, running_rooms=load.running_rooms + 1, free_pages=load.free_pages - pages)


def _too_long(pairs: Sequence[Pair], room: RoomRequest) -> InvalidInput:
    prompt, total = max(p.most_tokens()[0] for p in pairs), max(p.most_tokens()[1] for p in pairs)
    if room.prompt_len > prompt:
        return InvalidInput(
            f"{room.prompt_len} prompt tokens; the limit is {prompt}", reason="too_long", field="prompt_len"
        )
    return InvalidInput(
        f"{room.prompt_len} prompt tokens and {room.max_output_len} of output; the limit of both is {total}",
        reason="too_long",
        field="max_output_len",
    )
