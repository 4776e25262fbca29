"""A decoder as a real process, with a real registry; the tests play its pipeline and its gateway."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from pipeline_player import PlayedPipeline, played_pipeline
from registry_players import SECONDS, assign, read_metrics
from service_process import end_in_background, start_in_background

from kvmesh.errors import DeadlineExceeded, Fenced, Unavailable
from kvmesh.rpc.channels import dial
from kvmesh.rpc.status import peer_errors
from kvmesh.v1 import bootstrap_pb2, decode_pb2
from kvmesh.v1 import prefill_pb2 as pb
from kvmesh.v1.bootstrap_pb2_grpc import BootstrapServiceStub
from kvmesh.v1.decode_pb2_grpc import DecodeServiceStub
from kvmesh.v1.types_pb2 import FINISH_REASON_LENGTH, RoomAssignment

PROMPT = [5, 9, 200, 17, 33, 80]
PLACES, NUM_PAGES = 4, 64


@dataclass
class Decoder:
    """The process, and who it registered with."""

    registry: str
    address: str
    health: str
    metrics: str
    model: Path
    log: Path


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory, tiny_model_dir: Path) -> Iterator[Decoder]:
    tmp = tmp_path_factory.mktemp("decoder")
    flags = ("--state-dir", str(tmp / "state"), "--lease-seconds", "30")  # a long lease, since players do not beat
    registry, said = start_in_background("bootstrap", tmp / "registry.log", *flags)
    sizes = ("--num-pages", str(NUM_PAGES), "--page-size", "4", "--max-running-rooms", str(PLACES))
    flags = ("--bootstrap", said["address"], "--model", str(tiny_model_dir), *sizes)
    process, own = start_in_background("decode", tmp / "decode.log", *flags)
    yield Decoder(said["address"], own["address"], own["health"], own["metrics"], tiny_model_dir, tmp / "decode.log")
    assert [end_in_background(p) for p in (process, registry)] == [0, 0]


@dataclass
class Paired:
    """The decoder with a played pipeline."""

    decoder: Decoder
    registry: BootstrapServiceStub
    rooms: DecodeServiceStub
    pipeline: PlayedPipeline

    async def assigned(self) -> RoomAssignment:
        """A room for the prompt and four tokens."""
        return await assign(self.registry, prompt_len=len(PROMPT), max_output_len=4)

    def generate(self, assignment: RoomAssignment, seconds: float = SECONDS) -> Any:
        request = decode_pb2.GenerateRoomRequest(assignment=assignment, prompt=PROMPT, max_output_len=4)
        return self.rooms.GenerateRoom(request, timeout=seconds)

    async def loaded(self, wanted: Callable[[bootstrap_pb2.Heartbeat], bool]) -> None:
        """Waits for a load that the decoder tells."""
        await pictured(self.registry, lambda picture: wanted(picture.decoders[0].load))


@asynccontextmanager
async def paired(decoder: Decoder, num_shards: int = 1) -> AsyncIterator[Paired]:
    async with dial(decoder.registry) as registry, dial(decoder.address) as own:
        stub = BootstrapServiceStub(registry)
        async with played_pipeline(stub, decoder.model, num_shards=num_shards) as pipeline:
            yield Paired(decoder, stub, DecodeServiceStub(own), pipeline)
        await pictured(stub, lambda picture: not picture.decoders[0].load.paired_generations)


async def pictured(stub: BootstrapServiceStub, wanted: Callable[[bootstrap_pb2.WatchMeshResponse], bool]) -> None:
    async with asyncio.timeout(SECONDS):
        async for picture in stub.WatchMesh(bootstrap_pb2.WatchMeshRequest()):
            if picture.decoders and wanted(picture):
                return


async def health_of(decoder: Decoder) -> dict[str, bool]:
    async with dial(decoder.health) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        asked = {name: health_pb2.HealthCheckRequest(service=name) for name in ("liveness", "readiness")}
        serving = health_pb2.HealthCheckResponse.SERVING
        return {name: (await stub.Check(request, timeout=5)).status == serving for name, request in asked.items()}


async def metrics_of(decoder: Decoder) -> dict[str, float]:
    """Values of the page, by name and labels."""
    page = await asyncio.to_thread(read_metrics, decoder.metrics)
    lines = [line.rpartition(" ") for line in page.splitlines() if line.startswith("kvmesh_")]
    return {name: float(value) for name, _, value in lines}


async def tokens_of(call: Any) -> list[decode_pb2.GenerateRoomResponse]:
    with peer_errors("the decoder"):
        return [response async for response in call]


async def test_a_stage_that_will_send_what_was_not_asked_for_is_not_paired_with(decoder: Decoder) -> None:
    async with dial(decoder.registry) as registry:
        stub = BootstrapServiceStub(registry)
        async with played_pipeline(stub, decoder.model, kv_wire="int8") as pipeline:
            said = f"kv_wire: decoder asks for auto, rank 0 of played{pipeline.number} sends int8"
            async with asyncio.timeout(SECONDS):
                while said not in decoder.log.read_text():  # noqa: ASYNC110 - another process writes it
                    await asyncio.sleep(0.05)
            assert not [m for m in pipeline.heard if m.WhichOneof("message") == "admit"]
        await pictured(stub, lambda picture: not picture.decoders[0].load.paired_generations)


async def test_health_needs_no_pipeline(decoder: Decoder) -> None:
    """F-O3"""
    async with dial(decoder.registry) as channel:
        await pictured(BootstrapServiceStub(channel), lambda picture: not picture.pipelines)
    assert await health_of(decoder) == {"liveness": True, "readiness": True}


async def test_a_decoder_whose_only_pipeline_is_gone_stays_alive_and_pairs_with_the_next(decoder: Decoder) -> None:
    """F-D1, F-D3"""
    async with paired(decoder) as first:
        await first.assigned()
    assert await health_of(decoder) == {"liveness": True, "readiness": True}
    async with paired(decoder) as second:
        assert (await second.assigned()).pipeline == f"played{second.pipeline.number}"


async def test_tokens_come_without_any_answer_of_the_pipeline_but_kv(decoder: Decoder) -> None:
    """F-O8: rank 0 says nothing on control unless it refuses."""
    async with paired(decoder) as mesh:
        assignment = await mesh.assigned()
        call = mesh.generate(assignment)
        (message,) = await mesh.pipeline.hear("admit")
        assert (message.admit.room, list(message.admit.tokens)) == (assignment.room, PROMPT)
        mesh.pipeline.send_first_token(assignment.room, 42)
        mesh.pipeline.send_kv(assignment.room, len(PROMPT))
        responses = await tokens_of(call)
        assert responses[0].tokens[0] == 42
        assert sum(len(r.tokens) for r in responses) == 4
        assert responses[-1].finish_reason == FINISH_REASON_LENGTH
        assert (await mesh.pipeline.hear("received"))[0].received == assignment.room


async def test_a_pipeline_that_sends_nothing_shows_in_the_metrics(decoder: Decoder) -> None:
    """F-O4: rooms are open, and no frame and no token comes. A rule over both sees the stall."""
    async with paired(decoder) as mesh:
        before = await metrics_of(decoder)
        calls = [mesh.generate(await mesh.assigned()) for _ in range(PLACES)]
        await mesh.pipeline.hear("admit", PLACES)
        now = await metrics_of(decoder)
        assert now["kvmesh_rooms_open"] == PLACES
        still = [n for n in now if n.startswith(("kvmesh_frames_total", "kvmesh_decode_tokens_total"))]
        assert still
        assert all(now[name] == before.get(name, 0) for name in still)
        for call in calls:
            call.cancel()
        await mesh.pipeline.hear("drop", PLACES)
        now = await metrics_of(decoder)
        assert (now["kvmesh_rooms_open"], now['kvmesh_pages{state="free"}']) == (0, NUM_PAGES)


async def test_whoever_waits_for_a_place_shows_in_the_metrics_and_leaves_them_again(decoder: Decoder) -> None:
    """F-K3"""
    async with paired(decoder) as mesh:
        calls = [mesh.generate(await mesh.assigned()) for _ in range(10)]
        await mesh.loaded(lambda load: (load.running_rooms, load.waiting_rooms) == (PLACES, 10 - PLACES))
        now = await metrics_of(decoder)
        assert (now["kvmesh_rooms_open"], now["kvmesh_rooms_waiting"]) == (10, 10 - PLACES)
        for call in reversed(calls):
            call.cancel()
        await mesh.loaded(lambda load: (load.running_rooms, load.waiting_rooms) == (0, 0))
        now = await metrics_of(decoder)
        assert (now["kvmesh_rooms_open"], now["kvmesh_rooms_waiting"]) == (0, 0)


async def test_a_room_whose_pipeline_stays_silent_ends_by_the_requests_deadline_and_the_pipeline_is_told(
    decoder: Decoder,
) -> None:
    """F-T3, F-T7: also one that still waits for a place."""
    async with paired(decoder) as mesh:
        first = [mesh.generate(await mesh.assigned()) for _ in range(PLACES)]
        admitted = await mesh.pipeline.hear("admit", PLACES)
        waiting = mesh.generate(await mesh.assigned(), seconds=0.5)
        with pytest.raises(DeadlineExceeded):
            await tokens_of(waiting)
        await mesh.loaded(lambda load: (load.running_rooms, load.waiting_rooms) == (PLACES, 0))
        for call in first[1:]:
            call.cancel()
        await mesh.pipeline.hear("drop", PLACES - 1)
        second = mesh.generate(await mesh.assigned(), seconds=0.5)
        with pytest.raises(DeadlineExceeded):
            await tokens_of(second)
        first[0].cancel()
        dropped = await mesh.pipeline.hear("drop", PLACES + 1)
        assert {m.drop for m in dropped} == {m.admit.room for m in await mesh.pipeline.hear("admit", PLACES + 1)}
        assert {m.admit.room for m in admitted} < {m.drop for m in dropped}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda a: setattr(a.decoder, "incarnation", a.decoder.incarnation ^ 2), "fenced"),
        (lambda a: setattr(a, "generation", a.generation + 1), "not_paired"),
    ],
    ids=["decoder", "generation"],
)
async def test_a_room_that_the_registry_gave_to_another_is_refused(
    decoder: Decoder, change: Callable[[RoomAssignment], None], reason: str
) -> None:
    """F-M5: the owner is a fact of the registry's answer; nobody computes it again."""
    async with paired(decoder) as mesh:
        right, wrong = await mesh.assigned(), await mesh.assigned()
        change(wrong)
        with pytest.raises(Fenced) as caught:
            await tokens_of(mesh.generate(wrong))
        assert caught.value.reason == reason
        call = mesh.generate(right)
        assert [m.admit.room for m in await mesh.pipeline.hear("admit")] == [right.room]
        call.cancel()
        await mesh.pipeline.hear("drop")


