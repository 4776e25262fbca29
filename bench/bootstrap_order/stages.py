"""What each stage of the field's pipelines knows by itself: which rooms it was told of, which failed, which timed out.

A room's view on one stage is a function of time: messages arrive when the network says, and the stage's own timer starts when
the request reached it. Called by the agreements; decides nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from bench.bootstrap_order.traffic import Network, Request
from kvmesh.protocol.ids import RoomId

NEVER = float("inf")


class View(Enum):
    """A room as one stage sees it."""

    BOOTSTRAPPING = "bootstrapping"
    READY = "ready"
    FAILED = "failed"


@dataclass(slots=True)
class StageViews:
    """The bootstrap queue of one stage, in order of arrival, and what it heard."""

    timeout_seconds: float
    heard: dict[tuple[RoomId, str], float]
    """When each message of a decoder arrives here; seconds."""
    _failed_at: dict[RoomId, float] = field(default_factory=dict)

    @property
    def queue(self) -> Sequence[RoomId]:
        """Rooms whose request is here and that are not decided."""
        return list(self._failed_at)

    def holds(self, room: RoomId) -> bool:
        """Whether a room is in the queue."""
        return room in self._failed_at

    def request_arrived(self, room: RoomId, now: float) -> None:
        """The request itself is here: it queues, and its timer starts."""
        timed_out = now + self.timeout_seconds
        is_heard_in_time = self.heard.get((room, "ready"), NEVER) <= timed_out
        aborted = self.heard.get((room, "abort"), NEVER)
        self._failed_at[room] = aborted if is_heard_in_time else min(aborted, timed_out)

    def view(self, room: RoomId, now: float) -> View:
        """Of a queued room, at a time not before its request's arrival."""
        if self._failed_at[room] <= now:
            return View.FAILED
        return View.READY if self.heard.get((room, "ready"), NEVER) <= now else View.BOOTSTRAPPING

    def decided(self, room: RoomId) -> None:
        """The room leaves the queue."""
        del self._failed_at[room]


def stages_of(network: Network, requests: Sequence[Request], pp: int, *, highest_first: bool) -> list[StageViews]:
    """One for every rank. Decoders tell the ranks one after the other, rank 0 or the highest rank first."""
    gap, timeout = network.conditions.tell_gap_seconds, network.conditions.timeout_seconds
    places = [pp - 1 - rank if highest_first else rank for rank in range(pp)]
    return [StageViews(timeout, network.arrivals(rank, requests, place * gap)) for rank, place in enumerate(places)]
