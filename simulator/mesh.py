"""A whole mesh in a world: its shape, who lives where, and the next life of whoever died.

A process that is started again has its predecessor's name and address and another incarnation, like a pod behind a stable name.
"""

from dataclasses import dataclass

from kvmesh.protocol import rooms, scheduler
from kvmesh.protocol.descriptors import Descriptor
from kvmesh.protocol.ids import Rank
from kvmesh.protocol.registry import RegistryLimits
from kvmesh.protocol.version import PROTOCOL_VERSION
from simulator.decoder import DecoderProcess
from simulator.gateway import GatewayProcess
from simulator.process import Process
from simulator.registry import RegistryProcess
from simulator.shapes import DecoderShape, StageShape
from simulator.stage import StageProcess
from simulator.world import World

REGISTRY = "registry"
HEADS = 2


@dataclass(frozen=True, slots=True)
class MeshShape:
    """How large a mesh is, and what it keeps to."""

    pp: int = 2
    pipelines: int = 1
    decoders: int = 1
    gateways: int = 1
    stage_pages: int = 16
    decoder_pages: int = 24
    page_size: int = 4
    step_tokens: int = 8
    max_steps_in_flight: int = 4
    max_running_rooms: int = 64
    max_waiting_rooms: int = 64
    watchdog_seconds: float = 2.0
    step_seconds: float = 0.01
    decode_step_seconds: float = 0.005
    hold_seconds: float = 5.0
    max_attempts: int = 3

    @property
    def max_tokens(self) -> int:
        """Of one room."""
        return min(self.stage_pages, self.decoder_pages) * self.page_size


def names_of(shape: MeshShape) -> list[str]:
    """Every process of a mesh."""
    stages = [f"p{p} rank {r}" for p in range(shape.pipelines) for r in range(shape.pp)]
    decoders = [f"decoder {n}" for n in range(shape.decoders)]
    return [*stages, *decoders, *(f"gateway {n}" for n in range(shape.gateways)), REGISTRY]


class Mesh:
    """Its processes, by role and name."""

    def __init__(self, world: World, shape: MeshShape) -> None:
        self.world, self.shape = world, shape

    @property
    def names(self) -> list[str]:
        """Of all its processes, dead or alive."""
        return names_of(self.shape)

    def start(self, name: str) -> Process:
        """The first or the next life of a process."""
        incarnation = self.world.next_incarnation()
        process = self._make(name, incarnation)
        self.world.begin(process)
        return process

    def _make(self, name: str, incarnation: int) -> Process:
        role, _, number = name.rpartition(" ")
        if name == REGISTRY:
            return self._registry(incarnation)
        if role == "decoder":
            return self._decoder(name, incarnation)
        if role == "gateway":
            return GatewayProcess(self.world, name, name, incarnation, self.shape.max_attempts)
        return self._stage(name, role.partition(" ")[0], int(number), incarnation)

    def start_all(self) -> None:
        """The registry first, then everyone."""
        for name in sorted(self.names, key=lambda n: n != REGISTRY):
            self.start(name)

    def gateway(self, number: int) -> GatewayProcess | None:
        """A gateway, if it is alive."""
        process = self.world.process(f"gateway {number}")
        assert process is None or isinstance(process, GatewayProcess)
        return process

    # Who they are.

    def _descriptor(self, num_pages: int, layers: tuple[int, int]) -> Descriptor:
        shape = self.shape
        return Descriptor(
            protocol_version=PROTOCOL_VERSION,
            model_name="m",
            model_fingerprint="f",
            dtype="fp32",
            num_layers=shape.pp,
            num_kv_heads=HEADS,
            head_dim=8,
            page_size=shape.page_size,
            num_pages=num_pages,
            max_tokens=shape.max_tokens,
            layer_begin=layers[0],
            layer_end=layers[1],
            vocab_size=1000,
        )

    def _stage(self, name: str, pipeline: str, rank: int, incarnation: int) -> Process:
        shape = self.shape
        limits = scheduler.Limits(
            num_pages=shape.stage_pages,
            page_size=shape.page_size,
            max_prompt_len=shape.max_tokens,
            step_tokens=shape.step_tokens,
            max_steps_in_flight=shape.max_steps_in_flight,
            max_waiting_rooms=shape.max_waiting_rooms,
        )
        own = StageShape(
            pipeline,
            Rank(rank),
            shape.pp,
            self._descriptor(shape.stage_pages, (rank, rank + 1)),
            limits,
            watchdog_seconds=shape.watchdog_seconds,
            step_seconds=shape.step_seconds,
        )
        return StageProcess(self.world, name, name, incarnation, own)

    def _decoder(self, name: str, incarnation: int) -> Process:
        shape = self.shape
        limits = rooms.Limits(
            num_pages=shape.decoder_pages,
            page_size=shape.page_size,
            max_tokens=shape.max_tokens,
            max_running_rooms=shape.max_running_rooms,
            max_waiting_rooms=shape.max_waiting_rooms,
        )
        own = DecoderShape(
            self._descriptor(shape.decoder_pages, (0, shape.pp)),
            limits,
            watchdog_seconds=shape.watchdog_seconds,
            step_seconds=shape.decode_step_seconds,
        )
        return DecoderProcess(self.world, name, name, incarnation, own)

    def _registry(self, incarnation: int) -> Process:
        limits = RegistryLimits(
            lease_seconds=self.shape.watchdog_seconds,
            heartbeat_seconds=self.shape.watchdog_seconds / 4,
            max_waiting_rooms=self.shape.max_waiting_rooms,
        )
        return RegistryProcess(self.world, REGISTRY, REGISTRY, incarnation, limits, self.shape.hold_seconds)
