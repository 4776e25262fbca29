"""A prefill stage as a real process, with a real registry; the tests play its decoder and its neighbours."""

import asyncio
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import grpc
import pytest
from service_process import Running, end_in_background, refused, service, start_in_background

from kvmesh.errors import Fenced, InvalidInput, KvmeshError, Misfit, Unavailable
from kvmesh.kv.frames import FrameHeader, FrameKind, open_frame, seal
from kvmesh.protocol.request import LOST_STEP
from kvmesh.protocol.version import PROTOCOL_VERSION
from kvmesh.rpc import streams
from kvmesh.rpc.channels import dial
from kvmesh.rpc.raw import raw_stream_call
from kvmesh.rpc.status import peer_errors
from kvmesh.v1 import bootstrap_pb2, types_pb2
from kvmesh.v1 import prefill_pb2 as pb
from kvmesh.v1.bootstrap_pb2_grpc import (
    BootstrapServiceServicer,
    BootstrapServiceStub,
    add_BootstrapServiceServicer_to_server,
)
from kvmesh.v1.prefill_pb2_grpc import PrefillServiceStub

SECONDS = 15
PROMPT = list(range(40))
FRESH = count(100)
"""Rooms: the tests share a generation, in which a room is used once."""
PAIRINGS = count(1)
"""Numbers rise per decoder incarnation; all tests play one."""


class Stage:
    """A running stage and what the registry says of it."""

    def __init__(
        self, seat: bootstrap_pb2.SeatView, generation: int, fingerprint: str, running: Running | None = None
    ) -> None:
        self._running = running
        self.generation = generation
        self.incarnation, self.address = seat.member.incarnation, seat.member.address
        self.descriptor = types_pb2.Descriptor(
            protocol_version=PROTOCOL_VERSION,
            model_fingerprint=fingerprint,
            dtype=types_pb2.DTYPE_FP32,
            num_layers=6,
            num_kv_heads=2,
            head_dim=16,
            page_size=8,
            num_pages=32,
        )

    @property
    def running(self) -> Running:
        assert self._running is not None
        return self._running


def sizes(model: Path) -> tuple[str, ...]:
    return ("--model", str(model), "--num-pages", "16", "--page-size", "4", "--step-tokens", "16")


@asynccontextmanager
async def pipeline(tmp_path: Path, model: Path, pp_size: int = 1) -> AsyncIterator["Pipeline"]:
    """A registry and a whole pipeline."""
    async with AsyncExitStack() as stack:
        registry = await stack.enter_async_context(
            service("bootstrap", tmp_path / "registry.log", "--state-dir", str(tmp_path / "state"))
        )
        flags = ("--bootstrap", registry.address, "--pp-size", str(pp_size), *sizes(model))
        started = [
            await stack.enter_async_context(service("prefill", tmp_path / f"p{r}.log", "--rank", str(r), *flags))
            for r in range(pp_size)
        ]
        picture = await pictured(registry.address, lambda view: view.generation != 0)
        view, fingerprint = picture.pipelines[0], picture.limits.model_fingerprint
        pairs = zip(view.seats, started, strict=True)
        yield Pipeline(registry.address, [Stage(seat, view.generation, fingerprint, r) for seat, r in pairs])


@dataclass
class Pipeline:
    """A whole pipeline and its registry."""

    registry: str
    stages: list[Stage]


async def pictured(
    registry: str, wanted: Callable[[bootstrap_pb2.PipelineView], bool]
) -> bootstrap_pb2.WatchMeshResponse:
    """Waits for a picture in which the pipeline is as wanted."""
    async with dial(registry) as channel, asyncio.timeout(SECONDS * 2):
        async for picture in BootstrapServiceStub(channel).WatchMesh(bootstrap_pb2.WatchMeshRequest()):
            if picture.pipelines and wanted(picture.pipelines[0]):
                return picture
    raise AssertionError("the registry ended")


