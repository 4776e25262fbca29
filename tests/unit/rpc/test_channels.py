import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from rpc_serving import served

from kvmesh.errors import InvalidInput
from kvmesh.rpc.channels import MAX_MESSAGE_BYTES
from kvmesh.rpc.status import peer_errors


async def test_a_peer_that_only_waits_is_not_lost() -> None:
    """Pings go on for three times the watchdog's time, and the server minds none of them."""

    async def wait(request: bytes, context: Any) -> bytes:
        await asyncio.wait([asyncio.ensure_future(asyncio.Event().wait())], timeout=1.5)
        return b"done"

    handler = grpc.method_handlers_generic_handler("toy.Toy", {"Ask": grpc.unary_unary_rpc_method_handler(wait)})
    async with served(handlers=[handler], watchdog_seconds=0.5) as channel:
        assert await channel.unary_unary("/toy.Toy/Ask")(b"") == b"done"


async def test_twenty_megabytes_pass_and_more_than_the_limit_is_refused_by_its_size() -> None:
    async def length(request: bytes, context: Any) -> bytes:
        return str(len(request)).encode()

    handler = grpc.method_handlers_generic_handler("toy.Toy", {"Ask": grpc.unary_unary_rpc_method_handler(length)})
    async with served(handlers=[handler]) as channel:
        ask = channel.unary_unary("/toy.Toy/Ask")
        assert await ask(bytes(20 << 20)) == str(20 << 20).encode()
        with pytest.raises(InvalidInput) as raised, peer_errors("toy"):
            await ask(bytes(MAX_MESSAGE_BYTES + 1))
    assert raised.value.reason == "message_too_large"


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]"])
async def test_both_families_are_served_and_dialled(host: str) -> None:
    async def ask(request: bytes, context: Any) -> bytes:
        return request

    handler = grpc.method_handlers_generic_handler("toy.Toy", {"Ask": grpc.unary_unary_rpc_method_handler(ask)})
    async with served(handlers=[handler], host=host) as channel:
        assert await channel.unary_unary("/toy.Toy/Ask")(b"x") == b"x"


async def test_the_environments_proxy_is_never_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    monkeypatch.delenv("no_proxy", raising=False)

    async def ask(request: bytes, context: Any) -> bytes:
        return request

    handler = grpc.method_handlers_generic_handler("toy.Toy", {"Ask": grpc.unary_unary_rpc_method_handler(ask)})
    async with served(handlers=[handler]) as channel:
        assert await channel.unary_unary("/toy.Toy/Ask")(b"x") == b"x"


async def test_an_old_connection_is_replaced_and_no_call_notices() -> None:
    """A stream that outlives many connections stays whole on its own; others go on a new one, those under way included."""
    over = asyncio.Event()

    async def peer(request: bytes, context: Any) -> bytes:
        return context.peer().encode()

    async def stream(request: bytes, context: Any) -> AsyncIterator[bytes]:
        number = 0
        while not over.is_set():
            yield f"{number} {context.peer()}".encode()
            number += 1
            await asyncio.sleep(0.001)
        yield b"end"

    methods = {
        "Peer": grpc.unary_unary_rpc_method_handler(peer),
        "Stream": grpc.unary_stream_rpc_method_handler(stream),
    }
    handler = grpc.method_handlers_generic_handler("toy.Toy", methods)
    peers: list[set[bytes]] = [set() for _ in range(8)]

    async def calls(channel: grpc.aio.Channel, seen: set[bytes]) -> None:
        while not over.is_set():
            seen.add(await channel.unary_unary("/toy.Toy/Peer")(b""))
            if min(map(len, peers)) >= 12:
                over.set()

    async with served(handlers=[handler], connection_seconds=0.05, resend_unsent=True) as channel:
        streaming = channel.unary_stream("/toy.Toy/Stream")(b"")
        async with asyncio.timeout(30), asyncio.TaskGroup() as callers:
            for seen in peers:
                callers.create_task(calls(channel, seen))
            answers = [answer async for answer in streaming]
    *numbered, last = answers
    assert last == b"end"
    assert [int(answer.split()[0]) for answer in numbered] == list(range(len(numbered)))
    assert len({answer.split()[1] for answer in numbered}) == 1


async def test_a_connection_without_an_age_stays() -> None:
    async def peer(request: bytes, context: Any) -> bytes:
        return context.peer().encode()

    handler = grpc.method_handlers_generic_handler("toy.Toy", {"Peer": grpc.unary_unary_rpc_method_handler(peer)})
    async with served(handlers=[handler]) as channel:
        assert len({await channel.unary_unary("/toy.Toy/Peer")(b"") for _ in range(500)}) == 1
