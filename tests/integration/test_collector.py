"""A process that sends its spans to a collector: what it does when there is none, and when its variables are wrong."""

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from time import monotonic

import pytest
from toy_process import ToyProcess, toy

from kvmesh.rpc.channels import dial
from kvmesh.rpc.life import SPARE_SECONDS
from kvmesh.v1 import decode_pb2 as pb
from kvmesh.v1.decode_pb2_grpc import DecodeServiceStub
from tests.played_collector import SECONDS, collector, silent_collector

SOON = {"OTEL_BSP_SCHEDULE_DELAY": "50"}
"""Milliseconds until spans leave."""
NOBODY = "http://127.0.0.1:9"


@asynccontextmanager
async def sending(endpoint: str) -> AsyncIterator[tuple[ToyProcess, DecodeServiceStub]]:
    """The toy, which sends one span for each call."""
    async with toy("--drain-seconds=1", OTEL_EXPORTER_OTLP_ENDPOINT=endpoint, **SOON) as process:
        await process.announced()
        async with dial(process.address) as channel:
            yield process, DecodeServiceStub(channel)


async def called(stub: DecodeServiceStub) -> None:
    call = stub.GenerateRoom(pb.GenerateRoomRequest())
    assert (await call.read()).index == 1
    call.cancel()


@pytest.mark.parametrize("kind", ["refused", "silent"])
async def test_a_collector_that_is_away_holds_up_neither_an_answer_nor_the_end(kind: str) -> None:
    async with (
        silent_collector() as (came, endpoint),
        sending(NOBODY if kind == "refused" else endpoint) as (process, stub),
    ):
        await called(stub)
        if kind == "silent":
            await asyncio.wait_for(came.wait(), SECONDS)
        else:
            await process.said("Connection refused")
        begun = monotonic()
        for _ in range(20):
            await called(stub)
        assert monotonic() - begun < 2
        begun = monotonic()
        process.signal(signal.SIGTERM)
        code, _ = await process.end()
        assert code == 0
        assert monotonic() - begun < 1 + SPARE_SECONDS


async def test_a_collector_that_refuses_is_told_of_once_until_it_takes_spans_again() -> None:
    async with collector() as (played, endpoint), sending(endpoint) as (process, stub):

        async def exports(times: int) -> None:
            for _ in range(times):
                again = asyncio.ensure_future(played.called_again(1))
                await called(stub)
                await again

        played.refuses = True
        await exports(4)
        played.refuses = False
        await exports(2)
        process.signal(signal.SIGTERM)
        code, said = await process.end()
        assert code == 0
        lines = [line for line in said.splitlines() if "PERMISSION_DENIED" in line or "takes spans again" in line]
        assert ["takes" in line for line in lines] == [False, True], said
        assert len(played.spans) >= 2


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("OTEL_EXPORTER_OTLP_TIMEOUT", "abc"),
        ("OTEL_EXPORTER_OTLP_COMPRESSION", "zstd"),
        ("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "5000"),
        ("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf"),
        ("OTEL_SPAN_EVENT_COUNT_LIMIT", "many"),
    ],
)
async def test_a_variable_that_can_t_be_used_ends_the_process_with_2_and_one_line(name: str, value: str) -> None:
    async with toy(OTEL_EXPORTER_OTLP_ENDPOINT=NOBODY, **{name: value}) as process:
        code, said = await process.end()
    assert code == 2
    [line] = said.splitlines()
    assert name in line


async def test_with_the_exporter_none_nothing_leaves() -> None:
    async with silent_collector() as (came, endpoint):
        variables = {"OTEL_EXPORTER_OTLP_ENDPOINT": endpoint, "OTEL_TRACES_EXPORTER": "none", **SOON}
        async with toy(**variables) as process:
            await process.announced()
            async with dial(process.address) as channel:
                await called(DecodeServiceStub(channel))
            process.signal(signal.SIGTERM)
            assert (await process.end())[0] == 0
        assert not came.is_set()