class PlayedDecoder:
    """A decoder's links and control stream to one stage."""

    def __init__(self, stage: Stage, stack: AsyncExitStack) -> None:
        self._stage, self._stack = stage, stack
        self.hello = pb.LinkHello(
            protocol_version=PROTOCOL_VERSION,
            generation=stage.generation,
            pairing=next(PAIRINGS),
            decoder=77,
            to_incarnation=stage.incarnation,
            descriptor=stage.descriptor,
            window_bytes=8 << 20,
        )
        self.opening = pb.ControlOpen(
            generation=stage.generation,
            pairing=self.hello.pairing,
            decoder=77,
            to_incarnation=stage.incarnation,
        )

    async def link(self) -> pb.LinkWelcome:
        channel = await self._stack.enter_async_context(dial(self._stage.address))
        self.frames = raw_stream_call(channel, "/kvmesh.v1.PrefillService/Link")
        self._stack.callback(self.frames.cancel)
        with peer_errors("the stage"):
            await streams.write(self.frames, seal(FrameHeader(FrameKind.HELLO), self.hello.SerializeToString()))
            header, payload = await self.frame()
        assert header.kind is FrameKind.WELCOME
        return pb.LinkWelcome.FromString(bytes(payload))

    async def frame(self) -> tuple[FrameHeader, memoryview]:
        with peer_errors("the stage"):
            async with asyncio.timeout(SECONDS):
                message = await streams.read(self.frames)
        assert message is not None
        return open_frame(message)

    async def control(self) -> "PlayedDecoder":
        channel = await self._stack.enter_async_context(dial(self._stage.address))
        self.stream = PrefillServiceStub(channel).Control()
        self._stack.callback(self.stream.cancel)
        with peer_errors("the stage"):
            await streams.write(self.stream, pb.ControlRequest(open=self.opening))
            assert (await self.answer()).WhichOneof("message") == "opened"
        return self

    async def answer(self) -> pb.ControlResponse:
        with peer_errors("the stage"):
            async with asyncio.timeout(SECONDS):
                message = await streams.read(self.stream)
        assert message is not None
        return message

    async def say(self, **message: object) -> None:
        await streams.write(self.stream, pb.ControlRequest(**message))  # type: ignore[arg-type]

    async def room(self, room: int, tokens: list[int] = PROMPT) -> tuple[int, int]:
        """Has a room prefilled: tokens × layers received, and the first token."""
        await self.say(admit=pb.Admit(room=room, tokens=tokens))
        covered, first = 0, -1
        while covered < len(tokens) * 6 or first < 0:
            header, payload = await self.frame()
            assert header.room == room
            if header.kind is FrameKind.KV:
                covered += (header.layer_end - header.layer_begin) * (header.token_end - header.token_begin)
            else:
                first = pb.FirstToken.FromString(bytes(payload)).token
        return covered, first


@asynccontextmanager
async def played(stage: Stage) -> AsyncIterator[PlayedDecoder]:
    async with AsyncExitStack() as stack:
        yield PlayedDecoder(stage, stack)


@contextmanager
def in_background(tmp: Path, model: Path, pp_size: int) -> Iterator[str]:
    """A pipeline for all tests that leave it whole; the address of its registry."""
    registry, said = start_in_background("bootstrap", tmp / "registry.log", "--state-dir", str(tmp / "state"))
    flags = ("--bootstrap", said["address"], "--pp-size", str(pp_size), *sizes(model))
    stages = [start_in_background("prefill", tmp / f"p{r}.log", "--rank", str(r), *flags)[0] for r in range(pp_size)]
    yield said["address"]
    assert [end_in_background(process) for process in (*stages, registry)] == [0] * (pp_size + 1)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, tiny_model_dir: Path) -> Iterator[str]:
    with in_background(tmp_path_factory.mktemp("alone"), tiny_model_dir, 1) as address:
        yield address


@pytest.fixture(scope="module")
def chained(tmp_path_factory: pytest.TempPathFactory, tiny_model_dir: Path) -> Iterator[str]:
    with in_background(tmp_path_factory.mktemp("chained"), tiny_model_dir, 2) as address:
        yield address


async def stages_of(registry: str) -> list[Stage]:
    picture = await pictured(registry, lambda view: view.generation != 0)
    view = picture.pipelines[0]
    return [Stage(seat, view.generation, picture.limits.model_fingerprint) for seat in view.seats]


@pytest.fixture
async def stage(alone: str) -> Stage:
    return (await stages_of(alone))[0]


