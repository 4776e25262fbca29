"""What a gateway passes on, to its decoders and to its client, and what it does without a registry."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from kvmesh.errors import DeadlineExceeded, InvalidInput, Unavailable
from kvmesh.model.files import ModelFiles
from kvmesh.rpc.channels import dial
from kvmesh.rpc.status import from_rpc_error
from kvmesh.v1 import decode_pb2
from kvmesh.v1 import inference_pb2 as pb
from kvmesh.v1.decode_pb2_grpc import add_DecodeServiceServicer_to_server
from kvmesh.v1.inference_pb2_grpc import InferenceServiceStub
from services.gateway.config import GatewaySettings
from tests.integration.gateway_mesh import (
    FakeDecoder,
    GatewayMesh,
    Responses,
    gateway_mesh,
    hangs,
    says,
    served,
    serving,
    write_text_model,
)


@pytest.fixture
def files(tmp_path: Path) -> ModelFiles:
    return write_text_model(tmp_path)


@pytest.fixture
async def mesh(files: ModelFiles) -> AsyncIterator[GatewayMesh]:
    async with gateway_mesh(files) as mesh:
        yield mesh


class TimedDecoder(FakeDecoder):
    """Notes how much time each room is given."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds: list[float] = []

    async def GenerateRoom(self, request: decode_pb2.GenerateRoomRequest, context: Any) -> Responses:  # noqa: N802
        self.seconds.append(context.time_remaining())
        async for response in super().GenerateRoom(request, context):
            yield response


async def test_every_room_of_a_request_is_given_what_is_left_of_the_clients_time(mesh: GatewayMesh) -> None:
    """F-T3: one deadline, the same for each attempt on whichever decoder; nobody adds a limit of its own."""
    decoder = TimedDecoder()
    lost = Unavailable("the stage is lost", reason="stage_lost", retry_after_seconds=0.5)
    decoder.scripts = [says(b"abc", lose_at=1, error=lost), says(b"abc")]
    async with served(add_DecodeServiceServicer_to_server, decoder) as decoder.address:
        mesh.registry.decoder = decoder
        await mesh.generate(prompt="x", seconds=15)
        first, second = decoder.seconds
    assert 14 < first < 15.1, "gRPC rounds what it tells"
    assert second < first - 0.4


async def test_the_first_token_reaches_the_client_while_the_room_goes_on(mesh: GatewayMesh) -> None:
    """F-O8"""
    mesh.decoder.scripts = [hangs(b"a")]
    call = mesh.stub.Generate(pb.GenerateRequest(prompt="x"), timeout=20)
    response = await call.read()
    assert isinstance(response, pb.GenerateResponse)
    assert (list(response.tokens), mesh.decoder.open) == ([*b"a"], 1)
    call.cancel()


async def test_several_samples_of_one_request_are_refused_and_mint_no_room(mesh: GatewayMesh) -> None:
    """F-R1"""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await mesh.generate(prompt="x", n=4)
    error = from_rpc_error(caught.value)
    assert isinstance(error, InvalidInput)
    assert error.field == "n"
    assert mesh.registry.requests == []


async def test_without_a_registry_a_gateway_is_not_ready_and_a_request_ends_in_its_own_time(files: ModelFiles) -> None:
    """F-N6"""
    settings = GatewaySettings(bootstrap="127.0.0.1:1", model="bytes")
    async with serving(files, settings) as (address, life, _), dial(address) as channel:
        stub = InferenceServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.ListModels(pb.ListModelsRequest(), timeout=5)
        assert isinstance(from_rpc_error(caught.value), Unavailable)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Generate(pb.GenerateRequest(prompt="x"), timeout=0.3).read()
        assert isinstance(from_rpc_error(caught.value), DeadlineExceeded)
        assert not (life.ready and life.ready[0])
