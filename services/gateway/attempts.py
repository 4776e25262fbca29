"""Rooms for one request: asks for a room, streams it, and, alone in the system, asks for another when it is lost.

One attempt is open at a time. Prompt and output so far are replayed, so no token comes twice and none is missing; once the
last token is here the request is done, whatever status follows. Called by the servicer.
"""

from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from time import monotonic

import grpc

from kvmesh.errors import DeadlineExceeded, Fault, Unavailable
from kvmesh.rpc.channels import dial
from kvmesh.rpc.retry import room_policy
from kvmesh.rpc.status import peer_errors
from kvmesh.telemetry import metrics
from kvmesh.v1 import bootstrap_pb2, decode_pb2
from kvmesh.v1.bootstrap_pb2_grpc import BootstrapServiceStub
from kvmesh.v1.decode_pb2_grpc import DecodeServiceStub
from kvmesh.v1.types_pb2 import FINISH_REASON_UNSPECIFIED, FinishReason, Member, RoomAssignment
from services.gateway.validation import Plan


@dataclass(slots=True)
class Progress:
    """What a request has got so far, over all its attempts."""

    output: list[int] = field(default_factory=list)
    finish_reason: FinishReason.ValueType = FINISH_REASON_UNSPECIFIED
    attempts: int = 0
    assign_seconds: float = 0.0
    """Of the attempt that brought the first token."""
    timing: decode_pb2.RoomTiming | None = None


class Decoders:
    """Channels to decoders, one for each process, kept while in use and for the next request."""

    def __init__(self, watchdog_seconds: float) -> None:
        self._watchdog_seconds = watchdog_seconds
        self._channels: dict[tuple[str, int], grpc.aio.Channel] = {}

    def channel(self, decoder: Member) -> grpc.aio.Channel:
        """The channel to a decoder; another incarnation at the same address gets another."""
        key = (decoder.address, decoder.incarnation)
        if key not in self._channels:
            self._channels[key] = dial(decoder.address, watchdog_seconds=self._watchdog_seconds)
        return self._channels[key]

    async def forget(self, decoder: Member) -> None:
        """A call to it failed by transport: the next one dials anew."""
        channel = self._channels.pop((decoder.address, decoder.incarnation), None)
        if channel is not None:
            await channel.close()

    async def close(self) -> None:
        """Closes all."""
        for channel in self._channels.values():
            await channel.close()
        self._channels.clear()


class Attempts:
    """Runs requests on the mesh."""

    def __init__(self, registry: grpc.aio.Channel, decoders: Decoders, max_attempts: int) -> None:
        self._registry = BootstrapServiceStub(registry)
        self._decoders = decoders
        self._max_attempts = max_attempts

    async def tokens(
        self, plan: Plan, progress: Progress, *, model: str, deadline: float
    ) -> AsyncGenerator[Sequence[int], None]:
        """New tokens, in order, until the last. What was yielded stands in `progress` already.

        Args:
            deadline: on the monotonic clock.

        Raises:
            KvmeshError: why the last attempt failed.
        """
        async for attempt in room_policy(self._max_attempts, deadline - monotonic()):
            with attempt:
                async for tokens in self._once(plan, progress, model, deadline):
                    yield tokens

    async def _once(self, plan: Plan, progress: Progress, model: str, deadline: float) -> AsyncGenerator[Sequence[int], None]:
        """One room."""
        progress.attempts += 1
        metrics.ATTEMPTS_TOTAL.inc()
        asked = monotonic()
        assignment = await self._assign(plan, progress, model, deadline)
        if not progress.output:
            progress.assign_seconds = monotonic() - asked
        async with self._room(plan, progress, assignment, deadline) as responses:
            async for response in responses:
                if response.index != len(progress.output) or not response.tokens:
                    raise Fault(f"the decoder sent token {response.index}, {len(progress.output)} is next")
                if progress.timing is None:
                    progress.timing = response.timing
                progress.output.extend(response.tokens)
                progress.finish_reason = response.finish_reason
                yield response.tokens
                if response.finish_reason != FINISH_REASON_UNSPECIFIED:
                    return
        raise Unavailable("the decoder ended the room without its last token", reason="room_lost")

    async def _assign(self, plan: Plan, progress: Progress, model: str, deadline: float) -> RoomAssignment:
        request = bootstrap_pb2.AssignRoomRequest(
            model=model,
            prompt_len=len(plan.prompt) + len(progress.output),
            max_output_len=plan.max_output_len - len(progress.output),
        )
        with peer_errors("the registry"):
            response = await self._registry.AssignRoom(request, timeout=_left(deadline))
        return response.assignment

    @asynccontextmanager
    async def _room(
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
        stub = DecodeServiceStub(self._decoders.channel(assignment.decoder))
        with peer_errors("the decoder"):
            call = stub.GenerateRoom(request, timeout=_left(deadline))
            try:
                yield call.__aiter__()
            except grpc.aio.AioRpcError as error:
                if error.code() is grpc.StatusCode.UNAVAILABLE and not error.trailing_metadata():
                    await self._decoders.forget(assignment.decoder)
                raise
            finally:
                call.cancel()


def _left(deadline: float) -> float:
    """Seconds until the deadline.

    Raises:
        DeadlineExceeded: it has passed.
    """
    left = deadline - monotonic()
    if left <= 0:
        raise DeadlineExceeded("the request's time is over")
    return left
