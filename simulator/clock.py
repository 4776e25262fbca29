"""Virtual time: a heap of what is due. Used by every world that runs at random; knows nothing of the mesh.

Two events of the same time run in the order they were set, so a run is a function of its seed.
"""

import heapq
from collections.abc import Callable
from itertools import count


class Clock:
    """Seconds since the world began."""

    def __init__(self) -> None:
        self.now = 0.0
        self.num_events = 0
        """Events that ran."""
        self._due: list[tuple[float, int, Callable[[], object]]] = []
        self._order = count()

    def after(self, seconds: float, event: Callable[[], object]) -> None:
        """Runs `event` in so many seconds; not earlier than now."""
        self.at(self.now + seconds, event)

    def at(self, time: float, event: Callable[[], object]) -> None:
        """Runs `event` at a time; one in the past runs next."""
        heapq.heappush(self._due, (max(time, self.now), next(self._order), event))

    def run(self, until: float = float("inf")) -> None:
        """Runs what is due up to a time, which it is then."""
        while self._due and self._due[0][0] <= until:
            self.now, _, event = heapq.heappop(self._due)
            self.num_events += 1
            event()
        if until != float("inf"):
            self.now = max(self.now, until)
