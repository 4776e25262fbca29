"""How the field's stages agree on which rooms begin: by looking each one up, or by two passes round the ring of stages.

Both are asked once per stage and iteration, ranks in order, and answer what that stage did with which rooms then. Told of
public systems' behaviour, written anew: see docs/bootstrap-order.md for what was read.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from bench.bootstrap_order.outcome import Decision
from bench.bootstrap_order.stages import StageViews, View
from kvmesh.protocol.ids import RoomId


class Agreement(Protocol):
    """Decides on every stage, each in its own time."""

    def decide(self, rank: int, now: float) -> dict[RoomId, Decision]:
        """What a stage does at the beginning of an iteration; ranks of one iteration are asked in order."""
        ...


@dataclass(slots=True)
class LookUp:
    """Rank 0 takes what it sees, ready or failed; the names travel with the micro-batch; each stage looks them up."""

    stages: Sequence[StageViews]
    _asked: list[RoomId] = field(default_factory=list)

    def decide(self, rank: int, now: float) -> dict[RoomId, Decision]:
        """Rank 0 asks about what it sees; every stage answers from its own view."""
        stage = self.stages[rank]
        if rank == 0:
            self._asked = [room for room in stage.queue if stage.view(room, now) is not View.BOOTSTRAPPING]
        return {room: _look_up(stage, room, now) for room in self._asked}


def _look_up(stage: StageViews, room: RoomId, now: float) -> Decision:
    view = stage.view(room, now)
    stage.decided(room)
    return {
        View.READY: Decision.ADMITTED,
        View.FAILED: Decision.DROPPED,
        View.BOOTSTRAPPING: Decision.ASSERTED,
    }[view]


@dataclass(slots=True)
class Ballot:
    """Collected by the first pass, rank by rank: ready everywhere so far, failed anywhere so far."""

    good: dict[RoomId, None] = field(default_factory=dict)
    bad: dict[RoomId, None] = field(default_factory=dict)


@dataclass(slots=True)
class Ring:
    """The first pass intersects what is ready, the second spreads the result; each hop rides on an iteration.

    The last rank hands the ballot of iteration k to rank 0, which gets it before iteration k + N: all stages apply it there.
    With a second look, a stage that applies it drops what it sees failed by then, as first released.
    """

    stages: Sequence[StageViews]
    second_look: bool = False
    _ballot: Ballot = field(default_factory=Ballot)
    _came_round: Ballot = field(default_factory=Ballot)
    _on_the_way: deque[Ballot] = field(init=False)

    def __post_init__(self) -> None:
        self._on_the_way = deque(Ballot() for _ in self.stages)

    def decide(self, rank: int, now: float) -> dict[RoomId, Decision]:
        """Applies the ballot that came round, then adds this stage's votes to the new one."""
        if rank == 0:
            self._came_round = self._on_the_way.popleft()
        decisions = self._apply(rank, now)
        self._vote(rank, now)
        if rank == len(self.stages) - 1:
            self._on_the_way.append(self._ballot)
        return decisions

    def _vote(self, rank: int, now: float) -> None:
        stage = self.stages[rank]
        views = {room: stage.view(room, now) for room in stage.queue}
        ready = {room: None for room, view in views.items() if view is View.READY}
        before = Ballot(ready) if rank == 0 else self._ballot
        failed = {room: None for room, view in views.items() if view is View.FAILED}
        self._ballot = Ballot({room: None for room in before.good if room in ready}, before.bad | failed)

    def _apply(self, rank: int, now: float) -> dict[RoomId, Decision]:
        """A room that is no longer queued was decided by an earlier ballot, on this stage as on all."""
        stage, ballot = self.stages[rank], self._came_round
        decisions: dict[RoomId, Decision] = {}
        for room in [room for room in (ballot.good | ballot.bad) if stage.holds(room)]:
            view = stage.view(room, now)
            is_good = view is View.READY if self.second_look else room in ballot.good
            decisions[room] = Decision.ADMITTED if is_good else Decision.DROPPED
            stage.decided(room)
        return decisions
