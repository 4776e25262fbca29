"""The gateway as a process: how it starts, what it refuses to start with, how it ends."""

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvmesh.client import Client
from kvmesh.v1 import decode_pb2
from kvmesh.v1.bootstrap_pb2_grpc import add_BootstrapServiceServicer_to_server
from kvmesh.v1.decode_pb2_grpc import add_DecodeServiceServicer_to_server
from tests.integration.gateway_mesh import (
    FakeDecoder,
    FakeRegistry,
    picture_of,
    says,
    served,
    write_text_model,
)
from tests.integration.service_process import refused, service

ROOT = Path(__file__).parents[2]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = tmp_path / "bytes"
    directory.mkdir()
    write_text_model(directory)
    return directory


async def test_it_becomes_ready_answers_and_ends_well(model: Path, tmp_path: Path) -> None:
    decoder = FakeDecoder()
    registry = FakeRegistry(decoder)
    async with (
        served(add_DecodeServiceServicer_to_server, decoder) as decoder.address,
        served(add_BootstrapServiceServicer_to_server, registry) as bootstrap,
        service("gateway", tmp_path / "log", "--bootstrap", bootstrap, "--model", str(model)) as gateway,
        grpc.aio.insecure_channel(gateway.health) as health,
        asyncio.timeout(30),
    ):
        watch = health_pb2_grpc.HealthStub(health).Watch(health_pb2.HealthCheckRequest(service="readiness"))
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        registry.show(picture_of(decoder, write_text_model(model)))
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        decoder.scripts = [says("schön".encode())]
        async with Client(gateway.address) as client:
            assert [model.name for model in await client.models()] == ["bytes"]
            pieces = [piece async for piece in client.generate(prompt="x")]
        assert "".join(piece.text for piece in pieces) == "schön"
        async with httpx.AsyncClient(trust_env=False) as http:
            page = (await http.get(f"http://{gateway.metrics}/metrics")).text
        assert 'kvmesh_requests_total{code="OK"} 1.0' in page
        assert "kvmesh_requests_open 0.0" in page
        watch.cancel()
        assert await gateway.terminate() == 0
        assert "Traceback" not in gateway.log.read_text()


async def test_it_ends_connections_by_their_age_and_no_request_notices(model: Path, tmp_path: Path) -> None:
    """One request streams over three ages of its connection. Those of the health port stay."""
    old = asyncio.Event()

    async def slow(request: decode_pb2.GenerateRoomRequest) -> AsyncIterator[decode_pb2.GenerateRoomResponse]:
        async for response in says(b"old")(request):
            yield response
            await old.wait()

    decoder = FakeDecoder()
    registry = FakeRegistry(decoder)
    registry.show(picture_of(decoder, write_text_model(model)))
    decoder.scripts = [slow]
    async with (
        served(add_DecodeServiceServicer_to_server, decoder) as decoder.address,
        served(add_BootstrapServiceServicer_to_server, registry) as bootstrap,
        service(
            *("gateway", tmp_path / "log"),
            *("--bootstrap", bootstrap, "--model", str(model), "--connection-seconds", "0.3"),
        ) as gateway,
        grpc.aio.insecure_channel(gateway.health) as health,
        Client(gateway.address) as client,
        asyncio.timeout(30),
    ):
        await until_ready(health)
        streaming = client.generate(prompt="x")
        pieces = [await anext(streaming)]
        for _ in range(3):
            async with grpc.aio.insecure_channel(gateway.address) as another:
                await another.channel_ready()
                await another.wait_for_state_change(grpc.ChannelConnectivity.READY)
        assert [model.name for model in await client.models()] == ["bytes"]
        old.set()
        pieces += [piece async for piece in streaming]
        assert "".join(piece.text for piece in pieces) == "old"
        assert health.get_state() is grpc.ChannelConnectivity.READY


async def until_ready(health: grpc.aio.Channel) -> None:
    watch = health_pb2_grpc.HealthStub(health).Watch(health_pb2.HealthCheckRequest(service="readiness"))
    async for answer in watch:
        if answer.status == health_pb2.HealthCheckResponse.SERVING:
            watch.cancel()
            return


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ((), "bootstrap"),
        (("--bootstrap", "127.0.0.1:1"), "model"),
        (("--bootstrap", "127.0.0.1:1", "--model", "smollm9"), "neither a *.gguf file nor a directory"),
        (("--bootstrap", "127.0.0.1:1", "--model", "absent.gguf"), "absent.gguf can't be read"),
        (("--bootstrap", "127.0.0.1:1", "--model", "m", "--request-seconds", "0"), "request_seconds is 0"),
        (("--bootstrap", "127.0.0.1:1", "--model", "m", "--max-attempts", "0"), "max_attempts is 0"),
        (("--bootstrap", "127.0.0.1:1", "--model", "m", "--connection-seconds", "-1"), "connection_seconds is -1"),
        (("--bootstrap", "nowhere", "--model", "m"), "nowhere"),
    ],
)
async def test_bad_configuration_is_one_line_and_exit_2(flags: tuple[str, ...], said: str) -> None:
    code, err = await refused("gateway", *flags)
    assert code == 2
    assert said in err
    assert len(err.strip().splitlines()) == 1


async def test_a_broken_model_is_one_line_and_exit_2(model: Path) -> None:
    for name, content in (
        ("tokenizer.json", "{}"),
        ("tokenizer_config.json", '{"chat_template": "{% for %}"}'),
        ("model.safetensors", "short"),
    ):
        path = model / name
        whole = path.read_bytes()
        path.write_text(content)
        code, err = await refused("gateway", "--bootstrap", "127.0.0.1:1", "--model", str(model))
        assert code == 2
        assert len(err.strip().splitlines()) == 1
        path.write_bytes(whole)


def test_it_runs_without_torch(model: Path) -> None:
    code = (
        "import sys; from pathlib import Path; import services.gateway.gateway as g;"
        "from kvmesh.model.source import resolve; from kvmesh.text.tokenizer import Tokenizer;"
        "from kvmesh.text.template import ChatTemplate; files = resolve(sys.argv[1], Path('absent'));"
        "t = Tokenizer.open(files); ChatTemplate.open(files, t).render([{'role': 'user', 'content': 'x'}]); t.encode('x');"
        "print([m for m in ('torch', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(model)], cwd=ROOT, capture_output=True, text=True, timeout=50, check=False
    )
    assert done.stdout.strip() == "[]", done.stderr
