"""The way back: which steps this stage, and every rank behind it, have applied. Called by a stage's event loop.

It compares digests, so two logs that differ end the generation at the first step that does; and it names who stands still: the
first rank that was sent a step and did not confirm it.
"""

from collections import deque
from dataclasses import dataclass, field

from kvmesh.errors import Fault
from kvmesh.protocol.ids import Rank, StepNumber
from kvmesh.protocol.steps import DIGEST_BYTES


@dataclass(frozen=True, slots=True)
class LogPosition:
    """So many steps, and the digest of them."""

    num_steps: int = 0
    digest: bytes = bytes(DIGEST_BYTES)


@dataclass(slots=True)
class Chain:
    """What one stage knows of itself and the ranks behind, in one generation."""

    rank: Rank
    is_last: bool
    heard_at: float
    """When the rank behind last showed that it lives, or began to owe something."""
    received: int = 0
    """Steps that came here."""
    applied: LogPosition = LogPosition()
    """Here."""
    confirmed: LogPosition = LogPosition()
    """Here and by every rank behind."""
    _unconfirmed: deque[LogPosition] = field(default_factory=deque)

    def applied_here(self, number: StepNumber, digest: bytes, now: float) -> bool:
        """The worker applied a step. Returns whether it is confirmed by that: at the last rank."""
        self.applied = LogPosition(number + 1, digest)
        if self.is_last:
            self.confirmed = self.applied
            return True
        if not self._unconfirmed:
            self.heard_at = now
        self._unconfirmed.append(self.applied)
        return False

    def applied_behind(self, number: StepNumber, digest: bytes, now: float) -> None:
        """The rank behind, and all behind it, applied a step.

        Raises:
            Fault: it is not the next to confirm, or the digest differs: the generation is over.
        """
        self.heard_at = now
        if not self._unconfirmed or self._unconfirmed[0].num_steps != number + 1:
            raise Fault(f"rank {self.rank + 1} applied step {number}, which is not the next to confirm")
        own = self._unconfirmed[0]
        if own.digest != digest:
            raise Fault(
                f"rank {self.rank + 1} applied another step {number}: digest {digest.hex()}, here {own.digest.hex()}"
            )
        self._unconfirmed.popleft()
        self.confirmed = own

    def heard(self, now: float) -> None:
        """The rank behind showed progress."""
        self.heard_at = now

    def is_behind_silent(self, now: float, limit_seconds: float) -> bool:
        """Whether the rank behind owes a step and was silent for the limit."""
        return bool(self._unconfirmed) and now - self.heard_at > limit_seconds
