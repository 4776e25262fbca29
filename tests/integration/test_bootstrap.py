"""The registry as a real process; the tests play stages, decoders and gateways over real gRPC."""

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from service_process import Running, refused, service

from kvmesh.errors import Fenced, InvalidInput, KvmeshError, Misfit, Unavailable
from kvmesh.protocol.ids import Term, term_of
from kvmesh.protocol.version import PROTOCOL_VERSION
from kvmesh.rpc import streams
from kvmesh.rpc.channels import dial
from kvmesh.rpc.status import peer_errors
from kvmesh.v1 import bootstrap_pb2 as pb
from kvmesh.v1 import types_pb2
from kvmesh.v1.bootstrap_pb2_grpc import BootstrapServiceStub
from services.bootstrap.term_file import TermFile

SECONDS = 15


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

    def __init__(self, stub: BootstrapServiceStub, rank: int, pp_size: int, pipeline: str = "p0") -> None:
        self.rank, self.pp_size = rank, pp_size
        self.registration = pb.StageRegistration(
            member=types_pb2.Member(incarnation=1000 + rank, address=f"host{rank}:1"),
            pipeline=pipeline,
            rank=rank,
            pp_size=pp_size,
            descriptor=descriptor(rank, pp_size),
        )
        self.call = stub.RegisterStage()

    async def register(self) -> "Stage":
        await streams.write(self.call, pb.RegisterStageRequest(registration=self.registration))
        return self

    async def hear(self, kind: str) -> pb.RegisterStageResponse:
        """The next directive, which must be of a kind."""
        with peer_errors("the registry"):
            async with asyncio.timeout(SECONDS):
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
            member=types_pb2.Member(incarnation=incarnation, address="decoder:1"), descriptor=descriptor()
        )
        self.call = stub.RegisterDecoder()

    async def register(self) -> "Decoder":
        await streams.write(self.call, pb.RegisterDecoderRequest(registration=self.registration))
        assert (await self.hear()).WhichOneof("directive") == "admitted"
        return self

    async def hear(self) -> pb.RegisterDecoderResponse:
        with peer_errors("the registry"):
            async with asyncio.timeout(SECONDS):
                message = await streams.read(self.call)
        assert message is not None
        return message

    async def pair(self) -> int:
        """Waits for a whole pipeline and says that it is paired with it."""
        while not (pipelines := (await self.hear()).pipelines.pipelines):
            pass
        await self.beat(paired_generations=[pipelines[0].generation])
        return int(pipelines[0].generation)

    async def beat(self, **load: object) -> None:
        await streams.write(self.call, pb.RegisterDecoderRequest(heartbeat=pb.Heartbeat(**load)))  # type: ignore[arg-type]


@asynccontextmanager
async def registry(directory: Path, *flags: str) -> AsyncIterator[tuple[Running, BootstrapServiceStub]]:
    # A long lease, since the players do not beat.
    flags = ("--lease-seconds", "30", *flags)
    started = service("bootstrap", directory / "log", "--state-dir", str(directory / "state"), *flags)
    async with started as running, dial(running.address) as channel:
        yield running, BootstrapServiceStub(channel)


async def whole(stub: BootstrapServiceStub, pp_size: int = 2) -> list[Stage]:
    """A pipeline, registered last rank first."""
    stages = [Stage(stub, rank, pp_size) for rank in range(pp_size)]
    for stage in reversed(stages):
        await stage.register()
        if stage.rank < pp_size - 1:
            order = (await stage.hear("link_next")).link_next
            await stage.linked(order.generation)
        await stage.hear("admitted")
    return stages


async def assign(stub: BootstrapServiceStub, seconds: float = SECONDS, **request: object) -> types_pb2.RoomAssignment:
    with peer_errors("the registry"):
        response = await stub.AssignRoom(pb.AssignRoomRequest(**({"prompt_len": 1} | request)), timeout=seconds)  # type: ignore[arg-type]
    return response.assignment


async def test_stages_are_held_until_the_next_higher_rank_is_in_and_told_whom_they_wait_for(tmp_path: Path) -> None:
    async with registry(tmp_path) as (_, stub):
        low = await Stage(stub, 0, 3).register()
        assert (await low.hear("wait_for")).wait_for.peer == "rank 1 of p0"
        middle = await Stage(stub, 1, 3).register()
        assert (await middle.hear("wait_for")).wait_for.peer == "rank 2 of p0"
        last = await Stage(stub, 2, 3).register()
        generation = (await last.hear("admitted")).admitted.generation
        order = (await middle.hear("link_next")).link_next
        assert (order.next.incarnation, order.next.address, order.generation) == (1002, "host2:1", generation)
        await middle.linked(generation)
        await middle.hear("admitted")
        assert (await low.hear("link_next")).link_next.next.incarnation == 1001
        await low.linked(generation)
        assert (await low.hear("admitted")).admitted.generation == generation