async def test_a_room_is_sent_exactly_once_and_its_first_token_with_it(stage: Stage) -> None:
    async with played(stage) as decoder:
        welcome = await decoder.link()
        assert (welcome.rank, welcome.layers.begin, welcome.layers.end) == (0, 0, 6)
        assert [(heads.begin, heads.end) for heads in welcome.heads] == [(0, 2)]
        await decoder.control()
        first = next(FRESH)
        assert (await decoder.room(first))[0] == len(PROMPT) * 6
        await decoder.say(received=first)
        assert (await decoder.room(next(FRESH)))[0] == len(PROMPT) * 6, "the pages of the first room are free again"


@pytest.mark.parametrize(
    ("tokens", "reason"),
    [([], "too_long"), (list(range(65)), "too_long"), ([320], "bad_token")],
)
async def test_a_room_that_can_not_be_is_refused_with_a_reason(stage: Stage, tokens: list[int], reason: str) -> None:
    """F-C8: rank 0's refusal reaches the decoder, which tells the client. 64 tokens fit the pool."""
    async with played(stage) as decoder:
        await decoder.link()
        await decoder.control()
        await decoder.say(admit=pb.Admit(room=5, tokens=tokens))
        refused = (await decoder.answer()).refused
        assert (refused.room, refused.reason) == (5, reason)
        await decoder.room(next(FRESH))


async def test_a_second_admit_for_a_known_room_is_refused(stage: Stage) -> None:
    """F-R2"""
    async with played(stage) as decoder:
        await decoder.link()
        await decoder.control()
        room = next(FRESH)
        await decoder.room(room)
        await decoder.say(admit=pb.Admit(room=room, tokens=PROMPT))
        assert (await decoder.answer()).refused.reason == "duplicate_room"


async def test_a_dropped_room_gives_its_pages_to_the_next(stage: Stage) -> None:
    async with played(stage) as decoder:
        await decoder.link()
        await decoder.control()
        dropped, following = next(FRESH), next(FRESH)
        await decoder.say(admit=pb.Admit(room=dropped, tokens=list(range(64))))
        await decoder.say(drop=dropped)
        await decoder.say(admit=pb.Admit(room=following, tokens=list(range(64))))
        while (await decoder.frame())[0].room != following:
            pass


@pytest.mark.parametrize("field", ["generation", "to_incarnation"])
async def test_a_link_meant_for_another_life_is_fenced(stage: Stage, field: str) -> None:
    """F-D7"""
    async with played(stage) as decoder:
        setattr(decoder.hello, field, 99)
        with pytest.raises(Fenced):
            await decoder.link()


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("model_fingerprint", "other", "model_fingerprint: decoder other"),
        ("head_dim", 32, "head_dim: decoder 32, stage 16"),
        ("num_kv_heads", 4, "num_kv_heads: decoder 4, stage 2"),
        ("dtype", types_pb2.DTYPE_UNSPECIFIED, "dtype: decoder 0, stage fp32"),
    ],
)
async def test_a_decoder_that_does_not_fit_is_refused_with_both_values(
    stage: Stage, field: str, value: object, says: str
) -> None:
    """F-M2, F-M3"""
    async with played(stage) as decoder:
        setattr(decoder.hello.descriptor, field, value)
        with pytest.raises(Misfit, match=says):
            await decoder.link()


@pytest.mark.parametrize(
    ("dtype", "asked", "sent"),
    [
        (types_pb2.DTYPE_FP32, pb.KV_WIRE_UNSPECIFIED, pb.KV_WIRE_FP32),
        (types_pb2.DTYPE_BF16, pb.KV_WIRE_UNSPECIFIED, pb.KV_WIRE_BF16),
        (types_pb2.DTYPE_FP16, pb.KV_WIRE_UNSPECIFIED, pb.KV_WIRE_FP16),
        (types_pb2.DTYPE_FP16, pb.KV_WIRE_INT8, pb.KV_WIRE_INT8),
        (types_pb2.DTYPE_FP32, pb.KV_WIRE_FP8, pb.KV_WIRE_FP8),
    ],
)
async def test_the_welcome_says_in_which_format_kv_will_come(stage: Stage, dtype: int, asked: int, sent: int) -> None:
    async with played(stage) as decoder:
        decoder.hello.descriptor.dtype = dtype  # type: ignore[assignment]
        decoder.hello.kv_wire = asked  # type: ignore[assignment]
        assert (await decoder.link()).kv_wire == sent


