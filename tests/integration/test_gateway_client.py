"""The Python client: pieces, their end, refusals, and leaving early."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path

import pytest

from kvmesh.client import TIMING_PARTS, Client
from kvmesh.errors import InvalidInput, Unavailable
from tests.integration.gateway_mesh import END, GatewayMesh, gateway_mesh, hangs, says, write_text_model


@pytest.fixture
async def mesh(tmp_path: Path) -> AsyncIterator[GatewayMesh]:
    async with gateway_mesh(write_text_model(tmp_path)) as mesh:
        yield mesh


async def test_pieces_joined_are_the_text_and_the_last_has_the_end(mesh: GatewayMesh) -> None:
    mesh.decoder.scripts = [says(["é€"[0].encode()[0], *"é€".encode()[1:], END])]
    async with Client(mesh.address) as client:
        pieces = [piece async for piece in client.generate(prompt="x", seed=9)]
    assert "".join(piece.text for piece in pieces) == "é€"
    assert [piece.seed for piece in pieces] == [9] + [None] * (len(pieces) - 1)
    assert [piece.end for piece in pieces[:-1]] == [None] * (len(pieces) - 1)
    end = pieces[-1].end
    assert end is not None
    assert (end.finish_reason, end.prompt_tokens, end.output_tokens, end.attempts) == ("stop", 1, 6, 1)
    assert tuple(end.parts_seconds) == TIMING_PARTS
    assert sum(end.parts_seconds.values()) == pytest.approx(end.time_to_first_token_seconds)
    assert end.decode_tokens_per_second == pytest.approx(5 / end.decode_seconds)


async def test_each_kind_of_input_and_every_parameter_arrives(mesh: GatewayMesh) -> None:
    async with Client(mesh.address) as client:
        for given in (
            {"prompt": "x"},
            {"messages": [{"role": "user", "content": "x"}]},
            {"tokens": [1, 2]},
        ):
            stream = client.generate(
                **given, max_output_tokens=7, temperature=0.5, top_k=3, top_p=0.5, seed=1, stop_ids=[4], ignore_eos=True
            )
            assert [piece async for piece in stream][-1].end
    prompts = [list(request.prompt) for request in mesh.decoder.requests]
    assert prompts == [list(b"x"), list(b"<user>x<assistant>"), [1, 2]]
    last = mesh.decoder.requests[-1]
    assert (last.max_output_len, list(last.stop_ids), last.sampling.top_k, last.sampling.seed) == (7, [4], 3, 1)


@pytest.mark.parametrize("given", [{}, {"prompt": "x", "tokens": [1]}])
async def test_exactly_one_input_is_needed(mesh: GatewayMesh, given: dict[str, object]) -> None:
    async with Client(mesh.address) as client:
        with pytest.raises(InvalidInput, match="exactly one"):
            [piece async for piece in client.generate(**given)]  # type: ignore[arg-type]


async def test_a_refusal_has_its_field(mesh: GatewayMesh) -> None:
    async with Client(mesh.address) as client:
        with pytest.raises(InvalidInput) as caught:
            [piece async for piece in client.generate(prompt="")]
    assert caught.value.field == "prompt"


async def test_leaving_the_loop_ends_the_room(mesh: GatewayMesh) -> None:
    mesh.decoder.scripts = [hangs(b"abc")]
    async with Client(mesh.address) as client:
        async with aclosing(client.generate(prompt="x")) as pieces:
            async for piece in pieces:
                assert piece.text == "abc"
                break
        await asyncio.wait_for(mesh.decoder.idle.wait(), 1)


async def test_a_gateway_that_is_away_is_unreachable() -> None:
    async with Client("127.0.0.1:1") as client:
        with pytest.raises(Unavailable) as caught:
            await client.models()
    assert caught.value.reason == "unreachable"
    assert "127.0.0.1" not in caught.value.message


async def test_models_are_listed(mesh: GatewayMesh) -> None:
    await mesh.shown(mesh.picture())
    async with Client(mesh.address) as client:
        assert [model.name for model in await client.models()] == ["bytes"]
