"""Errors of the mesh as gRPC statuses, and back. Called by the interceptor (out) and around every client call (in).

A status carries google.rpc.ErrorInfo (domain, reason, retry level), and BadRequest or RetryInfo where they apply. What
is no `KvmeshError` leaves as INTERNAL without its text: it may hold a prompt or an address.
"""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

import grpc
from google.protobuf.any_pb2 import Any
from google.protobuf.message import Message
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_status import rpc_status

from kvmesh.errors import (
    Cancelled,
    Corrupt,
    DeadlineExceeded,
    DuplicateRoom,
    Fault,
    Fenced,
    Full,
    Internal,
    InvalidInput,
    KvmeshError,
    Misfit,
    Retry,
    Unavailable,
    UnknownModel,
    reason_heard,
)
from kvmesh.rpc.tls import TLS_REASON, is_hung_up, trouble
from kvmesh.telemetry.plain import plain

DOMAIN = "kvmesh"

_MAX_MESSAGE_CHARS = 600
"""The message travels twice in the trailers, for which gRPC has 8 KiB."""

_TLS_PAUSE_SECONDS = 2.0
"""Before the next attempt where TLS failed: someone has to change something first, and may do so at any time."""

_DETAILS_KEY = "grpc-status-details-bin"

_BY_CODE: dict[str, type[KvmeshError]] = {
    error.code: error
    for error in (
        InvalidInput,
        UnknownModel,
        DuplicateRoom,
        Misfit,
        Full,
        Fenced,
        Unavailable,
        Corrupt,
        DeadlineExceeded,
        Cancelled,
        Internal,
    )
}

_Detail = TypeVar("_Detail", bound=Message)


def is_expected(error: BaseException) -> bool:
    """Whether the error, or each one of a group, is of the error table: everything else is a bug."""
    return _expected(error) is not None


def told(error: BaseException) -> KvmeshError:
    """What a caller is told of an error.

    Args:
        error: a KvmeshError, a group of nothing else (its first counts), or a bug (INTERNAL, its text withheld).
    """
    return _expected(error) or Internal("internal error; the service's log has the traceback")


def to_status(known: KvmeshError) -> grpc.Status:
    """The rich status of an error."""
    details: list[Message] = [
        error_details_pb2.ErrorInfo(domain=DOMAIN, reason=known.reason, metadata={"retry": known.retry.value})
    ]
    message = _short_line(known.message)
    if known.field is not None:
        violation = error_details_pb2.BadRequest.FieldViolation(field=known.field, description=message)
        details.append(error_details_pb2.BadRequest(field_violations=[violation]))
    if known.retry_after_seconds is not None:
        retry = error_details_pb2.RetryInfo()
        retry.retry_delay.FromNanoseconds(int(known.retry_after_seconds * 1e9))
        details.append(retry)
    status: grpc.Status = rpc_status.to_status(
        status_pb2.Status(code=code_pb2.Code.Value(known.code), message=message, details=[_pack(d) for d in details])
    )
    return status


def from_rpc_error(error: grpc.aio.AioRpcError) -> KvmeshError:
    """The error a peer raised, or what became of the connection to it. Never holds an address."""
    rich = _rich_status(error)
    what = _detail(rich, error_details_pb2.ErrorInfo)
    if rich is None or what is None or what.domain != DOMAIN:
        return _from_transport(error)
    kind = _BY_CODE.get(code_pb2.Code.Name(rich.code), Internal)
    if kind is Internal and what.metadata.get("retry") == Retry.ROOM.value:
        kind = Fault
    bad, retry = _detail(rich, error_details_pb2.BadRequest), _detail(rich, error_details_pb2.RetryInfo)
    return kind(
        _short_line(rich.message),
        reason=reason_heard(what.reason),
        field=bad.field_violations[0].field if bad is not None and bad.field_violations else None,
        retry_after_seconds=retry.retry_delay.ToNanoseconds() / 1e9 if retry is not None else None,
    )


@contextmanager
def peer_errors(who: str) -> Iterator[None]:
    """Turns the errors of calls made inside into the mesh's own, `who` before each message.

    Args:
        who: the peer, for people, e.g. "rank 1 of p0"; never an address.

    Raises:
        KvmeshError: what the peer raised, or Unavailable("unreachable").
    """
    try:
        yield
    except grpc.aio.AioRpcError as error:
        known = from_rpc_error(error)
        raise type(known)(
            f"{who}: {known.message}",
            reason=known.reason,
            field=known.field,
            retry_after_seconds=known.retry_after_seconds,
        ) from error
    except (asyncio.InvalidStateError, grpc.aio.UsageError) as error:  # written to after its end
        raise Unavailable(f"{who}: the stream ended", reason="stream_ended") from error


def _expected(error: BaseException) -> KvmeshError | None:
    """The error of the table that stands for `error`, if it is no bug."""
    if isinstance(error, BaseExceptionGroup):
        leaves = [_expected(e) for e in error.exceptions]
        return leaves[0] if all(leaves) else None
    return error if isinstance(error, KvmeshError) else None


def _from_transport(error: grpc.aio.AioRpcError) -> KvmeshError:
    """No service of the mesh made this status: gRPC itself did, at either end."""
    code = error.code()
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return DeadlineExceeded("no answer in time")
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        return InvalidInput("the message is larger than its receiver takes", reason="message_too_large")
    if code is grpc.StatusCode.UNIMPLEMENTED:
        return Misfit("the peer does not know this method", reason="unimplemented")
    if code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED):  # CANCELLED: its server stopped; our own
        return _unreachable(error.details() or "")  # cancelling raises CancelledError and no status
    return Unavailable(f"the connection failed with {code.name}", reason="unreachable")


def _unreachable(details: str) -> Unavailable:
    """Why there is no connection, without the address that gRPC's own words hold."""
    said = trouble(details)
    if said is not None:
        return Unavailable(said, reason=TLS_REASON, retry_after_seconds=_TLS_PAUSE_SECONDS)
    if is_hung_up(details):
        why = "TLS at one end only, or it does not take this end's certificate?"
        return Unavailable(f"unreachable: it closed the connection at once ({why})", reason="unreachable")
    return Unavailable("unreachable", reason="unreachable")


def _rich_status(error: grpc.aio.AioRpcError) -> status_pb2.Status | None:
    raw = (error.trailing_metadata() or grpc.aio.Metadata()).get(_DETAILS_KEY)
    return status_pb2.Status.FromString(raw) if isinstance(raw, bytes) else None


def _detail(status: status_pb2.Status | None, kind: type[_Detail]) -> _Detail | None:
    for packed in status.details if status is not None else ():
        found = kind()
        if packed.Unpack(found):
            return found
    return None


def _pack(message: Message) -> Any:
    packed = Any()
    packed.Pack(message)
    return packed


def _short_line(text: str) -> str:
    line = " ".join(plain(text).split())
    return line if len(line) <= _MAX_MESSAGE_CHARS else line[: _MAX_MESSAGE_CHARS - 1] + "…"
