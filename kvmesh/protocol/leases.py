"""Leases: who was heard when, and who is silent for too long. Called by the registry's core with every event and tick.

A registry that was late itself knows nothing of the others' silence: it starts every lease anew.
"""

from dataclasses import dataclass

from kvmesh.protocol.ids import LeaseId
from kvmesh.protocol.members import Decoder, Load, Stage


@dataclass(slots=True)
class Lease:
    """One lease stream that runs."""

    member: Stage | Decoder
    heard_at: float
    load: Load
    """As last told."""
    expected: Load
    """The same, and what was placed on the member since."""


class Leases:
    """All leases that run, oldest first."""

    def __init__(self, *, lease_seconds: float, heartbeat_seconds: float, now: float) -> None:
        """Args:
        lease_seconds: silence that ends a lease.
        heartbeat_seconds: between two signs of life; less than `lease_seconds`.
        """
        self.due = now
        """When `expired` is to be called next."""
        self._lease_seconds, self._heartbeat_seconds = lease_seconds, heartbeat_seconds
        self._running: dict[LeaseId, Lease] = {}

    def open(self, member: Stage | Decoder, now: float) -> None:
        """A member registered. Until its first heartbeat it counts as idle."""
        idle = Load(free_pages=member.descriptor.num_pages)
        self._running[member.lease] = Lease(member, now, idle, idle)

    def heard(self, lease: LeaseId, now: float) -> Lease | None:
        """A message came over a lease; None when it is over already."""
        running = self._running.get(lease)
        if running is not None:
            running.heard_at = now
        return running

    def get(self, lease: LeaseId) -> Lease | None:
        """A lease that runs."""
        return self._running.get(lease)

    def end(self, lease: LeaseId) -> Lease | None:
        """Forgets a lease. Repeated: None."""
        return self._running.pop(lease, None)

    def all(self) -> list[Lease]:
        """Those that run, oldest first."""
        return list(self._running.values())

    def expired(self, now: float) -> list[Lease]:
        """Leases that are silent for too long, oldest first; they still run until `end`."""
        if now - self.due >= self._heartbeat_seconds:
            for running in self._running.values():
                running.heard_at = now
        self.due = now + self._heartbeat_seconds / 2
        return [r for r in self._running.values() if now - r.heard_at > self._lease_seconds]
