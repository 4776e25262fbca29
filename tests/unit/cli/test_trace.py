import argparse
import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import grpc
import pytest
from told_spans import GATEWAY, ROOM, process, span

from kvmesh.cli import trace
from kvmesh.cli.trace import parse_room
from kvmesh.cli.watch import picture_now, pictures
from kvmesh.errors import BadConfig
from kvmesh.v1 import bootstrap_pb2, trace_pb2, types_pb2
from kvmesh.v1.bootstrap_pb2_grpc import BootstrapServiceServicer, add_BootstrapServiceServicer_to_server
from kvmesh.v1.trace_pb2_grpc import TraceServiceServicer, add_TraceServiceServicer_to_server

NOWHERE = "127.0.0.1:1"
NO_TLS = {"tls_cert": None, "tls_key": None, "tls_ca": None, "tls_name": ""}


class Player(TraceServiceServicer, BootstrapServiceServicer):
    """Tells its spans, and, asked as a registry, its decoders."""

    def __init__(self, answer: trace_pb2.ListSpansResponse, decoders: tuple[str, ...] = (), *, calls: int = 9) -> None:
        self.answer, self.decoders, self.calls = answer, decoders, calls

    async def ListSpans(self, request: Any, context: Any) -> trace_pb2.ListSpansResponse:  # noqa: N802
        self.calls -= 1
        if self.calls < 0:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "gone")
        return self.answer

    async def WatchMesh(  # noqa: N802
        self, request: Any, context: Any
    ) -> AsyncIterator[bootstrap_pb2.WatchMeshResponse]:
        members = [types_pb2.Member(address=address, incarnation=1) for address in self.decoders]
        yield bootstrap_pb2.WatchMeshResponse(decoders=[bootstrap_pb2.DecoderView(member=m) for m in members])


@contextlib.asynccontextmanager
async def playing(player: Player) -> AsyncIterator[str]:
    server = grpc.aio.server()
    add_TraceServiceServicer_to_server(player, server)
    add_BootstrapServiceServicer_to_server(player, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0)


async def run(gateway: str, bootstrap: str) -> int:
    flags = argparse.Namespace(room="1.24", gateway=gateway, bootstrap=bootstrap, **NO_TLS)
    return await asyncio.to_thread(trace.run, flags)


async def test_everybody_is_asked_and_who_is_silent_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    decoder = Player(process("decode d-1", span(3, 2, "room at decoder", 12, 70)))
    async with playing(decoder) as there, playing(Player(GATEWAY)) as gateway:
        registry = Player(process("bootstrap"), (there, NOWHERE))
        async with playing(registry) as bootstrap:
            assert await run(gateway, bootstrap) == 0
    said = capsys.readouterr()
    assert all(name in said.out for name in ("request", "room at decoder", "decode d-1"))
    assert said.err == f"no answer: {NOWHERE}: unreachable\n"


async def test_without_a_registry_the_gateway_is_asked_all_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    async with playing(Player(GATEWAY)) as gateway:
        assert await run(gateway, NOWHERE) == 0
    said = capsys.readouterr()
    assert "request" in said.out
    assert "the registry: unreachable: stages and decoders are not asked" in said.err


async def test_who_answers_once_and_is_gone_is_shown_and_named(capsys: pytest.CaptureFixture[str]) -> None:
    async with playing(Player(GATEWAY, calls=1)) as gateway, playing(Player(process("bootstrap"))) as bootstrap:
        assert await run(gateway, bootstrap) == 0
    said = capsys.readouterr()
    assert "request" in said.out
    assert "no answer" in said.err


async def test_who_tells_a_part_only_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    part = trace_pb2.ListSpansResponse(process="gateway", spans=GATEWAY.spans, truncated=True)
    async with playing(Player(part)) as gateway, playing(Player(process("bootstrap"))) as bootstrap:
        assert await run(gateway, bootstrap) == 0
    assert capsys.readouterr().err == "gateway: told a part only\n"


async def test_a_room_that_nobody_knows_ends_with_1(capsys: pytest.CaptureFixture[str]) -> None:
    async with playing(Player(process("gateway"))) as there:
        assert await run(there, there) == 1
    assert "no spans of room 1.24" in capsys.readouterr().err


async def test_no_escape_code_of_a_peer_reaches_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    evil = process("gateway\x1b[2J", span(1, 0, "evil\x1b[31m\nname", 0, -5, error="e\x1b]0;\x07"))
    async with playing(Player(evil)) as there:
        assert await run(there, there) == 0
    said = capsys.readouterr()
    assert "evil [31m name" in said.out
    assert not [c for c in said.out + said.err if not c.isprintable() and c != "\n"]


async def test_nor_does_one_in_the_picture_of_a_registry() -> None:
    async with playing(Player(process("x"), ("evil\x1b[2J\n:1",))) as registry:
        (decoder,) = (await picture_now(registry, 5.0)).decoders
        assert decoder.member.address == "evil [2J :1"
        async with aclosing(pictures(registry)) as followed:
            assert (await anext(followed)).decoders[0].member.address == decoder.member.address


@pytest.mark.parametrize("text", ["1.24", str(ROOM)])
def test_a_room_is_named_as_logs_name_it_or_by_its_number(text: str) -> None:
    assert parse_room(text) == ROOM


@pytest.mark.parametrize(
    "text", ["", "x", "1.", ".1", "1.2.3", "-1", "0", "1.0", "0.1", "1.99999999999999", "²", "9" * 30]
)
def test_what_is_no_room_is_refused(text: str) -> None:
    with pytest.raises(BadConfig, match=r"ROOM is .*1\.24 is needed"):
        parse_room(text)
