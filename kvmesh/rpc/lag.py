"""How late an event loop is. Told by the loop with each beat, read from any thread: also while the loop stands still.

Called by the health of a process, which beats four times in the watchdog's time.
"""

from collections.abc import Callable
from math import inf
from time import monotonic

from kvmesh.telemetry import metrics


class LoopLag:
    """The lateness of the last beat, or of the one that is due."""

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._due = inf
        self._last = 0.0

    def expect(self, seconds: float) -> None:
        """The next beat is due in that many seconds."""
        self._due = self._clock() + seconds

    @property
    def left(self) -> float:
        """Seconds until the next beat is due; 0 when it should have come."""
        return max(0.0, self._due - self._clock())

    def beat(self) -> None:
        """The beat that was due came."""
        self._last = max(0.0, self._clock() - self._due)
        metrics.LOOP_LATE_SECONDS_TOTAL.inc(self._last)

    def stop(self) -> None:
        """No further beat is due."""
        self._due, self._last = inf, 0.0

    @property
    def seconds(self) -> float:
        """How late the last beat was; a beat that is still due counts once it is later than that."""
        return max(self._last, self._clock() - self._due)
