"""Members as the registry knows them: who they are, what they register with, how loaded they say they are.

Plain records, made by whoever receives a registration or a heartbeat, read by roster, placement and registry.
"""

from dataclasses import dataclass

from kvmesh.protocol.descriptors import Descriptor
from kvmesh.protocol.ids import Generation, Incarnation, LeaseId, Rank, Term

NO_GENERATION = Generation(0)


@dataclass(frozen=True, slots=True)
class Member:
    """One life of one process, and where its peers reach it."""

    incarnation: Incarnation
    address: str


@dataclass(frozen=True, slots=True)
class Stage:
    """The registration of one prefill stage, on one lease."""

    lease: LeaseId
    member: Member
    pipeline: str
    rank: Rank
    pp_size: int
    descriptor: Descriptor
    highest_term: Term = Term(0)
    held_generation: Generation = NO_GENERATION
    """The running generation it belongs to, after its lease was lost and it was not."""

    @property
    def name(self) -> str:
        """For people."""
        return f"rank {self.rank} of {self.pipeline}"


@dataclass(frozen=True, slots=True)
class Decoder:
    """The registration of one decoder, on one lease."""

    lease: LeaseId
    member: Member
    descriptor: Descriptor
    highest_term: Term = Term(0)

    @property
    def name(self) -> str:
        """For people; addresses stay out of messages."""
        return f"decoder {self.member.incarnation:016x}"


@dataclass(frozen=True, slots=True)
class Load:
    """What a heartbeat says."""

    waiting_rooms: int = 0
    running_rooms: int = 0
    free_pages: int = 0
    queued_tokens: int = 0
    draining: bool = False
    paired_generations: tuple[Generation, ...] = ()
    """Decoders: the generations whose pairing stands."""
