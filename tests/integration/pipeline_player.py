"""A pipeline of one stage, played over real streams to a real decoder: it notes what it hears and sends what a test says."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from typing import Any

import grpc
from registry_players import SECONDS, Stage

from kvmesh.descriptor import KV_WIRES, describe
from kvmesh.kv.frames import FrameHeader, FrameKind, open_frame, seal
from kvmesh.kv.layout import Shard, WireName, plan_shards
from kvmesh.model.files import ModelFiles
from kvmesh.protocol.version import PROTOCOL_VERSION
from kvmesh.rpc.channels import server_options
from kvmesh.rpc.interceptors import ErrorInterceptor
from kvmesh.rpc.raw import raw_stream_handler
from kvmesh.rpc.tls import Tls, add_port
from kvmesh.v1 import prefill_pb2 as pb
from kvmesh.v1 import types_pb2
from kvmesh.v1.bootstrap_pb2_grpc import BootstrapServiceStub
from kvmesh.v1.prefill_pb2_grpc import PrefillServiceServicer, add_PrefillServiceServicer_to_server

NUMBERS = count(1)
"""Of pipelines: each is another one to the registry."""


class PlayedPipeline(PrefillServiceServicer):
    """What the decoder dials."""

    def __init__(self, model: Path, num_shards: int = 1, kv_wire: WireName = "fp32") -> None:
        files = ModelFiles.open(model)
        sizes = {"page_size": 4, "num_pages": 64, "max_tokens": 0}
        self.number = next(NUMBERS)
        self.descriptor = describe(files, model_name="", dtype="fp32", layers=(0, files.config.num_layers), **sizes)
        self.heard: list[pb.ControlRequest] = []
        """On the control stream, after its opening."""
        self._changed = asyncio.Event()
        self._to_say: asyncio.Queue[pb.ControlResponse] = asyncio.Queue()
        self._to_send: asyncio.Queue[bytes] = asyncio.Queue()
        self._pairing = self._controlled = 0
        """The last whose link was opened, and whose control stream was."""
        width = self.descriptor.num_kv_heads // num_shards
        self.heads = [(at * width, (at + 1) * width) for at in range(num_shards)]
        """Of the shards it sends."""
        self._kv_wire = kv_wire

    @property
    def incarnation(self) -> int:
        return 10_000 + self.number

    @property
    def bytes_per_token(self) -> int:
        """Of KV, as it sends it."""
        own = self.descriptor
        return Shard(0, own.num_layers, 0, own.num_kv_heads, own.head_dim, "fp32").bytes_per_token

    # What a test does.

    def say(self, message: pb.ControlResponse) -> None:
        """Puts a message on the control stream."""
        self._to_say.put_nowait(message)

    async def hear(self, kind: str, how_many: int = 1) -> list[pb.ControlRequest]:
        """Waits for so many messages of a kind."""
        async with asyncio.timeout(SECONDS):
            while len(found := [m for m in self.heard if m.WhichOneof("message") == kind]) < how_many:
                self._changed.clear()
                await self._changed.wait()
        return found

    def send_kv(self, room: int, num_tokens: int, heads: Sequence[tuple[int, int]] = ()) -> None:
        """Sends the KV of a room, zeros: all of it, or of some shards."""
        own = self.descriptor
        shards = [Shard(0, own.num_layers, *shard, own.head_dim, "fp32") for shard in heads or self.heads]
        for piece in plan_shards(shards, 0, num_tokens):
            assert piece.heads is not None
            header = FrameHeader(
                FrameKind.KV,
                room,
                self._pairing,
                piece.layer_begin,
                piece.layer_end,
                *piece.heads,
                piece.token_begin,
                piece.token_end,
                own.head_dim,
                "fp32",
            )
            self._to_send.put_nowait(seal(header, bytes(header.kv_bytes)))

    def send_rubbish(self) -> None:
        """Sends what is no frame: the decoder ends the pairing, and makes it again."""
        self._to_send.put_nowait(bytes(100))

    async def paired(self, number: int) -> None:
        """Waits for the pairing of that number, or a later one."""
        async with asyncio.timeout(SECONDS):
            while self._controlled < number:
                self._changed.clear()
                await self._changed.wait()

    def send_first_token(self, room: int, token: int) -> None:
        """Sends a room's first token."""
        payload = pb.FirstToken(token=token).SerializeToString()
        self._to_send.put_nowait(seal(FrameHeader(FrameKind.FIRST_TOKEN, room, self._pairing), payload))

    # What the decoder opens.

    async def Link(self, requests: AsyncIterator[bytes], context: Any) -> None:  # noqa: N802
        hello = pb.LinkHello.FromString(bytes(open_frame(await anext(requests))[1]))
        self._pairing = hello.pairing
        own = self.descriptor
        welcome = pb.LinkWelcome(
            protocol_version=PROTOCOL_VERSION,
            stage=self.incarnation,
            layers=own.layers,
            heads=[types_pb2.HeadRange(begin=begin, end=end) for begin, end in self.heads],
            kv_wire=KV_WIRES[self._kv_wire],
        )
        await context.write(seal(FrameHeader(FrameKind.WELCOME), welcome.SerializeToString()))
        while True:
            await context.write(await self._to_send.get())

    async def Control(self, requests: AsyncIterator[pb.ControlRequest], context: Any) -> None:  # type: ignore[override]  # noqa: N802
        opening = await anext(requests)
        assert opening.WhichOneof("message") == "open"
        await context.write(pb.ControlResponse(opened=pb.ControlOpened()))
        self._controlled = opening.open.pairing
        self._changed.set()
        async with asyncio.TaskGroup() as tasks:
            writing = tasks.create_task(self._say_all(context.write))
            async for message in requests:
                self.heard.append(message)
                self._changed.set()
            writing.cancel()

    async def _say_all(self, write: Callable[[pb.ControlResponse], Any]) -> None:
        while True:
            await write(await self._to_say.get())


@asynccontextmanager
async def played_pipeline(
    stub: BootstrapServiceStub,
    model: Path,
    tls: Tls | None = None,
    num_shards: int = 1,
    kv_wire: WireName = "fp32",
) -> AsyncIterator[PlayedPipeline]:
    """A pipeline that is registered and served; gone at the end, lease and process.

    Args:
        kv_wire: what it says it will send, whatever was asked for.
    """
    played = PlayedPipeline(model, num_shards, kv_wire)
    server = grpc.aio.server(interceptors=[ErrorInterceptor()], options=server_options(2.0))
    add_PrefillServiceServicer_to_server(played, server)
    server.add_generic_rpc_handlers((raw_stream_handler("kvmesh.v1.PrefillService", {"Link": played.Link}),))
    port = add_port(server, "127.0.0.1:0", tls)
    await server.start()
    lease = Stage(stub, 0, 1, f"played{played.number}", played.incarnation)
    lease.registration.member.address = f"127.0.0.1:{port}"
    lease.registration.descriptor.CopyFrom(played.descriptor)
    try:
        await lease.register()
        await lease.hear("admitted")
        await lease.beat(free_pages=64)
        yield played
    finally:
        lease.call.cancel()
        await server.stop(0)
