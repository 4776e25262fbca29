"""Rooms for one request: asks for a room, streams it, and, alone in the system, asks for another when it is lost.

One attempt is open at a time. Prompt and output so far are replayed, so no token comes twice and none is missing; once the
last token is here the request is done, whatever status follows. Called by the servicer.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from time import monotonic

import grpc

from kvmesh.errors import DeadlineExceeded, Full, KvmeshError, Retry, Unavailable
from kvmesh.protocol.ids import Generation, Incarnation, RoomId, short
from kvmesh.protocol.request import Request
from kvmesh.rpc.retry import reconnect_policy, room_policy
from kvmesh.rpc.status import peer_errors
from kvmesh.telemetry import logs, metrics, traces
from kvmesh.v1 import bootstrap_pb2, decode_pb2
from kvmesh.v1.bootstrap_pb2_grpc import BootstrapServiceStub
from kvmesh.v1.decode_pb2_grpc import DecodeServiceStub
from kvmesh.v1.types_pb2 import FINISH_REASON_LENGTH, FINISH_REASON_UNSPECIFIED, FinishReason, RoomAssignment
from services.gateway.decoders import Decoders
from services.gateway.validation import Plan

log = logs.get(__name__)

_AWAY = ("unreachable", "stopping")
"""Reasons by which a registry is away: another one, or the same, comes back. Nothing that runs is touched by it."""

Deliver = Callable[[Sequence[int]], Awaitable[None]]
"""Takes new tokens, in order. May end the request by setting its progress's finish reason."""


@dataclass(slots=True)
class Progress:
    """A request on its way: its books, why it finished, and where the time of its first token went."""

    request: Request
    span: traces.Span
    """Of the request."""
    room: RoomId | None = None
    """The latest it was given."""
    finish_reason: FinishReason.ValueType = FINISH_REASON_UNSPECIFIED
    assign_seconds: float = 0.0
    """Of the attempt that brought the first token."""
    timing: decode_pb2.RoomTiming | None = None
    """The same."""

    _lost: KvmeshError | None = None
    """Why the last room was lost, or refused."""
    _again: bool = False
    """Whether another may be tried after it."""

    @property
    def is_finished(self) -> bool:
        """The last token is here."""
        return self.finish_reason != FINISH_REASON_UNSPECIFIED

    def failed(self, error: KvmeshError) -> None:
        """A room was lost, or refused."""
        request = self.request
        so_far = len(request.output)
        log.warning("attempt %d failed after %d tokens: %s (%s)", request.attempts, so_far, error.message, error.reason)
        metrics.ATTEMPTS_FAILED_TOTAL.labels(reason=error.label).inc()
        self._lost, self._again = error, request.failed(error)

    def may_try_again(self, error: BaseException) -> bool:
        """Whether another room is asked for after an error: of a room, as the request judged; of no room, never."""
        return error is self._lost and self._again

    def for_client(self, error: KvmeshError) -> KvmeshError:
        """What the client is told. What a new room could have cured, and the attempts are used up: Unavailable, by the same
        reason. A request that lost its rooms and got no other hears why it lost them."""
        failures = self.request.failures
        if not failures or isinstance(error, Full) or (error is self._lost and error.retry is not Retry.ROOM):
            return error
        told = f"{error.message}; {after(failures)}"
        if isinstance(error, DeadlineExceeded):
            return DeadlineExceeded(told)
        reason = error.reason if error.retry is Retry.ROOM else failures[-1]
        return Unavailable(told, reason=reason, retry_after_seconds=error.retry_after_seconds)


def after(failures: Sequence[str]) -> str:
    """For people: which rooms were lost, by their reasons."""
    return f"rooms were lost: {', '.join(failures)}"