async def test_a_room_is_held_until_a_pair_stands(tmp_path: Path) -> None:
    async with registry(tmp_path) as (_, stub):
        waiting = asyncio.ensure_future(assign(stub))
        stages = await whole(stub)
        decoder = await Decoder(stub).register()
        generation = await decoder.pair()
        room = await waiting
        assert (room.pipeline, room.generation, room.decoder.incarnation) == ("p0", generation, 5000)
        assert term_of(room.room) == 1
        stages[0].call.cancel()


async def test_a_room_without_a_pair_ends_with_a_time_to_come_back(tmp_path: Path) -> None:
    async with registry(tmp_path, "--assign-wait-seconds", "0.2") as (_, stub):
        with pytest.raises(Unavailable) as caught:
            await assign(stub)
    assert caught.value.reason == "no_pair"
    assert caught.value.retry_after_seconds


async def test_the_callers_deadline_counts_when_it_is_shorter(tmp_path: Path) -> None:
    async with registry(tmp_path) as (_, stub):
        with pytest.raises(KvmeshError) as caught:
            await assign(stub, seconds=0.3)
    assert caught.value.reason in ("no_pair", "deadline")


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"rank": 2}, "rank"),
        ({"pp_size": 0}, "pp_size"),
        ({"pipeline": "P 0"}, "pipeline"),
        ({"pipeline": ""}, "pipeline"),
        ({"member": types_pb2.Member(address="a:1")}, "member.incarnation"),
        ({"member": types_pb2.Member(incarnation=1)}, "member.address"),
        ({"descriptor": None}, "descriptor"),
        ({"descriptor": descriptor(page_size=0)}, "descriptor.page_size"),
        ({"descriptor": descriptor(layers=types_pb2.LayerRange(begin=0, end=13))}, "descriptor.layers"),
        ({"descriptor": descriptor(model_fingerprint="")}, "descriptor.model_name"),
    ],
)
async def test_a_malformed_registration_names_its_field(tmp_path: Path, changes: dict[str, object], field: str) -> None:
    """F-R6, and the service goes on."""
    async with registry(tmp_path) as (_, stub):
        stage = Stage(stub, 0, 2)
        for name, value in changes.items():
            stage.registration.ClearField(name)  # type: ignore[arg-type]
            if isinstance(value, types_pb2.Member | types_pb2.Descriptor):
                getattr(stage.registration, name).CopyFrom(value)
            elif value is not None:
                setattr(stage.registration, name, value)
        await stage.register()
        with pytest.raises(InvalidInput) as caught:
            await stage.hear("admitted")
        assert caught.value.field == field
        assert await whole(stub)


async def test_a_misfit_is_refused_with_both_values(tmp_path: Path) -> None:
    """F-M1"""
    async with registry(tmp_path) as (_, stub):
        last = await Stage(stub, 1, 2).register()
        await last.hear("admitted")
        misfit = Stage(stub, 0, 2)
        misfit.registration.descriptor.page_size = 32
        await misfit.register()
        with pytest.raises(Misfit, match="page_size: rank 0 of p0 has 32, rank 1 has 16"):
            await misfit.hear("link_next")


async def test_a_stage_lost_while_registering_takes_back_what_was_admitted(tmp_path: Path) -> None:
    async with registry(tmp_path) as (_, stub):
        stages = [Stage(stub, rank, 3) for rank in range(3)]
        for stage in reversed(stages[1:]):
            await stage.register()
        await stages[2].hear("admitted")
        await stages[1].linked((await stages[1].hear("link_next")).link_next.generation)
        await stages[1].hear("admitted")
        stages[2].call.cancel()
        assert "rank 2 of p0 was lost" in (await stages[1].hear("withdrawn")).withdrawn.reason


