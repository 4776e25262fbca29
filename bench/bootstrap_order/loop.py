"""The field's pipeline: every stage turns its loop in lock step with its neighbours, one micro-batch an iteration.

Iteration k of a stage begins when its iteration k-1 is over and the message of iteration k came from the rank before; rank 0
instead waits until iteration k-N came round from the last rank, as N micro-batches are in flight. Times follow from that alone.
"""

from collections import deque
from collections.abc import Sequence

from bench.bootstrap_order.agreements import Agreement
from bench.bootstrap_order.outcome import Decision, Outcome
from bench.bootstrap_order.stages import StageViews
from bench.bootstrap_order.traffic import Network, Request
from kvmesh.protocol.ids import RoomId


class Loop:
    """One pipeline under one agreement. After a divergence it goes on as if restarted: counts are rates."""

    def __init__(
        self, network: Network, requests: Sequence[Request], stages: Sequence[StageViews], agreement: Agreement
    ) -> None:
        self.outcome = Outcome()
        self._conditions = network.conditions
        self._agreement = agreement
        self._stages = stages
        self._arriving = deque(requests)
        self._lengths = {r.room: r.prompt_len for r in requests}
        self._waiting: deque[RoomId] = deque()
        """Admitted by rank 0, first come first served; `_left` says how many tokens are to compute."""
        self._left: dict[RoomId, int] = {}
        pp = len(stages)
        self._hops = [network.hops(f"stage {rank} to {(rank + 1) % pp}") for rank in range(pp)]
        self._free = [0.0] * pp
        self._came_round = deque([0.0] * pp)
        self._round_mask = (1 << pp) - 1
        self._working = 0
        """One bit for each micro-batch in flight: whether it has work."""

    def run(self) -> Outcome:
        """Until every request is decided and computed."""
        while self._arriving or self._waiting or any(stage.queue for stage in self._stages):
            self._iterate()
        return self.outcome

    def _iterate(self) -> None:
        came = self._came_round.popleft()
        arrived: list[RoomId] = []
        cost = 0.0
        decided: list[dict[RoomId, Decision]] = []
        for rank, stage in enumerate(self._stages):
            now = max(self._free[rank], came)
            if rank == 0:
                arrived = self._arrived(now)
            for room in arrived:
                stage.request_arrived(room, now)
            decided.append(self._agreement.decide(rank, now))
            if rank == 0:
                cost = self._begin_step(now, decided[0])
            self._free[rank] = now + cost
            came = self._hops[rank].arrival(self._free[rank])
        self._came_round.append(came)
        self.outcome.compare(decided)

    def _arrived(self, now: float) -> list[RoomId]:
        rooms = []
        while self._arriving and self._arriving[0].arrived <= now:
            rooms.append(self._arriving.popleft().room)
        return rooms

    def _begin_step(self, now: float, decisions: dict[RoomId, Decision]) -> float:
        """Rank 0 takes its admitted rooms in and fills the micro-batch. Returns its cost in seconds."""
        for room, decision in decisions.items():
            if decision is Decision.ADMITTED:
                self._waiting.append(room)
                self._left[room] = self._lengths[room]
        budget = self._conditions.step_tokens
        rooms = []
        while self._waiting and budget:
            room = self._waiting[0]
            taken = min(budget, self._left[room])
            rooms.append(room)
            budget -= taken
            self._left[room] -= taken
            if not self._left[room]:
                self._waiting.popleft()
        self._working = (self._working << 1 | bool(rooms)) & self._round_mask
        if self._working:  # else the whole ring is empty: it polls, which is no step
            self.outcome.step_began(now, rooms)
        return self._conditions.step_cost(self._conditions.step_tokens - budget)
