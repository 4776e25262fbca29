"""Stages and decoders played over real lease streams, and the registry they talk to, a real process."""

import asyncio
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

from service_process import Running, service

from kvmesh.protocol.version import PROTOCOL_VERSION
from kvmesh.rpc import streams
from kvmesh.rpc.channels import dial
from kvmesh.rpc.status import peer_errors
from kvmesh.v1 import bootstrap_pb2 as pb
from kvmesh.v1 import types_pb2
from kvmesh.v1.bootstrap_pb2_grpc import BootstrapServiceStub

SECONDS = 15
"""Longest wait for anything; a test that needs it has failed."""


def descriptor(rank: int = 0, pp_size: int = 1, **changes: object) -> types_pb2.Descriptor:
    layers = types_pb2.LayerRange(begin=rank * 12 // pp_size, end=(rank + 1) * 12 // pp_size)
    values: dict[str, object] = {
        "protocol_version": PROTOCOL_VERSION,
        "model_name": "m",
        "model_fingerprint": "f",
        "dtype": types_pb2.DTYPE_FP32,
        "num_layers": 12,
        "num_kv_heads": 2,
        "head_dim": 8,
        "page_size": 16,
        "num_pages": 64,
        "max_tokens": 512,
        "layers": layers,
        "vocab_size": 320,
    }
    return types_pb2.Descriptor(**(values | changes))  # type: ignore[arg-type]


class Stage:
    """A stage, played."""

    def __init__(
        self, stub: BootstrapServiceStub, rank: int, pp_size: int, pipeline: str = "p0", incarnation: int = 0
    ) -> None:
        self.rank, self.pp_size = rank, pp_size
        self.registration = pb.StageRegistration(
            member=types_pb2.Member(incarnation=incarnation or 1000 + rank, address=f"host{rank}:1"),
            pipeline=pipeline,
            rank=rank,
            pp_size=pp_size,
            descriptor=descriptor(rank, pp_size),
        )
        self.call = stub.RegisterStage()

    async def register(self) -> Self:
        await streams.write(self.call, pb.RegisterStageRequest(registration=self.registration))
        return self

    async def hear(self, kind: str) -> pb.RegisterStageResponse:
        """The next directive, which must be of a kind; for whom it waits is passed over unless asked for."""
        with peer_errors("the registry"):
            async with asyncio.timeout(SECONDS):
                message = await streams.read(self.call)
                while message is not None and message.WhichOneof("directive") == "wait_for" != kind:
                    message = await streams.read(self.call)
        assert message is not None
        assert message.WhichOneof("directive") == kind, message
        return message

    async def linked(self, generation: int) -> None:
        await streams.write(self.call, pb.RegisterStageRequest(linked=pb.StageLinked(generation=generation)))

    async def beat(self, **load: object) -> None:
        await streams.write(self.call, pb.RegisterStageRequest(heartbeat=pb.Heartbeat(**load)))  # type: ignore[arg-type]


class Decoder:
    """A decoder, played."""

    def __init__(self, stub: BootstrapServiceStub, incarnation: int = 5000) -> None:
        self.registration = pb.DecoderRegistration(
            member=types_pb2.Member(incarnation=incarnation, address=f"decoder{incarnation}:1"), descriptor=descriptor()
        )
        self.call = stub.RegisterDecoder()

    async def register(self) -> Self:
        await streams.write(self.call, pb.RegisterDecoderRequest(registration=self.registration))
        assert (await self.hear()).WhichOneof("directive") == "admitted"
        return self

    async def hear(self) -> pb.RegisterDecoderResponse:
        with peer_errors("the registry"):
            async with asyncio.timeout(SECONDS):
                message = await streams.read(self.call)
        assert message is not None
        return message

    async def pair(self, pipelines: int = 1) -> list[int]:
        """Waits for so many whole pipelines and says that it is paired with them; their generations."""
        while len(whole := (await self.hear()).pipelines.pipelines) < pipelines:
            pass
        generations = [p.generation for p in whole]
        await self.beat(paired_generations=generations, free_pages=64)
        return generations

    async def beat(self, **load: object) -> None:
        await streams.write(self.call, pb.RegisterDecoderRequest(heartbeat=pb.Heartbeat(**load)))  # type: ignore[arg-type]


class Watcher:
    """Somebody who watches the mesh."""

    def __init__(self, stub: BootstrapServiceStub) -> None:
        self._call = stub.WatchMesh(pb.WatchMeshRequest())
        self._pictures = self._call.__aiter__()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._call.cancel()

    async def next(self) -> pb.WatchMeshResponse:
        with peer_errors("the registry"):
            async with asyncio.timeout(SECONDS):
                return await anext(self._pictures)


@asynccontextmanager
async def registry(
    directory: Path, *flags: str, watchdog_seconds: float = 2.0
) -> AsyncIterator[tuple[Running, BootstrapServiceStub]]:
    # A long lease, since the players do not beat.
    flags = ("--lease-seconds", "30", *flags)
    started = service("bootstrap", directory / "log", "--state-dir", str(directory / "state"), *flags)
    async with started as running, dial(running.address, watchdog_seconds=watchdog_seconds) as channel:
        yield running, BootstrapServiceStub(channel)


async def whole(stub: BootstrapServiceStub, pp_size: int = 2, pipeline: str = "p0", base: int = 1000) -> list[Stage]:
    """A pipeline, registered last rank first."""
    stages = [Stage(stub, rank, pp_size, pipeline, base + rank) for rank in range(pp_size)]
    for stage in reversed(stages):
        await stage.register()
        if stage.rank < pp_size - 1:
            order = (await stage.hear("link_next")).link_next
            await stage.linked(order.generation)
        await stage.hear("admitted")
    return stages


async def assign(stub: BootstrapServiceStub, seconds: float = SECONDS, **request: object) -> types_pb2.RoomAssignment:
    values: dict[str, object] = {"prompt_len": 1, "max_output_len": 1}
    with peer_errors("the registry"):
        response = await stub.AssignRoom(pb.AssignRoomRequest(**(values | request)), timeout=seconds)  # type: ignore[arg-type]
    return response.assignment


def read_metrics(address: str) -> str:
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as page:
        return str(page.read().decode())
