import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import pytest
from rpc_serving import served

from kvmesh.errors import Full, InvalidInput, Unavailable
from kvmesh.rpc.raw import raw_stream_handler
from kvmesh.rpc.status import peer_errors

Act = Callable[[], None]
KINDS = ("unary_unary", "unary_stream", "stream_unary", "stream_stream", "raw")


async def drained(requests: Any) -> bytes:
    return b"".join([r async for r in requests]) if isinstance(requests, AsyncIterator) else bytes(requests)


def toy(act: Act) -> list[grpc.GenericRpcHandler]:
    """Every kind of method: hears all, acts, answers what it heard, twice where it can."""

    async def one(request: Any, context: Any) -> bytes:
        heard = await drained(request)
        act()
        return heard

    async def many(request: Any, context: Any) -> AsyncIterator[bytes]:
        heard = await drained(request)
        yield heard
        act()
        yield heard

    return [
        grpc.method_handlers_generic_handler(
            "toy.Toy",
            {
                "unary_unary": grpc.unary_unary_rpc_method_handler(one),
                "unary_stream": grpc.unary_stream_rpc_method_handler(many),
                "stream_unary": grpc.stream_unary_rpc_method_handler(one),
                "stream_stream": grpc.stream_stream_rpc_method_handler(many),
            },
        ),
        raw_stream_handler("toy.Toy", {"raw": many}),
    ]


async def call(channel: grpc.aio.Channel, kind: str) -> list[bytes]:
    """Calls a method of a kind with b"ab"; returns what it answered."""
    path, shape = f"/toy.Toy/{kind}", "stream_stream" if kind == "raw" else kind
    make: Any = getattr(channel, shape)(path)

    async def requests() -> AsyncIterator[bytes]:
        yield b"a"
        yield b"b"

    made = make(requests() if shape.startswith("stream") else b"ab")
    return [m async for m in made] if shape.endswith("stream") else [await made]


@pytest.mark.parametrize("kind", KINDS)
async def test_what_a_method_answers_passes(kind: str) -> None:
    async with served(handlers=toy(lambda: None)) as channel:
        assert b"".join(await call(channel, kind)) in (b"ab", b"abab")


@pytest.mark.parametrize("kind", KINDS)
async def test_an_error_of_the_table_passes_as_itself_and_is_not_logged(kind: str, caplog: Any) -> None:
    def refuse() -> None:
        raise InvalidInput("top_p is 2; (0, 1] is needed", field="top_p")

    async with served(handlers=toy(refuse)) as channel:
        with pytest.raises(InvalidInput, match="toy: top_p is 2"), peer_errors("toy"):
            await call(channel, kind)
    assert not caplog.records


@pytest.mark.parametrize("kind", KINDS)
async def test_a_bug_becomes_internal_and_one_logged_traceback(kind: str, caplog: Any) -> None:
    def break_down() -> None:
        raise KeyError("secret")

    async with served(handlers=toy(break_down)) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await call(channel, kind)
    assert raised.value.code() is grpc.StatusCode.INTERNAL
    assert "secret" not in str(raised.value)
    [record] = caplog.records
    assert record.levelno == logging.ERROR
    assert record.exc_info[0] is KeyError


@pytest.mark.parametrize("kind", ["stream_stream", "unary_stream", "raw"])
async def test_what_was_answered_before_an_error_arrives(kind: str) -> None:
    def lose() -> None:
        raise Unavailable("lost", reason="stage_lost")

    async with served(handlers=toy(lose)) as channel:
        shape = "stream_stream" if kind == "raw" else kind
        answers: Any = getattr(channel, shape)(f"/toy.Toy/{kind}")
        stream = answers(iter([b"ab"]) if shape == "stream_stream" else b"ab")
        assert await stream.read() == b"ab"
        with pytest.raises(Unavailable), peer_errors("x"):
            await stream.read()


@pytest.mark.parametrize("where", ["waiting", "yielding"])
async def test_a_cancelled_stream_releases_what_its_servicer_holds_at_once_and_logs_nothing(
    where: str, caplog: Any
) -> None:
    released = asyncio.Event()

    async def stream(request: bytes, context: Any) -> AsyncIterator[bytes]:
        try:
            yield b"first"
            while True:
                if where == "waiting":
                    await asyncio.Event().wait()
                yield b"x" * 1_000_000  # nobody reads: stands in the write once the window is full
        finally:
            released.set()

    handler = grpc.method_handlers_generic_handler("toy.Toy", {"S": grpc.unary_stream_rpc_method_handler(stream)})
    async with served(handlers=[handler]) as channel:
        reading = channel.unary_stream("/toy.Toy/S")(b"")
        assert await reading.read() == b"first"
        assert not released.is_set()
        reading.cancel()
        await asyncio.wait_for(released.wait(), 5)
    assert not caplog.records


async def test_a_cancelled_unary_call_cancels_its_servicer(caplog: Any) -> None:
    begun, ended = asyncio.Event(), asyncio.Event()

    async def ask(request: bytes, context: Any) -> bytes:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()
        return b""

    handler = grpc.method_handlers_generic_handler("toy.Toy", {"Ask": grpc.unary_unary_rpc_method_handler(ask)})
    async with served(handlers=[handler]) as channel:
        asking = channel.unary_unary("/toy.Toy/Ask")(b"")
        await asyncio.wait_for(begun.wait(), 5)
        asking.cancel()
        await asyncio.wait_for(ended.wait(), 5)
    assert not caplog.records


async def test_a_servicer_that_writes_by_itself_has_its_errors_turned_too() -> None:
    async def stream(request: bytes, context: Any) -> None:
        await context.write(b"one")
        raise Full("no more", retry_after_seconds=2)

    handler = grpc.method_handlers_generic_handler("toy.Toy", {"S": grpc.unary_stream_rpc_method_handler(stream)})
    async with served(handlers=[handler]) as channel:
        reading = channel.unary_stream("/toy.Toy/S")(b"")
        assert await reading.read() == b"one"
        with pytest.raises(Full), peer_errors("x"):
            await reading.read()
