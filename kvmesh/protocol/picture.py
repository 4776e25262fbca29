"""The live picture of a mesh: records the registry's core fills for WatchMesh, and the limits requests are checked against.

Read by the bootstrap service and the simulator. Knows nothing of how the state came about.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from kvmesh.protocol.ids import Generation, Term
from kvmesh.protocol.leases import Lease
from kvmesh.protocol.members import Load, Member, Stage
from kvmesh.protocol.seats import SeatState


@dataclass(frozen=True, slots=True)
class SeatPicture:
    """One rank."""

    state: SeatState
    holder: Stage | None
    waits_for: str
    admitted_order: int
    load: Load


@dataclass(frozen=True, slots=True)
class PipelinePicture:
    """One pipeline; position = rank."""

    name: str
    generation: Generation
    """0 while it is not whole."""
    seats: tuple[SeatPicture, ...]


@dataclass(frozen=True, slots=True)
class DecoderPicture:
    """One decoder."""

    member: Member
    load: Load
    heartbeat_age_seconds: float


@dataclass(frozen=True, slots=True)
class MeshLimits:
    """What every member that leases now can hold; zero and empty while there is none."""

    max_tokens: int = 0
    """Of prompt plus output."""
    max_prompt_tokens: int = 0
    model_name: str = ""
    model_fingerprint: str = ""

    @classmethod
    def of(cls, leases: Sequence[Lease]) -> "MeshLimits":
        """The smallest of all members."""
        if not leases:
            return cls()
        members = [lease.member for lease in leases]
        decoders = [m.descriptor.pool_tokens for m in members if not isinstance(m, Stage)]
        pipelines = [m.descriptor.pool_tokens for m in members if isinstance(m, Stage)]
        most = min([*(m.descriptor.max_tokens for m in members), *decoders])
        return cls(
            max_tokens=most,
            max_prompt_tokens=min([most - 1, *pipelines]) if pipelines else 0,
            model_name=members[0].descriptor.model_name,
            model_fingerprint=members[0].descriptor.model_fingerprint,
        )


@dataclass(frozen=True, slots=True)
class MeshPicture:
    """All of it."""

    term: Term
    pipelines: tuple[PipelinePicture, ...]
    """Sorted by name."""
    decoders: tuple[DecoderPicture, ...]
    """Sorted by incarnation."""
    rooms_minted: int
    limits: MeshLimits
