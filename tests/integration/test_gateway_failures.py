"""Rooms are lost, peers are away, clients leave: no token twice, none missing, nothing left behind."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from prometheus_client import generate_latest

from kvmesh.errors import (
    Corrupt,
    DeadlineExceeded,
    DuplicateRoom,
    Fault,
    Fenced,
    Full,
    InvalidInput,
    KvmeshError,
    Unavailable,
)
from kvmesh.model.files import ModelFiles
from kvmesh.rpc.channels import dial
from kvmesh.rpc.status import from_rpc_error
from kvmesh.telemetry import metrics
from kvmesh.v1 import decode_pb2
from kvmesh.v1 import inference_pb2 as pb
from kvmesh.v1.bootstrap_pb2_grpc import add_BootstrapServiceServicer_to_server
from kvmesh.v1.decode_pb2_grpc import add_DecodeServiceServicer_to_server
from kvmesh.v1.inference_pb2_grpc import InferenceServiceStub
from services.gateway.config import GatewaySettings
from tests.integration.gateway_mesh import (
    FIRST_MORE,
    FakeDecoder,
    FakeRegistry,
    GatewayMesh,
    Responses,
    gateway_mesh,
    hangs,
    never,
    refuses,
    sample,
    says,
    sends,
    served,
    serving,
    text_of,
    tokens_of,
    write_text_model,
)

TEXT = "é€😀 the end".encode()


@pytest.fixture
def files(tmp_path: Path) -> ModelFiles:
    return write_text_model(tmp_path)


@pytest.fixture
async def mesh(files: ModelFiles) -> AsyncIterator[GatewayMesh]:
    async with gateway_mesh(files) as mesh:
        yield mesh


async def collected(call: Any) -> list[pb.GenerateResponse]:
    return [response async for response in call]


async def error_of(mesh: GatewayMesh, **request: Any) -> KvmeshError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await mesh.generate(**request)
    return from_rpc_error(caught.value)


# Lost rooms.


@pytest.mark.parametrize("lose_at", range(len(TEXT)))
@pytest.mark.parametrize("together", [1, 3])
async def test_a_room_lost_at_any_token_is_replayed_with_no_token_twice(
    mesh: GatewayMesh, lose_at: int, together: int
) -> None:
    """F-R5: with a new room and the whole request."""
    mesh.decoder.scripts = [says(TEXT, together=together, lose_at=lose_at), says(TEXT, together=together)]
    responses = await mesh.generate(prompt="x", max_output_tokens=100, seed=3)
    assert tokens_of(responses) == list(TEXT)
    assert text_of(responses) == TEXT.decode()
    assert responses[-1].timing.attempts == 2
    assert list(responses[-1].timing.failed_attempts) == ["stage_lost"]
    first, second = mesh.decoder.requests
    assert list(mesh.registry.requests[-1].lost_decoders) == [first.assignment.decoder.incarnation]
    assert list(mesh.registry.requests[-1].lost_generations) == [first.assignment.generation]
    assert list(second.output_so_far) == list(TEXT[:lose_at])
    assert first.assignment.room != second.assignment.room
    assert (second.prompt, second.max_output_len, second.sampling) == (first.prompt, 100, first.sampling)
    asked = mesh.registry.requests[1]
    assert (asked.prompt_len, asked.max_output_len) == (1 + lose_at, 100 - lose_at)


@pytest.mark.parametrize(
    "error",
    [
        Unavailable("x", reason="stage_lost"),
        Unavailable("x", reason="handed_over"),
        Fenced("x", reason="stale_term"),
        Corrupt("x"),
        Fault("x"),
        Full("x"),
    ],
    ids=lambda error: f"{type(error).__name__}-{error.reason}",
)
async def test_what_a_new_room_can_cure_gets_one(mesh: GatewayMesh, error: KvmeshError) -> None:
    mesh.decoder.scripts = [says(b"abc", lose_at=1, error=error), says(b"abc")]
    assert text_of(await mesh.generate(prompt="x")) == "abc"


@pytest.mark.parametrize("error", [InvalidInput("x", field="prompt"), DuplicateRoom("x"), DeadlineExceeded("x")])
async def test_what_a_new_room_can_not_cure_goes_to_the_client(mesh: GatewayMesh, error: KvmeshError) -> None:
    mesh.decoder.scripts = [says(b"abc", lose_at=1, error=error), says(b"abc")]
    assert type(await error_of(mesh, prompt="x")) is type(error)
    assert len(mesh.decoder.requests) == 1


async def test_after_three_rooms_the_client_hears_the_reason(mesh: GatewayMesh) -> None:
    mesh.decoder.scripts = [says(b"abc", lose_at=2, error=Fenced("meant for another", reason="stale_term"))]
    error = await error_of(mesh, prompt="x")
    assert isinstance(error, Unavailable)
    assert error.reason == "stale_term"
    assert len(mesh.decoder.requests) == 3


@pytest.mark.parametrize(("made_up", "heard"), [("moon_is_full_{}", "moon_is_full_c"), ("Jane Doe {}", "other")])
async def test_no_peer_s_words_become_series(mesh: GatewayMesh, made_up: str, heard: str) -> None:
    lost = [Unavailable("x", reason=made_up.format(n)) for n in "abc"]
    mesh.decoder.scripts = [says(b"abc", lose_at=1, error=error) for error in lost]
    before = sample("kvmesh_attempts_failed_total", reason="other")
    assert (await error_of(mesh, prompt="x")).reason == heard, "whoever asked hears the word"
    assert sample("kvmesh_attempts_failed_total", reason="other") == before + 3
    page = generate_latest(metrics.page_of("gateway")).decode()
    assert "moon" not in page
    assert "Jane" not in page


@pytest.mark.parametrize(
    "script",
    [
        sends((1, b"a")),
        sends((0, b"a"), (0, b"a")),
        sends((0, b"a"), (2, b"c")),
        sends((0, b"")),
        sends((0, b"abcdefgh")),
        sends((0, b"a")),
        sends(),
    ],
    ids=["ahead", "twice", "gap", "empty", "too-many", "short", "nothing"],
)
async def test_a_decoder_that_breaks_the_order_loses_the_room(mesh: GatewayMesh, script: Any) -> None:
    mesh.decoder.scripts = [script, says(b"abc")]
    responses = await mesh.generate(prompt="x", max_output_tokens=3)
    assert tokens_of(responses) == list(b"abc")
    assert responses[-1].timing.attempts == 2


async def test_after_the_last_token_no_status_matters(mesh: GatewayMesh) -> None:
    async def script(request: decode_pb2.GenerateRoomRequest) -> Responses:
        async for response in says(b"abc")(request):
            yield response
        raise Unavailable("too late", reason="stage_lost")

    mesh.decoder.scripts = [script]
    responses = await mesh.generate(prompt="x")
    assert tokens_of(responses) == list(b"abc")
    assert responses[-1].timing.attempts == 1


async def test_all_tokens_without_a_finish_are_a_whole_answer(mesh: GatewayMesh) -> None:
    mesh.decoder.scripts = [sends((0, b"ab"), (2, b"c"))]
    responses = await mesh.generate(prompt="x", max_output_tokens=3)
    assert tokens_of(responses) == list(b"abc")


async def test_a_stop_string_spread_over_two_rooms_is_found(mesh: GatewayMesh) -> None:
    mesh.decoder.scripts = [says(b"abSTOPcd", lose_at=4), says(b"abSTOPcd")]
    responses = await mesh.generate(prompt="x", stop=["STOP"])
    assert text_of(responses) == "ab"


async def test_one_attempt_is_open_at_a_time(mesh: GatewayMesh) -> None:
    seen = []

    async def lost(request: decode_pb2.GenerateRoomRequest) -> Responses:
        seen.append(mesh.decoder.open)
        async for response in says(b"abc", lose_at=1)(request):
            yield response

    mesh.decoder.scripts = [lost]
    await error_of(mesh, prompt="x")
    assert seen == [1, 1, 1]


async def test_a_decoder_that_is_away_is_replaced_by_another(mesh: GatewayMesh) -> None:
    gone = FakeDecoder(5)
    gone.address = "127.0.0.1:1"

    async def place_on_gone(request: Any) -> Any:
        assignment = await mesh.registry.place(request)
        assignment.decoder.CopyFrom(gone.member)
        return assignment

    mesh.registry.assigns = [place_on_gone]
    responses = await mesh.generate(prompt="x")
    assert responses[-1].timing.attempts == 2


async def test_a_replay_may_go_to_another_decoder(mesh: GatewayMesh) -> None:
    other = await mesh.decoder_at(6)
    other.scripts = [says(b"abcdef")]
    mesh.decoder.scripts = [says(b"abcdef", lose_at=3)]
    first = mesh.decoder

    async def place_on_other(request: Any) -> Any:
        assignment = await mesh.registry.place(request)
        assignment.decoder.CopyFrom(other.member)
        return assignment

    mesh.registry.assigns = [mesh.registry.place, place_on_other]
    assert tokens_of(await mesh.generate(prompt="x")) == list(b"abcdef")
    assert (len(first.requests), len(other.requests)) == (1, 1)


# The registry.


@pytest.mark.parametrize(
    "error",
    [
        Unavailable("no pair", reason="no_pair", retry_after_seconds=1.5),
        Full("every queue is full", reason="full", retry_after_seconds=0.5),
    ],
)
async def test_what_the_registry_says_of_a_new_request_is_for_the_client(mesh: GatewayMesh, error: KvmeshError) -> None:
    mesh.registry.assigns = [refuses(error)]
    got = await error_of(mesh, prompt="x")
    assert (type(got), got.reason, got.retry_after_seconds) == (type(error), error.reason, error.retry_after_seconds)
    assert len(mesh.registry.requests) == 1


async def test_a_replay_asks_again_when_no_pair_stands(mesh: GatewayMesh) -> None:
    mesh.decoder.scripts = [says(b"abc", lose_at=1), says(b"abc")]
    mesh.registry.assigns = [mesh.registry.place, refuses(Unavailable("no pair", reason="no_pair"))]
    responses = await mesh.generate(prompt="x")
    assert tokens_of(responses) == list(b"abc")
    assert responses[-1].timing.attempts == 2, "an attempt is a room"


async def test_a_registry_that_is_away_is_waited_for(files: ModelFiles) -> None:
    decoder = FakeDecoder()
    registry = FakeRegistry(decoder)
    async with served(add_BootstrapServiceServicer_to_server, registry) as bootstrap:
        port = int(bootstrap.rpartition(":")[2])
    settings = GatewaySettings(bootstrap=bootstrap, model="bytes")
    async with serving(files, settings) as (address, _, _), dial(address) as channel:
        call = InferenceServiceStub(channel).Generate(pb.GenerateRequest(prompt="x"), timeout=20)
        answer = asyncio.ensure_future(collected(call))
        await asyncio.wait({answer}, timeout=0.5)
        assert not answer.done()
        async with (
            served(add_DecodeServiceServicer_to_server, decoder) as decoder.address,
            served(add_BootstrapServiceServicer_to_server, registry, port),
        ):
            assert text_of(await answer) == "hello\0"
    assert len(registry.requests) == 1


async def test_a_registry_that_holds_the_call_is_left_at_the_deadline(mesh: GatewayMesh) -> None:
    mesh.registry.assigns = [never()]
    error = await error_of(mesh, prompt="x", seconds=0.3)
    assert isinstance(error, DeadlineExceeded)


# Clients that leave, and time that ends.


async def test_cancelling_the_call_ends_the_room_at_once(mesh: GatewayMesh) -> None:
    mesh.decoder.scripts = [hangs(b"abc")]
    before = sample("kvmesh_requests_total", code="CANCELLED")
    call = mesh.stub.Generate(pb.GenerateRequest(prompt="x"))
    assert (await call.read()).text == "abc"
    assert sample("kvmesh_rooms_open") == sample("kvmesh_requests_open") == 1
    call.cancel()
    await asyncio.wait_for(mesh.decoder.idle.wait(), 1)
    assert sample("kvmesh_requests_total", code="CANCELLED") == before + 1


async def test_cancelling_before_the_first_token_ends_the_room(mesh: GatewayMesh) -> None:
    mesh.decoder.scripts = [hangs()]
    call = mesh.stub.Generate(pb.GenerateRequest(prompt="x"))
    await asyncio.wait_for(mesh.decoder.started.wait(), 5)
    call.cancel()
    await asyncio.wait_for(mesh.decoder.idle.wait(), 1)


async def test_cancelling_while_the_registry_holds_the_call_asks_no_decoder(mesh: GatewayMesh) -> None:
    mesh.registry.assigns = [never()]
    call = mesh.stub.Generate(pb.GenerateRequest(prompt="x"))
    await asyncio.wait_for(mesh.registry.asked.wait(), 5)
    call.cancel()
    await mesh.generate(prompt="x")
    assert len(mesh.decoder.requests) == 1


async def test_a_client_that_disconnects_ends_its_room(mesh: GatewayMesh) -> None:
    mesh.decoder.scripts = [hangs(b"abc")]
    async with dial(mesh.address) as channel:
        call = InferenceServiceStub(channel).Generate(pb.GenerateRequest(prompt="x"))
        await call.read()
    await asyncio.wait_for(mesh.decoder.idle.wait(), 1)


async def test_a_third_of_many_requests_cancelled_leaves_the_others_right(mesh: GatewayMesh) -> None:
    mesh.decoder.scripts = [says(TEXT * 20)]

    async def one(index: int) -> None:
        call = mesh.stub.Generate(pb.GenerateRequest(prompt="x" * (index + 1)), timeout=30)
        if index % 3 == 0:
            for _ in range(index // 3):
                await call.read()
            call.cancel()
        else:
            assert tokens_of([r async for r in call]) == list((TEXT * 20)[:256])

    await asyncio.gather(*map(one, range(32)))


async def test_the_clients_deadline_ends_the_room(mesh: GatewayMesh) -> None:
    """F-T3: the one deadline of the request ends what runs for it elsewhere."""
    mesh.decoder.scripts = [hangs(b"abc")]
    assert isinstance(await error_of(mesh, prompt="x", seconds=0.3), DeadlineExceeded)
    await asyncio.wait_for(mesh.decoder.idle.wait(), 1)


async def test_no_room_is_asked_for_that_would_come_after_the_deadline(mesh: GatewayMesh) -> None:
    late = Unavailable("come back", reason="stage_lost", retry_after_seconds=30.0)
    mesh.decoder.scripts = [says(b"abc", lose_at=1, error=late)]
    error = await error_of(mesh, prompt="x", seconds=5)
    assert (type(error), error.retry_after_seconds) == (Unavailable, 30.0)
    assert len(mesh.decoder.requests) == 1


async def test_without_a_deadline_of_the_client_the_setting_ends_the_request(files: ModelFiles) -> None:
    async with gateway_mesh(files, request_seconds=0.3) as mesh:
        mesh.decoder.scripts = [hangs(b"abc")]
        call = mesh.stub.Generate(pb.GenerateRequest(prompt="x"))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await collected(call)
        assert isinstance(from_rpc_error(caught.value), DeadlineExceeded)
        await asyncio.wait_for(mesh.decoder.idle.wait(), 1)


async def test_a_longer_deadline_of_the_client_counts(files: ModelFiles) -> None:
    async with gateway_mesh(files, request_seconds=0.1) as mesh:
        mesh.decoder.scripts = [hangs(b"abc")]
        call = mesh.stub.Generate(pb.GenerateRequest(prompt="x"), timeout=20)
        await call.read()
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(call.read(), 0.5)


async def test_a_client_that_does_not_read_is_ended_by_the_deadline(tmp_path: Path) -> None:
    # Far more than what both ends of a connection take in advance.
    files = write_text_model(tmp_path, more=["\u65e5" * 1000])
    async with gateway_mesh(files, request_seconds=1.0) as mesh:
        mesh.decoder.scripts = [says([FIRST_MORE] * 100_000, together=100)]
        call = mesh.stub.Generate(pb.GenerateRequest(prompt="x", max_output_tokens=100_000))
        await asyncio.wait_for(mesh.decoder.started.wait(), 5)
        # The gateway leaves once nothing is open, and still the client has read nothing.
        mesh.life.draining.set()
        await asyncio.wait_for(asyncio.shield(mesh.ended), 10)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await collected(call)
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED


# Leaving.


async def test_a_gateway_that_leaves_answers_what_it_has_and_takes_nothing_new(mesh: GatewayMesh) -> None:
    go_on = asyncio.Event()

    async def waits(request: decode_pb2.GenerateRoomRequest) -> Responses:
        await go_on.wait()
        async for response in says(b"abc")(request):
            yield response

    mesh.decoder.scripts = [waits]
    running = asyncio.ensure_future(mesh.generate(prompt="x"))
    await asyncio.wait_for(mesh.decoder.started.wait(), 5)
    mesh.life.draining.set()
    error = await error_of(mesh, prompt="x")
    assert (type(error), error.reason) == (Unavailable, "draining")
    assert not mesh.ended.done()
    go_on.set()
    assert text_of(await running) == "abc"
    await asyncio.wait_for(asyncio.shield(mesh.ended), 5)