async def test_a_restarted_registry_has_a_higher_term_and_seats_what_runs(tmp_path: Path) -> None:
    """F-D15: rooms never repeat, and the generation goes on."""
    async with registry(tmp_path) as (running, stub):
        await whole(stub)
        decoder = await Decoder(stub).register()
        generation = await decoder.pair()
        first = await assign(stub)
        running.process.kill()
    async with registry(tmp_path) as (_, stub):
        for rank in (0, 1):
            stage = Stage(stub, rank, 2)
            stage.registration.held_generation = generation
            stage.registration.highest_term = 1
            await stage.register()
            assert (await stage.hear("admitted")).term == 2
        decoder = await Decoder(stub).register()
        assert await decoder.pair() == generation
        second = await assign(stub)
    assert second.generation == generation
    assert (term_of(first.room), term_of(second.room)) == (1, 2)


async def test_a_stale_registry_ends_and_the_next_starts_above_the_term_it_heard(tmp_path: Path) -> None:
    async with registry(tmp_path) as (running, stub):
        stage = Stage(stub, 0, 1)
        stage.registration.highest_term = 7
        await stage.register()
        with pytest.raises(Fenced, match="term 7"):
            await stage.hear("admitted")
        assert await running.ended() == 4
    async with registry(tmp_path) as (_, stub):
        stage = await Stage(stub, 0, 1).register()
        assert (await stage.hear("admitted")).term == 8


async def test_two_registries_can_not_share_a_state_directory(tmp_path: Path) -> None:
    async with registry(tmp_path):
        code, said = await refused("bootstrap", "--state-dir", str(tmp_path / "state"))
    assert code == 2
    assert said.count("\n") == 1
    assert "held by another registry" in said


async def test_a_damaged_term_is_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / "term").write_text("nonsense\n")
    code, said = await refused("bootstrap", "--state-dir", str(tmp_path))
    assert (code, said.count("\n")) == (2, 1)
    assert "damaged" in said


async def test_a_heartbeat_longer_than_the_lease_is_refused_with_both_values(tmp_path: Path) -> None:
    code, said = await refused(
        "bootstrap", "--state-dir", str(tmp_path), "--lease-seconds", "1", "--heartbeat-seconds", "2"
    )
    assert code == 2
    assert "heartbeat_seconds is 2" in said
    assert "lease_seconds is 1" in said


async def test_the_picture_is_whole_at_once_and_follows(tmp_path: Path) -> None:
    async with registry(tmp_path) as (_, stub):
        watch = stub.WatchMesh(pb.WatchMeshRequest())
        pictures = watch.__aiter__()
        async with asyncio.timeout(SECONDS):
            empty = await anext(pictures)
            assert (empty.term, len(empty.pipelines), len(empty.decoders)) == (1, 0, 0)
            await whole(stub)
            while not (picture := await anext(pictures)).pipelines or not picture.pipelines[0].generation:
                pass
        seats = picture.pipelines[0].seats
        assert [seat.state for seat in seats] == [pb.SEAT_STATE_ADMITTED] * 2
        assert [seat.admitted_order for seat in seats] == [2, 1], "rank 1 before rank 0"
        assert picture.limits.model_name == "m"
        watch.cancel()


async def test_a_message_of_an_unknown_kind_is_passed_over(tmp_path: Path) -> None:
    """F-A5"""
    async with registry(tmp_path) as (_, stub):
        stage = await Stage(stub, 0, 1).register()
        await stage.hear("admitted")
        await streams.write(stage.call, pb.RegisterStageRequest())
        await stage.beat()
        decoder = await Decoder(stub).register()
        assert await decoder.pair()


async def test_a_lease_ends_when_nothing_is_heard(tmp_path: Path) -> None:
    async with registry(tmp_path, "--lease-seconds", "0.6", "--heartbeat-seconds", "0.2") as (_, stub):
        stage = await Stage(stub, 0, 1).register()
        await stage.hear("admitted")
        with pytest.raises(Unavailable) as caught:
            await stage.hear("admitted")
    assert caught.value.reason == "lease_expired"


async def test_sigterm_ends_the_leases_and_the_process(tmp_path: Path) -> None:
    async with registry(tmp_path) as (running, stub):
        stage = await Stage(stub, 0, 1).register()
        await stage.hear("admitted")
        assert await running.terminate() == 0
        with pytest.raises(Unavailable):
            await stage.hear("admitted")


def test_the_registry_starts_without_torch() -> None:
    code = "import sys, services.bootstrap.bootstrap; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=30, check=False).returncode == 0


def test_terms_rise_with_every_start(tmp_path: Path) -> None:
    for expected in (1, 2, 3):
        with TermFile(tmp_path) as held:
            assert held.term == Term(expected)
