import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2
from rpc_serving import served

from kvmesh import errors
from kvmesh.errors import Fault, Full, Internal, InvalidInput, KvmeshError, Misfit, Retry, Unavailable
from kvmesh.rpc.channels import dial
from kvmesh.rpc.status import from_rpc_error, is_expected, peer_errors, to_status

EVERY_ERROR = [
    e for e in vars(errors).values() if isinstance(e, type) and issubclass(e, KvmeshError) and e is not KvmeshError
]


def raising(error: BaseException) -> grpc.GenericRpcHandler:
    async def ask(request: bytes, context: Any) -> bytes:
        raise error

    return grpc.method_handlers_generic_handler("toy.Toy", {"Ask": grpc.unary_unary_rpc_method_handler(ask)})


async def raised_by(error: BaseException) -> grpc.aio.AioRpcError:
    async with served(handlers=[raising(error)]) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await channel.unary_unary("/toy.Toy/Ask")(b"")
    return raised.value


@pytest.mark.parametrize("kind", EVERY_ERROR, ids=lambda e: e.__name__)
async def test_every_error_of_the_table_comes_back_as_it_left(kind: type[KvmeshError]) -> None:
    sent = kind("what happened × twice", reason="a_reason", field="sampling.top_p", retry_after_seconds=1.25)
    status = await raised_by(sent)
    assert status.code() is grpc.StatusCode[kind.code]
    back = from_rpc_error(status)
    assert type(back) is kind
    assert (back.message, back.reason, back.field, back.retry_after_seconds) == (
        "what happened × twice",
        "a_reason",
        "sampling.top_p",
        1.25,
    )
    assert back.retry is sent.retry


@pytest.mark.parametrize("kind", EVERY_ERROR, ids=lambda e: e.__name__)
async def test_an_error_without_details_comes_back_without_any(kind: type[KvmeshError]) -> None:
    back = from_rpc_error(await raised_by(kind("so")))
    assert (type(back), back.reason, back.field, back.retry_after_seconds) == (kind, kind.default_reason, None, None)


@pytest.mark.parametrize("sent", ["Jane Doe, born 1970", "y" * 300])
async def test_a_peer_s_reason_that_is_no_word_is_other(sent: str) -> None:
    assert from_rpc_error(await raised_by(Unavailable("x", reason=sent))).reason == "other"


async def test_what_a_peer_says_comes_in_as_one_short_line_without_escape_codes() -> None:
    wild = "red \x1b[31m\nline \u202eo" + "x" * 5000
    packed = status_pb2.Status(code=14, message=wild)
    packed.details.add().Pack(error_details_pb2.ErrorInfo(domain="kvmesh", reason="stage_lost"))
    trailers = grpc.aio.Metadata(("grpc-status-details-bin", packed.SerializeToString()))
    error = grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), trailers)
    said = from_rpc_error(error).message
    assert said.isprintable()
    assert said.startswith("red [31m line o")
    assert len(said) == 600


async def test_a_bug_leaves_as_internal_without_its_text() -> None:
    status = await raised_by(ValueError("the prompt was: secret"))
    assert status.code() is grpc.StatusCode.INTERNAL
    assert "secret" not in repr(status)
    back = from_rpc_error(status)
    assert isinstance(back, Internal)
    assert back.retry is Retry.NEVER


async def test_a_group_of_known_errors_leaves_as_its_first_and_a_group_with_a_bug_as_a_bug() -> None:
    known = ExceptionGroup("g", [ExceptionGroup("h", [Full("first")]), Unavailable("second")])
    assert isinstance(from_rpc_error(await raised_by(known)), Full)
    assert not is_expected(ExceptionGroup("g", [Full("first"), ValueError("bug")]))


async def test_a_message_of_megabytes_and_many_lines_becomes_a_short_line() -> None:
    status = await raised_by(InvalidInput("über\n" * 1_000_000, field="prompt"))
    details = status.details() or ""
    assert status.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert len(details) <= 600
    assert "\n" not in details


async def test_nobody_listening_is_unreachable_and_names_no_address() -> None:
    async with dial("127.0.0.1:1") as channel:
        with pytest.raises(Unavailable) as raised, peer_errors("rank 1 of p0"):
            await channel.unary_unary("/toy.Toy/Ask")(b"")
    assert raised.value.reason == "unreachable"
    assert raised.value.message == "rank 1 of p0: unreachable"


async def test_an_unknown_method_is_a_misfit() -> None:
    async with served() as channel:
        with pytest.raises(Misfit, match="rank 1"), peer_errors("rank 1 of p0"):
            await channel.unary_unary("/toy.Toy/Ask")(b"")


async def test_a_call_that_outlives_its_time_is_a_passed_deadline() -> None:
    async def wait(request: bytes, context: Any) -> bytes:
        await asyncio.Event().wait()
        return b""

    handler = grpc.method_handlers_generic_handler("toy.Toy", {"Ask": grpc.unary_unary_rpc_method_handler(wait)})
    async with served(handlers=[handler]) as channel:
        with pytest.raises(errors.DeadlineExceeded), peer_errors("x"):
            await channel.unary_unary("/toy.Toy/Ask")(b"", timeout=0.1)


async def test_peer_errors_keeps_the_kind_and_the_details_and_names_the_peer() -> None:
    sent = Full("no page is free", reason="queue_full", retry_after_seconds=0.5)
    async with served(handlers=[raising(sent)]) as channel:
        with pytest.raises(Full) as raised, peer_errors("the decoder"):
            await channel.unary_unary("/toy.Toy/Ask")(b"")
    assert raised.value.message == "the decoder: no page is free"
    assert (raised.value.reason, raised.value.retry_after_seconds) == ("queue_full", 0.5)


async def test_peer_errors_lets_own_errors_pass() -> None:
    with pytest.raises(InvalidInput, match=r"^mine$"), peer_errors("the decoder"):
        raise InvalidInput("mine")


async def test_writing_to_an_ended_stream_is_unavailable() -> None:
    async def refuse(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        raise Fault("no")
        yield b""

    handler = grpc.method_handlers_generic_handler("toy.Toy", {"S": grpc.stream_stream_rpc_method_handler(refuse)})
    async with served(handlers=[handler]) as channel:
        call = channel.stream_stream("/toy.Toy/S")()
        with pytest.raises(Fault), peer_errors("x"):
            await call.read()
        with pytest.raises(Unavailable, match="x: the stream ended"), peer_errors("x"):
            await call.write(b"")


def test_the_server_that_stops_makes_its_callers_calls_unavailable() -> None:
    gone = grpc.aio.AioRpcError(grpc.StatusCode.CANCELLED, grpc.aio.Metadata(), grpc.aio.Metadata(), "CANCELLED")
    assert isinstance(from_rpc_error(gone), Unavailable)


def test_the_status_of_an_error_says_whether_a_retry_is_of_use() -> None:
    status = to_status(Full("x"))
    assert b"room" in dict(status.trailing_metadata)["grpc-status-details-bin"]  # type: ignore[arg-type]