@pytest.mark.parametrize(("asked", "says"), [(pb.KV_WIRE_BF16, "bf16"), (77, "77")])
async def test_a_format_that_no_stage_can_send_is_refused(stage: Stage, asked: int, says: str) -> None:
    async with played(stage) as decoder:
        decoder.hello.kv_wire = asked  # type: ignore[assignment]
        with pytest.raises(
            Misfit, match=f"kv_wire: decoder asks for {says}, what can be asked for is auto, int8 or fp8"
        ):
            await decoder.link()


@pytest.mark.parametrize("first", [b"", b"nonsense", seal(FrameHeader(FrameKind.CREDIT))])
async def test_a_link_that_does_not_begin_with_hello_is_refused(stage: Stage, first: bytes) -> None:
    async with dial(stage.address) as channel:
        call = raw_stream_call(channel, "/kvmesh.v1.PrefillService/Link")
        with pytest.raises(InvalidInput, match="HELLO"), peer_errors("the stage"):
            await streams.write(call, first)
            await streams.read(call)


async def test_a_hello_of_rubbish_is_refused_and_the_field_named(stage: Stage) -> None:
    async with dial(stage.address) as channel:
        call = raw_stream_call(channel, "/kvmesh.v1.PrefillService/Link")
        with pytest.raises(InvalidInput, match="holds no LinkHello") as refused, peer_errors("the stage"):
            await streams.write(call, seal(FrameHeader(FrameKind.HELLO), b"\xff\xff\xff"))
            await streams.read(call)
        assert refused.value.field == "hello"


async def test_a_window_of_nothing_is_refused(stage: Stage) -> None:
    async with played(stage) as decoder:
        decoder.hello.window_bytes = 0
        with pytest.raises(InvalidInput, match="window_bytes is 0"):
            await decoder.link()


async def test_a_pairing_dials_once(stage: Stage) -> None:
    """What is still copied for a link that ended must not reach its successor."""
    async with played(stage) as decoder:
        await decoder.link()
        number = decoder.hello.pairing
    async with played(stage) as again:
        again.hello.decoder, again.hello.pairing = decoder.hello.decoder, number
        with pytest.raises(Fenced, match=f"pairing {number} is not newer than {number}"):
            await again.link()


@pytest.mark.parametrize("method", ["Steps", "Control"])
async def test_a_stream_that_says_nothing_is_ended_and_holds_nothing_up(stage: Stage, method: str) -> None:
    async with dial(stage.address) as channel:
        call = getattr(PrefillServiceStub(channel), method)()
        with pytest.raises(InvalidInput, match="no first message"), peer_errors("the stage"):
            async with asyncio.timeout(SECONDS):
                await streams.read(call)


async def test_control_needs_the_link_of_its_pairing(stage: Stage) -> None:
    async with played(stage) as decoder:
        with pytest.raises(Fenced, match="no link"):
            await decoder.control()


async def test_a_newer_pairing_ends_the_older(stage: Stage) -> None:
    async with played(stage) as older, played(stage) as newer:
        await older.link()
        await newer.link()
        with pytest.raises(Unavailable) as caught:
            await older.frame()
        assert caught.value.reason == "pairing_replaced"
        await newer.control()
        await newer.room(next(FRESH))


async def test_the_end_of_a_control_stream_drops_its_rooms(stage: Stage) -> None:
    """F-D17: a decoder that is gone holds nothing."""
    async with played(stage) as gone:
        await gone.link()
        await gone.control()
        await gone.say(admit=pb.Admit(room=next(FRESH), tokens=list(range(64))))
        await gone.frame()
    async with played(stage) as decoder:
        await decoder.link()
        await decoder.control()
        assert (await decoder.room(next(FRESH), list(range(64))))[0] == 64 * 6


async def test_control_at_a_rank_above_0_is_a_misfit(chained: str) -> None:
    """F-P17, impossible: it has no scheduler to ask."""
    async with played((await stages_of(chained))[1]) as decoder:
        assert (await decoder.link()).layers.begin == 3
        with pytest.raises(Misfit, match="rank 0"):
            await decoder.control()


