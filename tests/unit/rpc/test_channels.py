import asyncio
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
