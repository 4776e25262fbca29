"""A pace without time, for worlds that are searched: whatever is there may come next. See explore.py."""

from simulator.process import Process, Queue
from simulator.world import World


class AnyTime:
    """A pace without time: everything may come next, and nothing is late."""

    now = 0.0

    def queued(self, world: World, queue: Queue) -> None:
        """Nothing: the search looks at the queues."""

    def set_timer(self, process: Process, seconds: float, timer: str) -> None:
        """Nothing: the search looks at the timers."""

    def pause(self) -> float:
        """None."""
        return 0.0

    def loses(self) -> bool:
        """No: that the end of a stream overtakes what is on its way is an event of its own."""
        return False