async def test_a_foreign_step_stream_is_fenced_and_the_pipeline_goes_on(chained: str) -> None:
    head, last = await stages_of(chained)
    async with dial(last.address) as channel:
        call = PrefillServiceStub(channel).Steps()
        opening = pb.StepOpen(pipeline="p0", generation=last.generation, to_incarnation=last.incarnation, from_rank=0)
        with pytest.raises(Fenced), peer_errors("rank 1"):
            await streams.write(call, pb.StepsRequest(open=opening))
            await streams.read(call)
    async with played(head) as decoder:
        await decoder.link()
        await decoder.control()


async def test_a_killed_stage_ends_the_generation_within_the_watchdog_naming_it(
    tmp_path: Path, tiny_model_dir: Path
) -> None:
    """F-D10, F-D12"""
    async with pipeline(tmp_path, tiny_model_dir, pp_size=2) as made, played(made.stages[0]) as decoder:
        await decoder.link()
        await decoder.control()
        made.stages[1].running.process.kill()
        async with asyncio.timeout(2):
            with pytest.raises(KvmeshError, match="rank 1 of p0"):
                await decoder.answer()


async def test_a_frozen_stage_ends_the_generation_within_the_watchdog(tmp_path: Path, tiny_model_dir: Path) -> None:
    """F-T9, F-O1"""
    async with pipeline(tmp_path, tiny_model_dir, pp_size=2) as made, played(made.stages[0]) as decoder:
        await decoder.link()
        await decoder.control()
        made.stages[1].running.process.send_signal(signal.SIGSTOP)
        async with asyncio.timeout(4):
            with pytest.raises(KvmeshError, match="rank 1 of p0"):
                await decoder.answer()


async def test_the_last_words_of_rank_0_name_the_rooms_of_the_step_that_was_lost(
    tmp_path: Path, tiny_model_dir: Path
) -> None:
    """docs/protocol.md §4: one of them may be what killed the generation."""
    async with pipeline(tmp_path, tiny_model_dir, pp_size=2) as made, played(made.stages[0]) as decoder:
        await decoder.link()
        await decoder.control()
        room = next(FRESH)
        made.stages[1].running.process.send_signal(signal.SIGSTOP)
        await decoder.say(admit=pb.Admit(room=room, tokens=PROMPT))
        refused_room = (await decoder.answer()).refused
        assert (refused_room.room, refused_room.reason) == (room, LOST_STEP)
        with pytest.raises(KvmeshError, match="rank 1 of p0"):
            await decoder.answer()


async def test_the_stages_behind_hear_that_a_pipeline_drained_and_was_not_lost(
    tmp_path: Path, tiny_model_dir: Path
) -> None:
    """F-D14: SIGTERM on rank 0."""
    async with pipeline(tmp_path, tiny_model_dir, pp_size=2) as made:
        first, last = made.stages
        first.running.process.send_signal(signal.SIGTERM)
        assert await first.running.ended() == 0
        async with asyncio.timeout(SECONDS):
            while not (told := await described(last)).last_end:
                pass
        assert "drained" in told.last_end


async def test_every_stage_tells_where_it_stands_in_the_log(chained: str) -> None:
    """The same number of steps has the same digest, in the answer and in the metrics."""
    stages = await stages_of(chained)
    async with played(stages[0]) as decoder:
        await decoder.link()
        await decoder.control()
        room = next(FRESH)
        await decoder.say(admit=pb.Admit(room=room, tokens=PROMPT))
        while (await decoder.frame())[0].room != room:
            pass
        await decoder.say(drop=room)
        async with asyncio.timeout(SECONDS):
            logs = [await described(stage) for stage in stages]
            while logs[0].open_rooms or logs[0].num_confirmed < logs[0].num_received:
                logs = [await described(stage) for stage in stages]
    first, last = logs
    assert first.num_applied > 1
    assert (first.rank, last.rank) == (0, 1)
    assert first.generation == last.generation == stages[0].generation
    for log in logs:
        assert (log.num_received, log.num_applied, log.num_confirmed) == (first.num_applied,) * 3
        assert log.digest == log.confirmed_digest == first.digest
        assert (log.lag_steps, log.open_rooms, log.HasField("age")) == (0, 0, False)