class Attempts:
    """Runs requests on the mesh."""

    def __init__(self, registry: grpc.aio.Channel, decoders: Decoders, *, model: str) -> None:
        """Args:
        model: the name that members of the mesh know.
        """
        self._registry = BootstrapServiceStub(registry)
        self._decoders = decoders
        self._model = model

    async def run(self, plan: Plan, progress: Progress, deliver: Deliver, deadline: float) -> None:
        """Returns with the last token. Cancelling it ends the room everywhere, at once.

        Args:
            deliver: called with what `progress` holds already.
            deadline: on the monotonic clock.

        Raises:
            InvalidInput, UnknownModel, Full, Unavailable, DeadlineExceeded: why the last attempt failed.
        """
        # What the registry says of a request that was never placed is for the client; only a lost room is replaced.
        first: list[RoomAssignment] = [await self._assign(plan, progress, deadline)]

        async def attempt() -> None:
            assignment = first.pop() if first else await self._assign(plan, progress, deadline)
            with logs.bind(room=short(assignment.room)):
                await self._stream(plan, progress, assignment, deliver, deadline)

        try:
            await room_policy(progress.may_try_again, _left(deadline))(attempt)
        except KvmeshError as error:
            raise progress.for_client(error) from error

    async def _assign(self, plan: Plan, progress: Progress, deadline: float) -> RoomAssignment:
        """A room. Waits for a registry that is away; once a room was lost, for a pair as well, until the deadline."""
        request, asked = progress.request, monotonic()

        def may_ask_again(error: BaseException) -> bool:
            replays = request.attempts > 0 and isinstance(error, KvmeshError) and error.retry is Retry.ROOM
            return replays or _is_away(error)

        policy = reconnect_policy(may_ask_again)
        with progress.span.child("assign") as span:
            assignment: RoomAssignment = await policy(self._ask_registry, plan, progress, span, deadline)
            span.room = progress.span.room = assignment.room
        request.begin_attempt(Generation(assignment.generation), Incarnation(assignment.decoder.incarnation))
        progress.room = RoomId(assignment.room)
        metrics.ATTEMPTS_TOTAL.inc()
        if not request.output:
            progress.assign_seconds = monotonic() - asked
        return assignment

    async def _ask_registry(self, plan: Plan, progress: Progress, span: traces.Span, deadline: float) -> RoomAssignment:
        request = bootstrap_pb2.AssignRoomRequest(
            model=self._model,
            prompt_len=len(plan.prompt) + len(progress.request.output),
            max_output_len=progress.request.left,
            lost_generations=[generation for generation, _ in progress.request.rooms],
            lost_decoders=[decoder for _, decoder in progress.request.rooms],
        )
        with peer_errors("the registry"):
            response = await self._registry.AssignRoom(request, timeout=_left(deadline), metadata=span.metadata)
        return response.assignment

    async def _stream(
        self, plan: Plan, progress: Progress, assignment: RoomAssignment, deliver: Deliver, deadline: float
    ) -> None:
        """One room, until the last token or its loss."""
        try:
            async with self._call(plan, progress, assignment, deadline) as responses:
                async for response in responses:
                    _take(response, progress)
                    await deliver(response.tokens)
                    if progress.is_finished:
                        return
            raise Unavailable("the decoder ended the room without its last token", reason="room_lost")
        except KvmeshError as error:
            progress.failed(error)
            raise

    @asynccontextmanager
    async def _call(
        self, plan: Plan, progress: Progress, assignment: RoomAssignment, deadline: float
    ) -> AsyncIterator[AsyncIterator[decode_pb2.GenerateRoomResponse]]:
        """An open call to the decoder; cancelled on the way out, which ends the room everywhere."""
        request = decode_pb2.GenerateRoomRequest(
            assignment=assignment,
            prompt=plan.prompt,
            output_so_far=progress.request.output,
            sampling=plan.sampling,
            max_output_len=plan.max_output_len,
            stop_ids=plan.stop_ids,
        )
        using, span = self._decoders.use(assignment.decoder), progress.span.child("room")
        with span, using as channel, peer_errors("the decoder"):
            call = DecodeServiceStub(channel).GenerateRoom(request, timeout=_left(deadline), metadata=span.metadata)
            metrics.ROOMS_OPEN.inc()
            try:
                yield call.__aiter__()
            finally:
                if progress.is_finished:
                    span.end()  # well, though the client may leave with the last token
                call.cancel()
                metrics.ROOMS_OPEN.dec()


def _take(response: decode_pb2.GenerateRoomResponse, progress: Progress) -> None:
    """Adds what came to the progress.

    Raises:
        Fault: it is not what comes next.
    """
    last = response.finish_reason != FINISH_REASON_UNSPECIFIED
    progress.request.take(response.index, response.tokens, last=last)
    if progress.timing is None:
        progress.timing = response.timing
    if progress.request.finished:
        progress.finish_reason = response.finish_reason if last else FINISH_REASON_LENGTH


def _is_away(error: BaseException) -> bool:
    return isinstance(error, Unavailable) and error.reason in _AWAY


def _left(deadline: float) -> float:
    """Seconds until the deadline.

    Raises:
        DeadlineExceeded: it has passed.
    """
    left = deadline - monotonic()
    if left <= 0:
        raise DeadlineExceeded("the request's time is over")
    return left
