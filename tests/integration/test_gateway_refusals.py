"""Bad input is refused with the field and the limit, in small details, before a room is minted."""

import math
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from kvmesh.errors import InvalidInput, KvmeshError, Unavailable, UnknownModel
from kvmesh.model.files import ModelFiles
from kvmesh.rpc.status import from_rpc_error
from kvmesh.telemetry import traces
from kvmesh.v1 import inference_pb2 as pb
from tests.integration.gateway_mesh import POSITIONS, GatewayMesh, gateway_mesh, write_text_model

LIMIT = 1000
TWENTY_MB = 20 << 20


@pytest.fixture
def files(tmp_path: Path) -> ModelFiles:
    return write_text_model(tmp_path)


@pytest.fixture
async def mesh(files: ModelFiles) -> AsyncIterator[GatewayMesh]:
    """A mesh that said it takes 1000 tokens, 900 of them prompt."""
    async with gateway_mesh(files) as mesh:
        await mesh.shown(mesh.picture(max_tokens=LIMIT, max_prompt_tokens=900))
        yield mesh


async def refusal(mesh: GatewayMesh, **request: Any) -> KvmeshError:
    """How a request is refused; no room may be minted, and little may come back."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await mesh.generate(**request)
    trailers = caught.value.trailing_metadata() or ()
    assert sum(len(key) + len(value) for key, value in trailers) < 4096
    assert mesh.registry.requests == []
    return from_rpc_error(caught.value)


def chat(*turns: tuple[str, str]) -> pb.Chat:
    return pb.Chat(messages=[pb.ChatMessage(role=role, content=content) for role, content in turns])


USER = chat(("user", "hi"))


@pytest.mark.parametrize(
    ("request_", "field", "said"),
    [
        ({}, "input", "one of prompt, chat and tokens"),
        ({"prompt": ""}, "prompt", "empty"),
        ({"prompt": "x" * 901}, "prompt", "901 prompt tokens exceed the limit of 900"),
        ({"prompt": "x" * 900, "max_output_tokens": 101}, "max_output_tokens", "exceed the limit of 1000"),
        ({"prompt": "x", "max_output_tokens": 2**32 - 1}, "max_output_tokens", "exceed the limit of 1000"),
        ({"prompt": "x", "temperature": -0.1}, "temperature", "0 to 100"),
        ({"prompt": "x", "temperature": 101}, "temperature", "0 to 100"),
        ({"prompt": "x", "temperature": math.nan}, "temperature", "0 to 100"),
        ({"prompt": "x", "temperature": math.inf}, "temperature", "0 to 100"),
        ({"prompt": "x", "top_p": 0.0}, "top_p", "more than 0 and at most 1"),
        ({"prompt": "x", "top_p": 1.5}, "top_p", "more than 0 and at most 1"),
        ({"prompt": "x", "top_p": math.nan}, "top_p", "more than 0 and at most 1"),
        ({"prompt": "x", "n": 2}, "n", "only 1"),
        ({"prompt": "x", "stop": ["a", ""]}, "stop[1]", "1 to 256 bytes"),
        ({"prompt": "x", "stop": ["é" * 129]}, "stop[0]", "1 to 256 bytes"),
        ({"prompt": "x", "stop": ["a"] * 17}, "stop", "at most 16"),
        ({"prompt": "x", "stop_ids": [300]}, "stop_ids[0]", "not below the vocabulary's 300"),
        ({"prompt": "x", "stop_ids": [1] * 65}, "stop_ids", "at most 64"),
        ({"tokens": pb.TokenIds()}, "tokens.ids", "empty"),
        ({"tokens": pb.TokenIds(ids=[1, 300])}, "tokens.ids[1]", "token id 300 is not below the vocabulary's 300"),
        ({"tokens": pb.TokenIds(ids=[2**32 - 1])}, "tokens.ids[0]", "not below"),
        ({"tokens": pb.TokenIds(ids=[1] * 901)}, "tokens.ids", "901 prompt tokens exceed the limit of 900"),
        ({"chat": pb.Chat()}, "chat.messages", "at least one"),
        ({"chat": chat(("user", "a"), ("tool", "b"))}, "chat.messages[1].role", "role 'tool' is unknown"),
        ({"chat": chat(("", "b"))}, "chat.messages[0].role", "system, user, assistant"),
        ({"chat": chat(("user", "a"), ("system", "b"))}, "chat.messages", "refuses this: system comes first"),
        ({"chat": chat(("user", "x" * 895))}, "chat.messages", "exceed the limit of 900"),
        ({"chat": chat(*[("user", "")] * 901)}, "chat.messages", "901 messages"),
    ],
)
async def test_a_bad_field_is_named_with_its_limit(
    mesh: GatewayMesh, request_: dict[str, Any], field: str, said: str
) -> None:
    error = await refusal(mesh, **request_)
    assert isinstance(error, InvalidInput)
    assert error.field == field
    assert said in error.message


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        ({"prompt": "secret " * (TWENTY_MB // 7)}, "prompt"),
        ({"prompt": "é€" * (TWENTY_MB // 5)}, "prompt"),
        ({"chat": chat(*[("user", "secret " * 10_000)] * 300)}, "chat.messages"),
        ({"tokens": pb.TokenIds(ids=[200] * (TWENTY_MB // 2))}, "tokens.ids"),
    ],
    ids=["text", "wide", "chat", "tokens"],
)
async def test_twenty_megabytes_are_refused_and_not_repeated(
    mesh: GatewayMesh, request_: dict[str, Any], field: str
) -> None:
    error = await refusal(mesh, **request_)
    assert isinstance(error, InvalidInput)
    assert (error.field, error.reason) == (field, "too_long")
    assert "secret" not in error.message
    assert "900" in error.message


async def test_another_model_is_not_found(mesh: GatewayMesh) -> None:
    error = await refusal(mesh, prompt="x", model="gpt-5" * 1000)
    assert isinstance(error, UnknownModel)
    assert error.field == "model"


async def test_its_own_name_and_no_name_are_served(mesh: GatewayMesh) -> None:
    for model in ("bytes", ""):
        assert await mesh.generate(prompt="x", model=model)


async def test_a_model_without_a_template_takes_no_chat(tmp_path: Path) -> None:
    async with gateway_mesh(write_text_model(tmp_path, template=None)) as mesh:
        error = await refusal(mesh, chat=USER)
        assert isinstance(error, InvalidInput)
        assert error.field == "chat"


async def test_what_just_fits_is_served(mesh: GatewayMesh) -> None:
    await mesh.generate(prompt="x" * 900, max_output_tokens=100)
    assert mesh.registry.requests[-1].prompt_len == 900
    assert mesh.registry.requests[-1].max_output_len == 100


async def test_without_a_number_of_tokens_it_is_256_or_what_the_limit_leaves(mesh: GatewayMesh) -> None:
    await mesh.generate(prompt="x")
    await mesh.generate(prompt="x" * 900)
    assert [request.max_output_len for request in mesh.registry.requests] == [256, 100]


async def test_until_the_mesh_has_told_its_limits_the_models_own_count(files: ModelFiles) -> None:
    async with gateway_mesh(files) as mesh:
        await mesh.generate(prompt="x" * 5000)
        error = from_rpc_error(await failed(mesh, prompt="x" * POSITIONS))
        assert isinstance(error, InvalidInput)
        assert str(POSITIONS - 1) in error.message


async def test_the_models_own_limit_counts_when_the_mesh_tells_more(files: ModelFiles) -> None:
    async with gateway_mesh(files) as mesh:
        await mesh.shown(mesh.picture(max_tokens=10 * POSITIONS, max_prompt_tokens=10 * POSITIONS))
        error = from_rpc_error(await failed(mesh, tokens=pb.TokenIds(ids=[1] * POSITIONS)))
        assert isinstance(error, InvalidInput)


async def test_a_mesh_that_serves_other_weights_is_not_asked(files: ModelFiles) -> None:
    async with gateway_mesh(files) as mesh:
        await mesh.shown(mesh.picture(model_fingerprint="other"))
        error = await refusal(mesh, prompt="x")
        assert isinstance(error, Unavailable)
        assert error.reason == "misfit"
        assert mesh.life.ready is not None
        assert not mesh.life.ready[0]


async def failed(mesh: GatewayMesh, **request: Any) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await mesh.generate(**request)
    return caught.value


# Readiness and models.


async def test_it_is_ready_while_a_pipeline_and_a_decoder_are_paired(files: ModelFiles) -> None:
    async with gateway_mesh(files) as mesh:
        seen = []
        for picture in (
            mesh.picture(paired=False),
            mesh.picture(),
            mesh.picture(draining=True),
            mesh.picture(),
        ):
            await mesh.shown(picture)
            assert mesh.life.ready is not None
            seen.append(mesh.life.ready[0])
        assert seen == [False, True, False, True]


async def test_models_are_listed_once_the_mesh_has_told(files: ModelFiles) -> None:
    async with gateway_mesh(files) as mesh:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await mesh.stub.ListModels(pb.ListModelsRequest(), timeout=5)
        assert isinstance(from_rpc_error(caught.value), Unavailable)
        await mesh.shown(mesh.picture())
        listed = await mesh.stub.ListModels(pb.ListModelsRequest(), timeout=5)
        assert listed.models == [pb.Model(name="bytes", max_tokens=1000, vocab_size=300)]


async def test_no_span_repeats_what_a_refused_client_wrote(mesh: GatewayMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    ring = traces.Ring(16)
    monkeypatch.setattr(traces, "RING", ring)
    assert "Jane" in (await refusal(mesh, prompt="x", model="Jane Doe, diabetes")).message, "the client itself hears it"
    await refusal(mesh, chat=chat(("Jane Doe", "hi")))
    assert {span.error for span in ring.all()} == {"unknown_model", "invalid_input"}
