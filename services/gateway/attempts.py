"""Rooms for one request: asks for a room, streams it, and, alone in the system, asks for another when it is lost.

One attempt is open at a time. Prompt and output so far are replayed, so no token comes twice and none is missing; once the
last token is here the request is done, whatever status follows. Called by the servicer.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from time import monotonic

import grpc

from kvmesh.errors import DeadlineExceeded, Fault, Full, KvmeshError, Retry, Unavailable
from kvmesh.protocol.ids import short
from kvmesh.rpc.retry import reconnect_policy, room_policy
from kvmesh.rpc.status import peer_errors
from kvmesh.telemetry import logs, metrics
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
    """What a request has got so far, over all its attempts."""

    output: list[int] = field(default_factory=list)
    finish_reason: FinishReason.ValueType = FINISH_REASON_UNSPECIFIED
    attempts: int = 0
    assign_seconds: float = 0.0
    """Of the attempt that brought the first token."""
    timing: decode_pb2.RoomTiming | None = None
    """The same."""

    @property
    def is_finished(self) -> bool:
        """The last token is here."""
        return self.finish_reason != FINISH_REASON_UNSPECIFIED


class Attempts:
    """Runs requests on the mesh."""

    def __init__(self, registry: grpc.aio.Channel, decoders: Decoders, *, model: str, max_attempts: int) -> None:
        """Args:
        model: the name that members of the mesh know.
        max_attempts: rooms tried for one request.
        """
        self._registry = BootstrapServiceStub(registry)
        self._decoders = decoders
        self._model, self._max_attempts = model, max_attempts

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
            await room_policy(self._max_attempts, _left(deadline))(attempt)
        except KvmeshError as error:
            raise _for_client(error) from error

    async def _assign(self, plan: Plan, progress: Progress, deadline: float) -> RoomAssignment:
        """A room; waits for a registry that is away."""
        progress.attempts += 1
        metrics.ATTEMPTS_TOTAL.inc()
        asked = monotonic()
        policy = reconnect_policy(_is_away)
        assignment: RoomAssignment = await policy(self._ask_registry, plan, progress, deadline)
        if not progress.output:
            progress.assign_seconds = monotonic() - asked
        return assignment

    async def _ask_registry(self, plan: Plan, progress: Progress, deadline: float) -> RoomAssignment:
        request = bootstrap_pb2.AssignRoomRequest(
            model=self._model,
            prompt_len=len(plan.prompt) + len(progress.output),
            max_output_len=plan.max_output_len - len(progress.output),
        )
        with peer_errors("the registry"):
            response = await self._registry.AssignRoom(request, timeout=_left(deadline))
        return response.assignment

    async def _stream(
        self, plan: Plan, progress: Progress, assignment: RoomAssignment, deliver: Deliver, deadline: float
    ) -> None:
        """One room, until the last token or its loss."""
        try:
            async with self._call(plan, progress, assignment, deadline) as responses:
                async for response in responses:
                    _take(response, plan, progress)
                    await deliver(response.tokens)
                    if progress.is_finished:
                        return
            raise Unavailable("the decoder ended the room without its last token", reason="room_lost")
        except KvmeshError as error:
            log.warning("attempt %d failed after %d tokens: %s", progress.attempts, len(progress.output), error.message)
            raise

    @asynccontextmanager
    async def _call(
        self, plan: Plan, progress: Progress, assignment: RoomAssignment, deadline: float
    ) -> AsyncIterator[AsyncIterator[decode_pb2.GenerateRoomResponse]]:
        """An open call to the decoder; cancelled on the way out, which ends the room everywhere."""
        request = decode_pb2.GenerateRoomRequest(
            assignment=assignment,
            prompt=plan.prompt,
            output_so_far=progress.output,
            sampling=plan.sampling,
            max_output_len=plan.max_output_len,
            stop_ids=plan.stop_ids,
        )
        with self._decoders.use(assignment.decoder) as channel, peer_errors("the decoder"):
            call = DecodeServiceStub(channel).GenerateRoom(request, timeout=_left(deadline))
            metrics.ROOMS_OPEN.inc()
            try:
                yield call.__aiter__()
            finally:
                call.cancel()
                metrics.ROOMS_OPEN.dec()


def _take(response: decode_pb2.GenerateRoomResponse, plan: Plan, progress: Progress) -> None:
    """Adds what came to the progress: token i only as the i-th.

    Raises:
        Fault: it is not what comes next.
    """
    have = len(progress.output)
    if response.index != have or not response.tokens:
        raise Fault(f"the decoder sent {len(response.tokens)} tokens from {response.index} on, {have} is next")
    if have + len(response.tokens) > plan.max_output_len:
        raise Fault(f"the decoder sent more than {plan.max_output_len} tokens")
    if progress.timing is None:
        progress.timing = response.timing
    progress.output.extend(response.tokens)
    progress.finish_reason = response.finish_reason
    if len(progress.output) == plan.max_output_len and not progress.is_finished:
        progress.finish_reason = FINISH_REASON_LENGTH


def _is_away(error: BaseException) -> bool:
    return isinstance(error, Unavailable) and error.reason in _AWAY


def _for_client(error: KvmeshError) -> KvmeshError:
    """What a new room could have cured, and the attempts are used up: Unavailable, by the same reason."""
    if error.retry is not Retry.ROOM or isinstance(error, Full | Unavailable):
        return error
    return Unavailable(error.message, reason=error.reason, retry_after_seconds=error.retry_after_seconds)


def _left(deadline: float) -> float:
    """Seconds until the deadline.

    Raises:
        DeadlineExceeded: it has passed.
    """
    left = deadline - monotonic()
    if left <= 0:
        raise DeadlineExceeded("the request's time is over")
    return left
