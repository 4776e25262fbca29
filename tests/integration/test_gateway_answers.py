"""What a client gets: tokens by index, whole characters, stop strings, usage and timing."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from prometheus_client.openmetrics.exposition import generate_latest

from kvmesh.protocol.ids import short
from kvmesh.telemetry import metrics
from kvmesh.v1 import decode_pb2
from kvmesh.v1 import inference_pb2 as pb
from kvmesh.v1.types_pb2 import FINISH_REASON_LENGTH, FINISH_REASON_STOP, FINISH_REASON_UNSPECIFIED
from tests.integration.gateway_mesh import (
    END,
    GatewayMesh,
    Responses,
    gateway_mesh,
    sample,
    says,
    text_of,
    tokens_of,
    write_text_model,
)

PARTS = ("assign", "reserve", "queue", "prefill", "transfer_tail", "join", "other")


@pytest.fixture
async def mesh(tmp_path: Path) -> AsyncIterator[GatewayMesh]:
    async with gateway_mesh(write_text_model(tmp_path)) as mesh:
        yield mesh


@pytest.mark.parametrize("together", [1, 2, 3, 100])
async def test_characters_come_whole_however_their_bytes_are_spread(mesh: GatewayMesh, together: int) -> None:
    text = "é€😀 日本 done"
    mesh.decoder.scripts = [says(text.encode(), together=together)]
    responses = await mesh.generate(prompt="x")
    assert text_of(responses) == text
    assert tokens_of(responses) == list(text.encode())
    assert not any("\ufffd" in response.text for response in responses)


async def test_an_unfinished_character_at_the_end_is_replaced(mesh: GatewayMesh) -> None:
    mesh.decoder.scripts = [says("a😀".encode()[:-1])]
    assert text_of(await mesh.generate(prompt="x")) == "a\ufffd"


@pytest.mark.parametrize("together", [1, 2, 4, 100])
async def test_a_stop_string_ends_the_output_before_it_and_the_room_with_it(mesh: GatewayMesh, together: int) -> None:
    async def goes_on(request: decode_pb2.GenerateRoomRequest) -> Responses:
        async for response in says(b"one STOp two STOP three" * 50, together=together)(request):
            response.finish_reason = FINISH_REASON_UNSPECIFIED
            yield response
        await asyncio.Event().wait()

    mesh.decoder.scripts = [goes_on]
    responses = await mesh.generate(prompt="x", stop=["absent", "STOP"], max_output_tokens=500)
    assert text_of(responses) == "one STOp two "
    assert responses[-1].finish_reason == FINISH_REASON_STOP
    # The tokens up to the one that completed the stop string, and none of what came with it or after.
    assert tokens_of(responses) == list(b"one STOp two STOP")
    assert responses[-1].usage.output_tokens == 17
    await asyncio.wait_for(mesh.decoder.idle.wait(), 1)


async def test_text_that_only_began_a_stop_string_is_given_at_the_end(mesh: GatewayMesh) -> None:
    mesh.decoder.scripts = [says(b"abST")]
    responses = await mesh.generate(prompt="x", stop=["STOP"])
    assert [response.text for response in responses] == ["a", "b", "", "ST"]
    assert responses[-1].finish_reason == FINISH_REASON_LENGTH


async def test_end_of_text_is_a_token_and_no_text(mesh: GatewayMesh) -> None:
    mesh.decoder.scripts = [says([*b"hi", END])]
    responses = await mesh.generate(prompt="x")
    assert (text_of(responses), tokens_of(responses)) == ("hi", [*b"hi", END])
    assert responses[-1].finish_reason == FINISH_REASON_STOP
    assert mesh.decoder.requests[0].stop_ids == [END]


async def test_stop_ids_go_beside_the_models_own_which_may_be_ignored(mesh: GatewayMesh) -> None:
    await mesh.generate(prompt="x", stop_ids=[5, END])
    await mesh.generate(prompt="x", stop_ids=[5], ignore_eos=True)
    assert [list(request.stop_ids) for request in mesh.decoder.requests] == [[5, END], [5]]


async def test_a_prompt_a_conversation_and_tokens_reach_the_decoder_as_tokens(mesh: GatewayMesh) -> None:
    await mesh.generate(prompt="hé<|end|>")
    messages = [pb.ChatMessage(role="system", content="s"), pb.ChatMessage(role="user", content="é")]
    await mesh.generate(chat=pb.Chat(messages=messages))
    await mesh.generate(tokens=pb.TokenIds(ids=[0, 299, 7]))
    prompts = [list(request.prompt) for request in mesh.decoder.requests]
    assert prompts == [[*"hé".encode(), END], list("<system>s<user>é<assistant>".encode()), [0, 299, 7]]


async def test_sampling_reaches_the_decoder_and_the_seed_the_client(mesh: GatewayMesh) -> None:
    responses = await mesh.generate(prompt="x", temperature=0.5, top_k=9, top_p=0.25, seed=2**64 - 1)
    sampling = mesh.decoder.requests[0].sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.seed) == (0.5, 9, 0.25, 2**64 - 1)
    assert [response.seed for response in responses] == [2**64 - 1] + [0] * (len(responses) - 1)


async def test_a_seed_is_drawn_where_none_was_given_and_top_p_keeps_all(mesh: GatewayMesh) -> None:
    seeds = {(await mesh.generate(prompt="x"))[0].seed for _ in range(3)}
    assert len(seeds) == 3
    assert {request.sampling.seed for request in mesh.decoder.requests} == seeds
    assert {request.sampling.top_p for request in mesh.decoder.requests} == {1.0}


async def test_usage_counts_prompt_and_output(mesh: GatewayMesh) -> None:
    mesh.decoder.scripts = [says(b"12345")]
    usage = (await mesh.generate(prompt="xyz", max_output_tokens=4))[-1].usage
    assert (usage.prompt_tokens, usage.output_tokens) == (3, 4)


@pytest.mark.parametrize("output", [b"a", b"abc"])
async def test_the_parts_of_the_timing_add_up_to_the_time_to_the_first_token(mesh: GatewayMesh, output: bytes) -> None:
    mesh.decoder.scripts = [says(output)]
    responses = await mesh.generate(prompt="x")
    assert not any(response.HasField("timing") for response in responses[:-1])
    timing = responses[-1].timing
    nanoseconds = {name: getattr(timing, name).ToNanoseconds() for name in PARTS}
    assert sum(nanoseconds.values()) == timing.time_to_first_token.ToNanoseconds()
    assert [nanoseconds[name] for name in PARTS[1:-1]] == [1000, 2000, 3000, 4000, 5000]
    assert nanoseconds["assign"] > 0
    assert nanoseconds["other"] > 0
    assert (timing.decode.ToNanoseconds() > 0) == (len(output) > 1)
    assert timing.attempts == 1


async def test_one_message_holds_an_answer_of_one_batch(mesh: GatewayMesh) -> None:
    mesh.decoder.scripts = [says(b"abc", together=3)]
    (response,) = await mesh.generate(prompt="x", seed=4)
    assert (response.index, response.text, response.seed) == (0, "abc", 4)
    assert response.finish_reason == FINISH_REASON_LENGTH


async def test_requests_are_counted_by_how_they_end(mesh: GatewayMesh) -> None:
    before = sample("kvmesh_requests_total", code="OK")
    first_tokens = sample("kvmesh_time_to_first_token_seconds_count")
    await mesh.generate(prompt="x")
    assert sample("kvmesh_requests_total", code="OK") == before + 1
    assert sample("kvmesh_time_to_first_token_seconds_count") == first_tokens + 1


async def test_an_exemplar_leads_to_the_room_and_to_the_client_s_trace(mesh: GatewayMesh) -> None:
    trace_id = "0af7651916cd43dd8448eb211c80319c"
    sent = (("traceparent", f"00-{trace_id}-b7ad6b7169203331-01"),)
    call = mesh.stub.Generate(pb.GenerateRequest(prompt="hi", max_output_tokens=2), metadata=sent)
    room = short([response async for response in call][-1].timing.room)
    page = generate_latest(metrics.page_of("gateway")).decode()
    exemplars = [line.partition(" # ")[2] for line in page.splitlines() if " # " in line]
    assert any(f'room="{room}",trace_id="{trace_id}"' in exemplar for exemplar in exemplars), exemplars