async def described(stage: Stage) -> pb.DescribeLogResponse:
    async with dial(stage.address) as channel:
        return await PrefillServiceStub(channel).DescribeLog(pb.DescribeLogRequest())


class ListeningRegistry(BootstrapServiceServicer):
    """Admits nobody; keeps the load that a stage tells."""

    def __init__(self) -> None:
        self.told: asyncio.Queue[bootstrap_pb2.Heartbeat] = asyncio.Queue()

    async def RegisterStage(  # noqa: N802
        self, requests: AsyncIterator[bootstrap_pb2.RegisterStageRequest], _: grpc.aio.ServicerContext
    ) -> AsyncIterator[bootstrap_pb2.RegisterStageResponse]:
        async for request in requests:
            if request.HasField("heartbeat"):
                self.told.put_nowait(request.heartbeat)
        yield bootstrap_pb2.RegisterStageResponse()


async def test_a_stage_that_waits_for_its_pipeline_tells_an_idle_pool(tmp_path: Path, tiny_model_dir: Path) -> None:
    """F-T6: else its first rooms count as waiting, and all go to another pipeline until its next heartbeat."""
    server, registry = grpc.aio.server(), ListeningRegistry()
    add_BootstrapServiceServicer_to_server(registry, server)
    where = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    flags = ("--bootstrap", where, "--pp-size", "2", "--rank", "0", *sizes(tiny_model_dir))
    try:
        async with service("prefill", tmp_path / "p0.log", *flags):
            first = await asyncio.wait_for(registry.told.get(), SECONDS)
            assert (first.free_pages, first.waiting_rooms, first.queued_tokens) == (16, 0, 0)
    finally:
        await server.stop(None)


async def test_a_stage_that_leaves_lets_its_pipeline_finish(tmp_path: Path, tiny_model_dir: Path) -> None:
    """F-D14: SIGTERM on rank 1, with a room under way."""
    async with pipeline(tmp_path, tiny_model_dir, pp_size=2) as made:
        async with played(made.stages[0]) as decoder:
            await decoder.link()
            await decoder.control()
            await decoder.say(admit=pb.Admit(room=5, tokens=PROMPT))
            await decoder.frame()
            made.stages[1].running.process.send_signal(signal.SIGTERM)
            await pictured(made.registry, lambda view: view.seats[0].load.draining)
            await decoder.say(admit=pb.Admit(room=6, tokens=PROMPT))
            refused_room = (await decoder.answer()).refused
            assert (refused_room.room, refused_room.reason) == (6, "draining")
            await decoder.say(drop=5)
            with pytest.raises(Unavailable) as caught:
                await decoder.answer()
            assert caught.value.reason == "draining"
        assert await made.stages[1].running.ended() == 0


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--layers", "0:99"), "layers"),
        (("--model", "/nowhere/model"), "/nowhere/model"),
    ],
)
async def test_a_bad_setting_is_one_line_that_names_it(tiny_model_dir: Path, flags: tuple[str, ...], says: str) -> None:
    base = () if "--model" in flags else ("--model", str(tiny_model_dir))
    code, said = await refused("prefill", "--bootstrap", "127.0.0.1:1", *base, *flags)
    assert code == 2
    assert said.count("\n") == 1, said
    assert says in said


async def test_a_stage_that_does_not_fit_its_peers_exits_3_with_both_values(
    tmp_path: Path, tiny_model_dir: Path
) -> None:
    """F-M1"""
    async with service("bootstrap", tmp_path / "r.log", "--state-dir", str(tmp_path / "state")) as registry:
        flags = ("--bootstrap", registry.address, "--pp-size", "2", *sizes(tiny_model_dir))
        async with service("prefill", tmp_path / "p1.log", "--rank", "1", *flags):
            async with service("prefill", tmp_path / "p0.log", "--rank", "0", *flags, "--page-size", "8") as misfit:
                assert await misfit.ended() == 3
            line = misfit.log.read_text().splitlines()[-1]
            assert "page_size" in line
            assert "8" in line
            assert "4" in line
