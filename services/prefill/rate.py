"""How fast a pipeline computes prompt tokens, as it has shown lately. Called by rank 0's head; pure arithmetic.

Time counts only while steps are in flight, so an idle pipeline keeps the rate it had.
"""

from collections import deque

from kvmesh.protocol.ids import StepNumber
from kvmesh.protocol.steps import Step

_KEPT = 0.9
"""Weight that an older step keeps with each newer one: the rate is that of the last ten steps or so."""


class PrefillRate:
    """Seconds a token, measured from step to step."""

    def __init__(self) -> None:
        self._in_flight: deque[tuple[StepNumber, int]] = deque()
        self._since = 0.0
        """When the oldest step in flight was written, or the one before it applied."""
        self._seconds = self._tokens = 0.0

    @property
    def tokens_in_flight(self) -> int:
        """Prompt tokens in steps that not every rank has applied."""
        return sum(num_tokens for _, num_tokens in self._in_flight)

    @property
    def seconds_per_token(self) -> float:
        """0 until a step with tokens was applied."""
        return self._seconds / self._tokens if self._tokens else 0.0

    def written(self, step: Step, now: float) -> None:
        """A step was written."""
        if not self._in_flight:
            self._since = now
        self._in_flight.append((step.number, step.num_tokens))

    def applied(self, number: StepNumber, now: float) -> None:
        """Every rank has applied the steps up to `number`."""
        num_tokens = 0
        while self._in_flight and self._in_flight[0][0] <= number:
            num_tokens += self._in_flight.popleft()[1]
        if num_tokens:
            self._seconds = self._seconds * _KEPT + (now - self._since)
            self._tokens = self._tokens * _KEPT + num_tokens
        self._since = now
