"""Virtual time for a world: seeded latencies, computing times and pauses. A run is a function of its plan.

Each edge draws from a source of its own, so that a plan with one request less changes little else.
"""

from collections.abc import Callable
from functools import partial
from random import Random

from simulator.clock import Clock
from simulator.latency import Latencies
from simulator.process import Process, Queue
from simulator.world import World

FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.05, 1.0


class TimedPace:
    """Things are due at times."""

    def __init__(self, seed: int, latencies: Latencies) -> None:
        self.clock = Clock()
        self.random = Random(f"{seed} pace")
        self._seed, self._latencies = seed, latencies
        self._edges: dict[tuple[str, str], Random] = {}
        self._waiting: list[Callable[[], None]] = []

    @property
    def now(self) -> float:
        """Seconds since the world began."""
        return self.clock.now

    @now.setter
    def now(self, _: float) -> None:
        raise AttributeError("time passes by itself")

    def queued(self, world: World, queue: Queue) -> None:
        """Arrives after what was put there before."""
        queue.due = max(queue.due, self.now + self._delay(world, queue))
        self.clock.at(queue.due, partial(self._take, world, queue))

    def _take(self, world: World, queue: Queue) -> None:
        if world.blocked(queue):
            self._waiting.append(partial(self._take, world, queue))
        else:
            world.take(queue)

    def _delay(self, world: World, queue: Queue) -> float:
        stream, owner = queue.stream, world.living.get(queue.owner)
        if owner is None:
            return 0.0  # nobody is there to take it
        if stream is not None:
            peer = world.living.get(stream.peer(queue.owner))
            edge = (peer.name if peer is not None else "nobody", owner.name)
            random = self._edges.get(edge)
            if random is None:
                random = self._edges[edge] = Random(f"{self._seed} {edge}")
            return self._latencies.draw(*edge, random)
        return owner.seconds_of(queue.kind, queue.items[-1]) * self.random.uniform(0.5, 1.5)

    def set_timer(self, process: Process, seconds: float, timer: str) -> None:
        """Fires once, if it is still set and the process alive and moving; else when it moves again."""
        token = process.timers[timer] = object()
        self.clock.after(seconds, partial(self._fire, process, timer, token))

    def _fire(self, process: Process, timer: str, token: object) -> None:
        if process.frozen:
            self._waiting.append(partial(self._fire, process, timer, token))
        elif process.timers.get(timer) is token:
            process.world.fire(process, timer)

    def released(self) -> None:
        """Something moves again, or a partition is healed: what waited is due, in its order."""
        waiting, self._waiting = self._waiting, []
        for event in waiting:
            self.clock.after(0.0, event)

    def pause(self) -> float:
        """Full jitter."""
        return self.random.uniform(FIRST_PAUSE_SECONDS / 4, LONGEST_PAUSE_SECONDS / 4)

    def loses(self) -> bool:
        """Half of the time."""
        return self.random.random() < 0.5
