"""What one run counts, and what it comes to over several seeds. Knows no protocol."""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from bench.bootstrap_order.traffic import Conditions, Request
from kvmesh.protocol.ids import RoomId


class Decision(Enum):
    """What one stage did with a room in one step."""

    ADMITTED = "admitted"
    DROPPED = "dropped"
    ASSERTED = "asserted"
    """Asked about a room that it had not heard of, neither ready nor failed."""


@dataclass(slots=True)
class Outcome:
    """Of one protocol in one run."""

    divergent: set[RoomId] = field(default_factory=set)
    """Rooms that one stage admitted or executed in a step and another stage did not have, or had dropped."""
    stopped: set[RoomId] = field(default_factory=set)
    """Rooms at which the pipeline as built stops: an assertion, or a stage that waits for another's room."""
    step_starts: list[float] = field(default_factory=list)
    """When rank 0 began each step, with or without work; seconds, rising."""
    room_starts: dict[RoomId, float] = field(default_factory=dict)
    """When rank 0 began the first step with work of a room; seconds."""

    def step_began(self, now: float, rooms: Sequence[RoomId]) -> None:
        """Rank 0 begins a step with work of these rooms."""
        self.step_starts.append(now)
        for room in rooms:
            self.room_starts.setdefault(room, now)

    def compare(self, decided: Sequence[Mapping[RoomId, Decision]]) -> None:
        """One step, as each rank took it: whatever one of them decided, all must have."""
        for room in {room for decisions in decided for room in decisions}:
            took = [decisions.get(room) for decisions in decided]
            asserted = Decision.ASSERTED in took
            diverged = 0 < took.count(Decision.ADMITTED) < len(took)
            if diverged:
                self.divergent.add(room)
            if diverged or asserted:
                self.stopped.add(room)


@dataclass(slots=True)
class Summary:
    """Of one protocol at one pipeline size, over all seeds."""

    requests: int = 0
    divergent: int = 0
    crashed_or_hung: int = 0
    rtts: list[float] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)

    def add(self, outcome: Outcome, requests: Sequence[Request], conditions: Conditions) -> None:
        """Takes one run in."""
        self.requests += len(requests)
        self.divergent += len(outcome.divergent)
        self.crashed_or_hung += len(outcome.stopped)
        for request in requests:
            began = outcome.room_starts.get(request.room)
            if began is None or request.reserved is None:
                continue
            self.rtts.append((began - request.reserved) / conditions.rtt_seconds)
            before = bisect_right(outcome.step_starts, request.reserved)
            self.steps.append(bisect_right(outcome.step_starts, began) - before)

    def report(self) -> dict[str, float]:
        """For JSON: counts are rooms; admission in mean round trips and in steps of rank 0."""
        return {
            "requests": self.requests,
            "divergent": self.divergent,
            "crashed_or_hung": self.crashed_or_hung,
            "admitted": len(self.rtts),
            "admission_rtts_p50": round(percentile(self.rtts, 0.50), 2),
            "admission_rtts_p99": round(percentile(self.rtts, 0.99), 2),
            "admission_steps_p50": percentile(self.steps, 0.50),
            "admission_steps_p99": percentile(self.steps, 0.99),
        }


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least this share of them does not exceed; 0 of none."""
    ordered = sorted(values)
    return ordered[max(0, -int(-share * len(ordered) // 1) - 1)] if ordered else 0.0
