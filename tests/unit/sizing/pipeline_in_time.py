"""Pipelines in virtual time: the real scheduler decides, and each stage takes its time for each step."""

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count

from kvmesh.protocol.ids import Incarnation, PairingKey, PairingNumber, RoomId
from kvmesh.protocol.scheduler import Limits, Scheduler
from kvmesh.protocol.steps import Step
from kvmesh.sizing.given import Given

_PAIRING: PairingKey = (Incarnation(1), PairingNumber(1))


@dataclass
class Load:
    """Requests at random, and what became of them."""

    given: Given
    rate: float
    num_pipelines: int
    heartbeat_seconds: float
    """How often the registry hears of the queues; in between it counts what it placed itself."""
    seed: int
    now: float = 0.0
    first_tokens: list[float] = field(default_factory=list)
    """Seconds from arrival to the end of the last stage, by request."""
    queued_seconds: float = 0.0
    """Mean of what a pipeline has accepted and not computed, at its full rate."""
    _events: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)
    _order: "count[int]" = field(default_factory=count)

    def run(self, num_requests: int) -> "Load":
        """Lives until all have their first token."""
        chance = random.Random(self.seed)
        self._pipelines = [_Pipeline(self, self.given) for _ in range(self.num_pipelines)]
        self._told = [0.0] * self.num_pipelines
        self._left = num_requests
        begins = 0.0
        for _ in range(num_requests):
            begins += chance.expovariate(self.rate)
            prompt_len = max(1, round(chance.choice(self.given.prompt.points)))
            self.at(begins, lambda n=prompt_len: self._arrive(n))
        self.at(0.0, self._beat)
        area = 0.0
        while len(self.first_tokens) < num_requests:
            then, _, event = heapq.heappop(self._events)
            area += (then - self.now) * sum(p.uncomputed for p in self._pipelines)
            self.now = then
            event()
        self.queued_seconds = area / self.now / self.num_pipelines / self.given.prefill_rate
        return self

    def at(self, time: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (time, next(self._order), event))

    def _beat(self) -> None:
        self._told = [float(p.scheduler.queued_tokens) for p in self._pipelines]
        self.at(self.now + self.heartbeat_seconds, self._beat)

    def _arrive(self, prompt_len: int) -> None:
        chosen = min(range(self.num_pipelines), key=lambda n: self._told[n])
        self._told[chosen] += prompt_len
        self._pipelines[chosen].admit(prompt_len)


class _Pipeline:
    """Rank 0's scheduler, and stages that are free again at a time each."""

    def __init__(self, load: Load, given: Given) -> None:
        self._load, self._given = load, given
        self.scheduler = Scheduler(
            Limits(
                num_pages=given.pipeline_pages,
                page_size=given.page_size,
                max_prompt_len=10**6,
                step_tokens=given.step_tokens,
                max_steps_in_flight=given.num_stages + 1,
                max_waiting_rooms=10**6,
            )
        )
        self.scheduler.pair(_PAIRING)
        self.uncomputed = 0
        self._rooms = count(1)
        self._arrived: dict[RoomId, tuple[float, int]] = {}
        self._free_at = [0.0] * given.num_stages

    def admit(self, prompt_len: int) -> None:
        room = RoomId(next(self._rooms))
        self._arrived[room] = self._load.now, prompt_len
        self.uncomputed += prompt_len
        self.scheduler.admit(_PAIRING, room, prompt_len=prompt_len, cached_len=0)
        self._pump()

    def _pump(self) -> None:
        while (step := self.scheduler.next_step()) is not None:
            self._launch(step)

    def _launch(self, step: Step) -> None:
        here = self._load.now
        for stage, free_at in enumerate(self._free_at):
            here = max(here, free_at) + step.num_tokens / self._given.prefill_rate
            self._free_at[stage] = here
            if stage == 0:
                self._load.at(here, lambda: self._applied_here(step))
        self._load.at(here, lambda: self._applied(step))

    def _applied_here(self, step: Step) -> None:
        self.scheduler.applied_here(step.number)
        self._pump()

    def _applied(self, step: Step) -> None:
        self.scheduler.applied(step.number)
        self.uncomputed -= step.num_tokens
        for work in step.work:
            arrived, prompt_len = self._arrived[work.room]
            if work.end == prompt_len:
                self._load.first_tokens.append(self._load.now - arrived)
                self.scheduler.received(_PAIRING, work.room)
        self._pump()
