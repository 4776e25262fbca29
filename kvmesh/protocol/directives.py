"""What the registry's core asks of its driver: directives down leases, refusals, answers to who asked for a room.

Made by roster and registry, carried out, in order, by the bootstrap service or a simulator.
"""

from dataclasses import dataclass
from typing import NewType

from kvmesh.errors import KvmeshError
from kvmesh.protocol.ids import Generation, LeaseId, RoomId, Term
from kvmesh.protocol.members import Member

RequestId = NewType("RequestId", int)
"""One call for a room; the driver numbers them."""


@dataclass(frozen=True, slots=True)
class WaitFor:
    """Not yet; informs."""

    peer: str


@dataclass(frozen=True, slots=True)
class LinkNext:
    """Open the step stream to the stage of rank + 1."""

    next: Member
    generation: Generation


@dataclass(frozen=True, slots=True)
class Admitted:
    """The stage is a connected part of its pipeline."""

    generation: Generation


@dataclass(frozen=True, slots=True)
class Withdrawn:
    """An admission, or the order to link, is taken back."""

    generation: Generation
    reason: str


@dataclass(frozen=True, slots=True)
class DecoderAdmitted:
    """The decoder's lease runs."""


@dataclass(frozen=True, slots=True)
class WholePipeline:
    """A pipeline all of whose stages are connected; position = rank."""

    pipeline: str
    generation: Generation
    stages: tuple[Member, ...]


@dataclass(frozen=True, slots=True)
class WholePipelines:
    """All pipelines that are whole now, sorted by name."""

    pipelines: tuple[WholePipeline, ...]


Directive = WaitFor | LinkNext | Admitted | Withdrawn | DecoderAdmitted | WholePipelines


@dataclass(frozen=True, slots=True)
class Tell:
    """Say it down the lease."""

    lease: LeaseId
    directive: Directive


@dataclass(frozen=True, slots=True)
class Refuse:
    """End the lease stream with this error; the core has forgotten the lease."""

    lease: LeaseId
    error: KvmeshError


@dataclass(frozen=True, slots=True)
class Grant:
    """A room for who asked."""

    request: RequestId
    room: RoomId
    pipeline: str
    generation: Generation
    decoder: Member


@dataclass(frozen=True, slots=True)
class Deny:
    """No room for who asked."""

    request: RequestId
    error: KvmeshError


@dataclass(frozen=True, slots=True)
class Superseded:
    """A member obeys this higher term: persist it, and end. Whatever the core is told from now on, it refuses."""

    term: Term


Action = Tell | Refuse | Grant | Deny | Superseded
