"""A member that can't reach its registry says so in its log: nobody else can tell why it does not become ready."""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from kvmesh.protocol.fence import Fence
from kvmesh.v1 import bootstrap_pb2, types_pb2
from services.decode.identity import DecoderIdentity
from services.decode.registration import DecoderLease
from services.gateway.mesh_view import MeshView

NOWHERE = "127.0.0.1:1"


async def changed() -> None:
    """A picture came."""


def decoder() -> Coroutine[Any, Any, None]:
    own = DecoderIdentity(
        types_pb2.Member(incarnation=7, address=NOWHERE), types_pb2.Descriptor(), 1 << 20, 2.0, 1 << 28
    )
    return DecoderLease(
        NOWHERE, own, Fence(), heartbeat=bootstrap_pb2.Heartbeat, holds=lambda: False, heartbeat_seconds=0.5
    ).run()


def gateway() -> Coroutine[Any, Any, None]:
    return MeshView(NOWHERE, 2.0, "f", changed).run()


@pytest.mark.parametrize("member", [decoder, gateway])
async def test_a_registry_that_is_away_is_named_in_the_log(
    member: Callable[[], Coroutine[Any, Any, None]], caplog: pytest.LogCaptureFixture
) -> None:
    """F-N6"""
    said = asyncio.Event()

    class Listening(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "registry" in record.getMessage():
                said.set()

    listening, root = Listening(), logging.getLogger()
    root.addHandler(listening)
    trying = asyncio.ensure_future(member())
    try:
        with caplog.at_level(logging.INFO):
            await asyncio.wait_for(said.wait(), 1)
    finally:
        trying.cancel()
        await asyncio.gather(trying, return_exceptions=True)
        root.removeHandler(listening)
