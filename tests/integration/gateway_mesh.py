"""A real gateway between a registry and decoders that do as a test says, all as gRPC servers on free ports.

Used by the tests of the gateway. The model's vocabulary is the 256 bytes, then specials, so that a test writes tokens as
bytes. On the way out it checks that nothing is left: no open request, no open room, no call at the decoder.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from google.protobuf.duration_pb2 import Duration
from safetensors.numpy import save_file

from kvmesh.errors import KvmeshError, Unavailable
from kvmesh.model.config import ModelConfig
from kvmesh.model.files import ModelFiles
from kvmesh.rpc.channels import dial, server_options
from kvmesh.rpc.interceptors import ErrorInterceptor
from kvmesh.rpc.life import Life
from kvmesh.telemetry import metrics
from kvmesh.v1 import bootstrap_pb2, decode_pb2
from kvmesh.v1 import inference_pb2 as pb
from kvmesh.v1.bootstrap_pb2_grpc import BootstrapServiceServicer, add_BootstrapServiceServicer_to_server
from kvmesh.v1.decode_pb2_grpc import DecodeServiceServicer, add_DecodeServiceServicer_to_server
from kvmesh.v1.inference_pb2_grpc import InferenceServiceStub
from kvmesh.v1.types_pb2 import (
    FINISH_REASON_LENGTH,
    FINISH_REASON_STOP,
    FINISH_REASON_UNSPECIFIED,
    Member,
    RoomAssignment,
)
from services.gateway.config import GatewaySettings
from services.gateway.gateway import Gateway
from tests.unit.text.tokenizers_made import byte_inner

POSITIONS = 200_000
END, FIRST_MORE = 256, 260
"""End of text, and the first of the tokens that a test adds."""
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('system comes first') }}"
    "{% endif %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
)

Responses = AsyncIterator[decode_pb2.GenerateRoomResponse]
Script = Callable[[decode_pb2.GenerateRoomRequest], Responses]
Assign = Callable[[bootstrap_pb2.AssignRoomRequest], Awaitable[RoomAssignment]]


def write_text_model(directory: Path, template: str | None = TEMPLATE, more: Sequence[str] = ()) -> ModelFiles:
    """A model of one layer whose weights are zero: a gateway reads only its text side."""
    config: dict[str, Any] = {
        "model_type": "llama",
        "vocab_size": 300,
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "max_position_embeddings": POSITIONS,
        "tie_word_embeddings": True,
        "eos_token_id": END,
    }
    (directory / "config.json").write_text(json.dumps(config))
    weights = {name: np.zeros(shape, np.float32) for name, shape in ModelConfig.from_dict(config).tensors().items()}
    save_file(weights, directory / "model.safetensors")
    inner = byte_inner()
    inner.add_tokens(list(more))
    inner.save(str(directory / "tokenizer.json"))
    said = {} if template is None else {"chat_template": template}
    (directory / "tokenizer_config.json").write_text(json.dumps(said))
    return ModelFiles.open(directory, "bytes")


# What a decoder may do.


def says(
    output: bytes | Sequence[int],
    *,
    together: int = 1,
    lose_at: int | None = None,
    error: KvmeshError | None = None,
) -> Script:
    """Streams an output from where the request has it, some tokens together; fails before token `lose_at`."""
    tokens = list(output)

    async def script(request: decode_pb2.GenerateRoomRequest) -> Responses:
        index, first = len(request.output_so_far), True
        end = min(len(tokens), request.max_output_len)
        while index < end:
            if lose_at is not None and index >= lose_at:
                raise error or Unavailable("the stage is lost", reason="stage_lost")
            batch = tokens[index : min(index + together, end, lose_at or end)]
            response = decode_pb2.GenerateRoomResponse(index=index, tokens=batch)
            if first:
                response.timing.CopyFrom(ROOM_TIMING)
                first = False
            index += len(batch)
            if index == end:
                stop = batch[-1] in request.stop_ids
                response.finish_reason = FINISH_REASON_STOP if stop else FINISH_REASON_LENGTH
            yield response

    return script


def sends(*responses: tuple[int, bytes]) -> Script:
    """Sends just these: index and tokens, none of them the last."""

    async def script(request: decode_pb2.GenerateRoomRequest) -> Responses:
        for index, tokens in responses:
            yield decode_pb2.GenerateRoomResponse(index=index, tokens=tokens)

    return script


def hangs(output: bytes = b"") -> Script:
    """Sends some tokens, then nothing, without end."""

    async def script(request: decode_pb2.GenerateRoomRequest) -> Responses:
        if output:
            yield decode_pb2.GenerateRoomResponse(index=len(request.output_so_far), tokens=output)
        await asyncio.Event().wait()

    return script


def _microseconds(value: int) -> Duration:
    return Duration(nanos=value * 1000)


ROOM_TIMING = decode_pb2.RoomTiming(
    reserve=_microseconds(1),
    queue=_microseconds(2),
    prefill=_microseconds(3),
    transfer_tail=_microseconds(4),
    join=_microseconds(5),
)


class FakeDecoder(DecodeServiceServicer):
    """Runs one script a room, in order; the last one again and again."""

    def __init__(self, incarnation: int = 77) -> None:
        self.incarnation = incarnation
        self.address = ""
        self.scripts: list[Script] = [says(b"hello" + bytes([0]))]
        self.requests: list[decode_pb2.GenerateRoomRequest] = []
        self.open = 0
        self.started = asyncio.Event()
        self.idle = asyncio.Event()

    @property
    def member(self) -> Member:
        return Member(address=self.address, incarnation=self.incarnation)

    async def GenerateRoom(self, request: decode_pb2.GenerateRoomRequest, context: Any) -> Responses:  # noqa: N802
        self.requests.append(request)
        script = self.scripts.pop(0) if len(self.scripts) > 1 else self.scripts[0]
        self.open += 1
        self.idle.clear()
        self.started.set()
        try:
            async for response in script(request):
                yield response
        finally:
            self.open -= 1
            if self.open == 0:
                self.idle.set()


class FakeRegistry(BootstrapServiceServicer):
    """Places every room on the same decoder, and shows one picture at a time."""

    def __init__(self, decoder: FakeDecoder) -> None:
        self.decoder = decoder
        self.requests: list[bootstrap_pb2.AssignRoomRequest] = []
        self.asked = asyncio.Event()
        self.assigns: list[Assign] = []
        """What to do with the next requests; after these, `place`."""
        self.picture = bootstrap_pb2.WatchMeshResponse()
        self.open = 0
        self._changed = asyncio.Event()
        self._rooms = count((1 << 40) + 1)

    async def place(self, request: bootstrap_pb2.AssignRoomRequest) -> RoomAssignment:
        return RoomAssignment(room=next(self._rooms), pipeline="p0", generation=1 << 40, decoder=self.decoder.member)

    def show(self, picture: bootstrap_pb2.WatchMeshResponse) -> None:
        self.picture = picture
        self._changed.set()
        self._changed = asyncio.Event()

    async def AssignRoom(self, request: bootstrap_pb2.AssignRoomRequest, context: Any) -> Any:  # noqa: N802
        self.requests.append(request)
        self.asked.set()
        self.open += 1
        try:
            assign = self.assigns.pop(0) if self.assigns else self.place
            return bootstrap_pb2.AssignRoomResponse(assignment=await assign(request))
        finally:
            self.open -= 1

    async def WatchMesh(  # noqa: N802
        self, request: bootstrap_pb2.WatchMeshRequest, context: Any
    ) -> AsyncIterator[bootstrap_pb2.WatchMeshResponse]:
        while True:
            changed = self._changed
            yield self.picture
            await changed.wait()


def refuses(error: KvmeshError) -> Assign:
    """A registry that answers with an error."""

    async def assign(request: bootstrap_pb2.AssignRoomRequest) -> RoomAssignment:
        raise error

    return assign


def never() -> Assign:
    """A registry that holds the call without end."""

    async def assign(request: bootstrap_pb2.AssignRoomRequest) -> RoomAssignment:
        await asyncio.Event().wait()
        raise AssertionError

    return assign


class WatchedLife(Life):
    """The life of a process, whose readiness a test can wait for."""

    def __init__(self, settings: GatewaySettings) -> None:
        super().__init__(settings)
        self.ready: tuple[bool, str] | None = None
        self.seen = asyncio.Event()
        """A picture was looked at."""

    def set_ready(self, ready: bool, why: str = "") -> None:
        super().set_ready(ready, why)
        self.ready = (ready, why)
        self.seen.set()


@dataclass
class GatewayMesh:
    """What a test talks to."""

    stub: InferenceServiceStub
    channel: grpc.aio.Channel
    address: str
    registry: FakeRegistry
    decoder: FakeDecoder
    life: WatchedLife
    files: ModelFiles
    ended: "asyncio.Task[None]"
    more: AsyncExitStack = field(repr=False)

    async def shown(self, picture: bootstrap_pb2.WatchMeshResponse) -> None:
        """Shows the gateway a picture and waits until it has looked."""
        self.life.seen.clear()
        self.registry.show(picture)
        async with asyncio.timeout(10):
            await self.life.seen.wait()

    def picture(self, *, paired: bool = True, draining: bool = False, **limits: Any) -> bootstrap_pb2.WatchMeshResponse:
        """One whole pipeline and one decoder."""
        return picture_of(self.decoder, self.files, paired=paired, draining=draining, **limits)

    async def decoder_at(self, incarnation: int) -> FakeDecoder:
        """One more decoder."""
        decoder = FakeDecoder(incarnation)
        decoder.address = await self.more.enter_async_context(served(add_DecodeServiceServicer_to_server, decoder))
        return decoder

    async def generate(self, seconds: float = 20, **request: Any) -> list[pb.GenerateResponse]:
        """All of an answer."""
        return [r async for r in self.stub.Generate(pb.GenerateRequest(**request), timeout=seconds)]


def picture_of(
    decoder: FakeDecoder, files: ModelFiles, *, paired: bool = True, draining: bool = False, **limits: Any
) -> bootstrap_pb2.WatchMeshResponse:
    """One whole pipeline and one decoder."""
    load = bootstrap_pb2.Heartbeat(paired_generations=[1 << 40] if paired else [], draining=draining)
    told = {"model_fingerprint": files.fingerprint, "model_name": "bytes", "max_tokens": 1000, **limits}
    return bootstrap_pb2.WatchMeshResponse(
        term=1,
        pipelines=[bootstrap_pb2.PipelineView(pipeline="p0", generation=1 << 40)],
        decoders=[bootstrap_pb2.DecoderView(member=decoder.member, load=load)],
        limits=bootstrap_pb2.MeshLimits(**told),
    )


@asynccontextmanager
async def gateway_mesh(files: ModelFiles, **settings: Any) -> AsyncIterator[GatewayMesh]:
    """A gateway that serves `files`, with one decoder."""
    decoder = FakeDecoder()
    registry = FakeRegistry(decoder)
    before = asyncio.all_tasks()
    async with AsyncExitStack() as stack:
        decoder.address = await stack.enter_async_context(served(add_DecodeServiceServicer_to_server, decoder))
        bootstrap = await stack.enter_async_context(served(add_BootstrapServiceServicer_to_server, registry))
        given = {"bootstrap": bootstrap, "model": "bytes", "max_attempts": 3, **settings}
        async with serving(files, GatewaySettings(**given)) as (address, life, ended):
            async with dial(address) as channel:
                stub = InferenceServiceStub(channel)
                mesh = GatewayMesh(stub, channel, address, registry, decoder, life, files, ended, stack)
                yield mesh
            async with asyncio.timeout(10):
                if decoder.open:
                    await decoder.idle.wait()
        assert sample("kvmesh_requests_open") == 0
        assert sample("kvmesh_rooms_open") == 0
        assert registry.open == 0
    left = {task for task in asyncio.all_tasks() - before if not task.done() and task is not asyncio.current_task()}
    assert not {task for task in left if "kvmesh" in repr(task) or "services" in repr(task)}


@asynccontextmanager
async def serving(
    files: ModelFiles, settings: GatewaySettings
) -> AsyncIterator[tuple[str, WatchedLife, "asyncio.Task[None]"]]:
    """The gateway on a free port, as `kvmesh.rpc.life` would run it."""
    life = WatchedLife(settings)
    gateway = Gateway(settings, files, life)
    server = grpc.aio.server(interceptors=[ErrorInterceptor()], options=server_options(settings.watchdog_seconds))
    gateway.add_to(server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with asyncio.TaskGroup() as group:
        ended = group.create_task(gateway.run(life))
        try:
            yield f"127.0.0.1:{port}", life, ended
        finally:
            life.draining.set()
            await asyncio.wait({ended}, timeout=10)
            await server.stop(0)
            assert ended.done(), "a request was still open"


@asynccontextmanager
async def served(add: Callable[[Any, grpc.aio.Server], None], servicer: Any, port: int = 0) -> AsyncIterator[str]:
    server = grpc.aio.server(interceptors=[ErrorInterceptor()], options=server_options(2.0))
    add(servicer, server)
    bound = server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    try:
        yield f"127.0.0.1:{bound}"
    finally:
        await server.stop(0)


def sample(name: str, **labels: str) -> float:
    """A metric's value now."""
    return metrics.page_of("gateway").get_sample_value(name, labels) or 0.0


def text_of(responses: Sequence[pb.GenerateResponse]) -> str:
    return "".join(response.text for response in responses)


def tokens_of(responses: Sequence[pb.GenerateResponse]) -> list[int]:
    """The tokens, after a look at their indices."""
    tokens: list[int] = []
    for response in responses:
        assert response.index == len(tokens)
        tokens.extend(response.tokens)
    assert [r.finish_reason != FINISH_REASON_UNSPECIFIED for r in responses] == [False] * (len(responses) - 1) + [True]
    return tokens
