"""What a process is in every life: the settings of a stage and of a decoder. Made by the mesh."""

from dataclasses import dataclass

from kvmesh.protocol import rooms, scheduler
from kvmesh.protocol.coverage import ShardSpan
from kvmesh.protocol.descriptors import Descriptor
from kvmesh.protocol.ids import Rank


@dataclass(frozen=True, slots=True)
class StageShape:
    """What a stage is in every life of its process, and of the next."""

    pipeline: str
    rank: Rank
    pp_size: int
    descriptor: Descriptor
    limits: scheduler.Limits
    watchdog_seconds: float = 2.0
    step_seconds: float = 0.01
    """Of one step at this stage, before chance."""

    @property
    def shard(self) -> ShardSpan:
        """What it sends."""
        own = self.descriptor
        return ShardSpan(own.layer_begin, own.layer_end, 0, own.num_kv_heads)


@dataclass(frozen=True, slots=True)
class DecoderShape:
    """What a decoder is in every life of its process."""

    descriptor: Descriptor
    limits: rooms.Limits
    watchdog_seconds: float = 2.0
    step_seconds: float = 0.005
    """Of one decode step, before chance."""
    copy_seconds: float = 0.001
    """Of writing one frame, before chance."""
