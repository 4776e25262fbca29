"""A request over all its attempts: what it has got, whether its next token is right, whether another room is worth trying.

The gateway alone retries, and this is where it decides. Called by the gateway and the simulator. Knows no clock and no pause.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvmesh.errors import Fault, KvmeshError, Retry
from kvmesh.protocol.ids import Generation, Incarnation

LOST_STEP = "in_lost_step"
"""Reason of a room that had work in the very step its generation died in. It may be what killed it, so it is tried only once
more."""


@dataclass(slots=True)
class Request:
    """One request."""

    max_output_len: int
    """Tokens of the whole request, over all attempts."""
    max_attempts: int
    output: list[int] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    """Reasons, one for each attempt that failed."""
    rooms: list[tuple[Generation, Incarnation]] = field(default_factory=list)
    """With whom each attempt had its room."""
    finished: bool = False
    """The last token is here: nothing that follows counts."""

    @property
    def attempts(self) -> int:
        """Rooms it was given."""
        return len(self.rooms)

    @property
    def left(self) -> int:
        """Tokens that may still come."""
        return self.max_output_len - len(self.output)

    def begin_attempt(self, generation: Generation, decoder: Incarnation) -> None:
        """It was given a room.

        Raises:
            Fault: one attempt more than there may be, or the request is finished.
        """
        if self.finished or self.attempts >= self.max_attempts:
            raise Fault(f"attempt {self.attempts + 1} of at most {self.max_attempts}")
        self.rooms.append((generation, decoder))

    def take(self, index: int, tokens: Sequence[int], *, last: bool) -> None:
        """Tokens came: token i only as the i-th.

        Args:
            index: in the request, of the first of `tokens`.
            last: the room says that these are its last.

        Raises:
            Fault: they are not what comes next, or more than were asked for; nothing is changed.
        """
        have = len(self.output)
        if self.finished or index != have or not tokens:
            raise Fault(f"the decoder sent {len(tokens)} tokens from {index} on, {have} is next")
        if have + len(tokens) > self.max_output_len:
            raise Fault(f"the decoder sent more than {self.max_output_len} tokens")
        self.output.extend(tokens)
        self.finished = last or len(self.output) == self.max_output_len

    def failed(self, error: KvmeshError) -> bool:
        """An attempt failed. Returns whether another room may be tried."""
        self.failures.append(error.reason)
        return (
            not self.finished
            and error.retry is Retry.ROOM
            and self.attempts < self.max_attempts
            and self.failures.count(LOST_STEP) < 2
        )
