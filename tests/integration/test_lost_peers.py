import asyncio
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from time import monotonic
from typing import Any

import grpc
import pytest
from toy_process import ROOT, ToyProcess, toy

from kvmesh.errors import Unavailable
from kvmesh.rpc.channels import dial, server_options
from kvmesh.rpc.status import peer_errors
from kvmesh.v1 import decode_pb2 as pb
from kvmesh.v1.decode_pb2_grpc import DecodeServiceStub

WATCHDOG_SECONDS = 1.0


@asynccontextmanager
async def reading_from(process: ToyProcess, watchdog_seconds: float) -> AsyncIterator[Any]:
    """A stream from the toy that has given its first message."""
    async with dial(process.address, watchdog_seconds=watchdog_seconds) as channel:
        stream = DecodeServiceStub(channel).GenerateRoom(pb.GenerateRoomRequest())
        assert (await stream.read()).index == 1
        yield stream


async def until_lost(stream: Any) -> float:
    """Reads until the stream breaks; seconds it took."""
    began = monotonic()
    with pytest.raises(Unavailable), peer_errors("the toy"):
        while True:
            await asyncio.wait_for(stream.read(), 10)
    return monotonic() - began


async def test_a_frozen_peer_breaks_its_streams_within_the_watchdogs_time() -> None:
    """F-D6"""
    async with toy() as process:
        await process.announced()
        async with reading_from(process, WATCHDOG_SECONDS) as stream:
            process.signal(signal.SIGSTOP)
            took = await until_lost(stream)
    assert took < WATCHDOG_SECONDS + 1


async def test_a_killed_peer_breaks_its_streams_at_once() -> None:
    async with toy() as process:
        await process.announced()
        async with reading_from(process, 30) as stream:
            process.signal(signal.SIGKILL)
            assert await until_lost(stream) < 1


FROZEN_CLIENT = """
import sys, grpc
channel = grpc.insecure_channel(sys.argv[1])
answers = channel.stream_stream("/toy.Toy/S")(iter(lambda: __import__("time").sleep(600), None))
next(answers)
"""


async def test_a_frozen_client_breaks_its_streams_at_the_server_within_the_watchdogs_time() -> None:
    """F-D6, F-D17"""
    begun, ended = asyncio.Event(), asyncio.Event()

    async def stream(requests: Any, context: Any) -> AsyncIterator[bytes]:
        begun.set()
        try:
            await anext(aiter(requests))
        finally:
            ended.set()
        yield b""

    server = grpc.aio.server(options=server_options(WATCHDOG_SECONDS))
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("toy.Toy", {"S": grpc.stream_stream_rpc_method_handler(stream)}),)
    )
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    client = await asyncio.create_subprocess_exec(sys.executable, "-c", FROZEN_CLIENT, f"127.0.0.1:{port}", cwd=ROOT)
    try:
        await asyncio.wait_for(begun.wait(), 10)
        client.send_signal(signal.SIGSTOP)
        began = monotonic()
        await asyncio.wait_for(ended.wait(), 10)
        assert monotonic() - began < WATCHDOG_SECONDS + 1
    finally:
        client.kill()
        await client.wait()
        await server.stop(0)