async def test_a_refusal_of_the_pipeline_reaches_the_caller_with_its_reason_past_a_message_of_an_unknown_kind(
    decoder: Decoder,
) -> None:
    """F-C8, F-A5"""
    async with paired(decoder) as mesh:
        call = mesh.generate(await mesh.assigned())
        (message,) = await mesh.pipeline.hear("admit")
        mesh.pipeline.say(pb.ControlResponse())
        refused = pb.RoomRefused(room=message.admit.room, reason="too_long", detail="7 prompt tokens")
        mesh.pipeline.say(pb.ControlResponse(refused=refused))
        with pytest.raises(Unavailable, match="7 prompt tokens") as caught:
            await tokens_of(call)
        assert caught.value.reason == "too_long"
        await mesh.loaded(lambda load: load.running_rooms == 0)


@pytest.mark.parametrize(("made_up", "heard"), [("moon_is_full", "moon_is_full"), ("Jane Doe\n" * 90, "other")])
async def test_a_made_up_refusal_becomes_no_series(decoder: Decoder, made_up: str, heard: str) -> None:
    async with paired(decoder) as mesh:
        call = mesh.generate(await mesh.assigned())
        (message,) = await mesh.pipeline.hear("admit")
        mesh.pipeline.say(pb.ControlResponse(refused=pb.RoomRefused(room=message.admit.room, reason=made_up)))
        with pytest.raises(Unavailable) as caught:
            await tokens_of(call)
        assert caught.value.reason == heard
        told = [key for key in await metrics_of(decoder) if key.startswith("kvmesh_rpc_errors_total")]
        assert [key for key in told if 'reason="other"' in key]
        assert not [key for key in told if "moon" in key or "Jane" in key]


async def test_a_room_whose_heads_come_in_two_shards_decodes_when_both_are_there(decoder: Decoder) -> None:
    async with paired(decoder, num_shards=2) as mesh:
        assignment = await mesh.assigned()
        call = mesh.generate(assignment)
        await mesh.pipeline.hear("admit")
        first, second = mesh.pipeline.heads
        mesh.pipeline.send_first_token(assignment.room, 42)
        mesh.pipeline.send_kv(assignment.room, len(PROMPT), [first])
        mesh.pipeline.send_kv(assignment.room, len(PROMPT), [first])  # a repeat does not stand for the other
        mesh.pipeline.send_kv(assignment.room, len(PROMPT), [second])
        assert sum(len(r.tokens) for r in await tokens_of(call)) == 4
        assert (await mesh.pipeline.hear("received"))[0].received == assignment.room
