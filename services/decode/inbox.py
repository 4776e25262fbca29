"""The queue of one thread: records in the order posted, by whoever posts them. Called by `threads.py` and whoever has to post.

It is all that two threads share: what one did before it posted, the other sees when it takes. Knows what no record means.
"""

import threading
from collections import deque
from collections.abc import Callable
from time import monotonic
from typing import Generic, TypeVar

Record = TypeVar("Record")


class Inbox(Generic[Record]):
    """Records that wait for one thread, and how long that has not moved."""

    def __init__(self) -> None:
        self._records: deque[Record] = deque()
        self._wake = threading.Condition()
        self._stopping = False
        self._idle = True
        self._moved_at = monotonic()

    def post(self, record: Record) -> None:
        """Queues a record."""
        with self._wake:
            if self._idle and not self._records:  # the time it rested is no time without progress
                self._moved_at = monotonic()
            self._records.append(record)
            self._wake.notify()

    def serve(self, take: Callable[[Record], None], turn: Callable[[], bool] = lambda: False) -> None:
        """Runs the thread until it is stopped.

        Args:
            take: called with each record, in order.
            turn: called when none is left; whether the thread has work of its own, so that it need not wait for a record.
        """
        busy = False
        while self._wait(busy):
            while (record := self._next()) is not None:
                take(record)
            busy = not self._stopping and turn()

    def stop(self) -> None:
        """Lets the thread end after what it is doing; what is still queued is left."""
        with self._wake:
            self._stopping = True
            self._wake.notify()

    def moved(self) -> None:
        """The thread made progress inside of a record or a turn."""
        self._moved_at = monotonic()

    def age_seconds(self) -> float | None:
        """Time since the thread last moved; None when it owes nothing."""
        return None if self._idle and not self._records else monotonic() - self._moved_at

    def _wait(self, busy: bool) -> bool:
        """Waits until there is something to do; False when stopping."""
        with self._wake:
            self._idle = not (busy or self._records)
            while not (busy or self._records or self._stopping):
                self._wake.wait()
            self._idle = False
            self._moved_at = monotonic()
            return not self._stopping

    def _next(self) -> Record | None:
        with self._wake:
            self._moved_at = monotonic()
            return self._records.popleft() if self._records and not self._stopping else None
