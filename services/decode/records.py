"""What the event loop, the copier and the decode worker tell each other.

Records only. The loop posts OpenRoom, CloseRoom and FrameArrived to the copier; the copier hands rooms to the worker; the
worker lets them go; both report to the loop. See docs/protocol.md, "Fencing".
"""

from collections.abc import Callable
from dataclasses import dataclass

from kvmesh.errors import KvmeshError
from kvmesh.kv.layout import WireName
from kvmesh.model.sampling import SamplingParams
from kvmesh.protocol.coverage import ShardSpan
from kvmesh.protocol.ids import PageId, PairingNumber, Rank, RoomId
from kvmesh.v1.types_pb2 import FINISH_REASON_LENGTH, FINISH_REASON_STOP, FINISH_REASON_UNSPECIFIED, FinishReason


@dataclass(frozen=True, slots=True)
class OpenRoom:
    """A room holds pages: its KV may be written."""

    room: RoomId
    pairing: PairingNumber
    shards: dict[Rank, tuple[ShardSpan, ...]]
    pages: tuple[PageId, ...]
    prompt_len: int
    cached_len: int
    output_index: int
    """Index in the request of the first token."""
    max_output_len: int
    """Tokens of the whole request."""
    sampling: SamplingParams
    stop_ids: frozenset[int]

    def ending(self, token: int, output_len: int) -> FinishReason.ValueType:
        """Why the room ends with this token as its next after `output_len` of the request; unspecified when it goes on."""
        if token in self.stop_ids:
            return FINISH_REASON_STOP
        return FINISH_REASON_LENGTH if output_len + 1 >= self.max_output_len else FINISH_REASON_UNSPECIFIED


@dataclass(frozen=True, slots=True)
class CloseRoom:
    """A room is over: nothing is written or decoded for it from here on."""

    room: RoomId


@dataclass(frozen=True, slots=True)
class FrameArrived:
    """A message of a link, unopened."""

    pairing: PairingNumber
    rank: Rank
    message: bytes | memoryview
    arrived: float
    """Monotonic time."""
    wire: WireName
    """In which format the stage said that it sends KV."""
    cell: int | None = None
    """Where in the link's segment it stands."""


@dataclass(frozen=True, slots=True)
class HandedOver:
    """From the copier: a room is complete and its first token reported; its pages are the worker's from here on."""

    opened: OpenRoom
    first_token: int


@dataclass(frozen=True, slots=True)
class LetGo:
    """From the worker, of a room that was handed over, once: no step touches its pages any more."""

    room: RoomId


@dataclass(frozen=True, slots=True)
class Received:
    """A frame was dealt with: that many payload bytes are no longer in flight, and its cell, if it stood in one, is free."""

    pairing: PairingNumber
    rank: Rank
    num_bytes: int
    cell: int | None = None


@dataclass(frozen=True, slots=True)
class FirstTokenArrived:
    """The last rank drew a room's first token."""

    room: RoomId
    arrived: float
    queued_seconds: float


@dataclass(frozen=True, slots=True)
class RoomComplete:
    """Every shard and the first token of a room are here; it decodes."""

    room: RoomId
    complete_at: float
    """When the last of it arrived, however busy the threads were then."""
    written_at: float
    """When all of it was verified and written, both on the monotonic clock."""


@dataclass(frozen=True, slots=True)
class TokenDrawn:
    """The next token of a room; with a finish reason it is the last."""

    room: RoomId
    token: int
    finish_reason: FinishReason.ValueType
    drawn_at: float
    """Monotonic time."""


@dataclass(frozen=True, slots=True)
class RoomBroken:
    """What arrived for a room can't be used: its attempt fails."""

    room: RoomId
    error: KvmeshError


@dataclass(frozen=True, slots=True)
class LinkBroken:
    """A link carries what it must not."""

    pairing: PairingNumber
    error: KvmeshError


@dataclass(frozen=True, slots=True)
class ThreadFailed:
    """A thread failed: the process must end."""

    error: BaseException


Report = Received | FirstTokenArrived | RoomComplete | TokenDrawn | RoomBroken | LinkBroken | ThreadFailed
Receive = Callable[[Report], None]
"""Called in a thread with each of its reports; hands it to the event loop."""
