"""What a decoder is for the life of its process. Made by `__main__`; read by whoever acts in its name."""

from dataclasses import dataclass

from kvmesh.protocol.ids import Incarnation
from kvmesh.rpc.tls import Tls
from kvmesh.v1.types_pb2 import Descriptor, Member


@dataclass(frozen=True, slots=True)
class DecoderIdentity:
    """What a decoder is for the life of its process."""

    member: Member
    descriptor: Descriptor
    window_bytes: int
    """KV that each stage may have in flight."""
    watchdog_seconds: float
    in_flight_bytes: int
    """KV of all stages together that may wait for the copier."""
    shared_cells: int = 0
    """Cells of shared memory for each stage on this host."""
    tls: Tls | None = None
    """What stages are dialled with."""
    kv_wire: str = "auto"
    """The format of KV it asks for: auto, int8 or fp8."""

    @property
    def incarnation(self) -> Incarnation:
        """The process's own."""
        return Incarnation(self.member.incarnation)
