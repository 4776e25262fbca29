"""The stage's lease at the registry: registers, beats, and passes directives on.

The lease outlives the registry: while a generation runs, a lost lease is opened again with what the stage holds. It ends
with the stage's life. Called by the life; knows nothing of steps.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import grpc

from kvmesh.errors import KvmeshError, Unavailable
from kvmesh.protocol.fence import Fence
from kvmesh.protocol.ids import Generation, Term
from kvmesh.rpc import streams
from kvmesh.rpc.channels import dial
from kvmesh.rpc.retry import reconnect_policy
from kvmesh.rpc.status import peer_errors
from kvmesh.rpc.tasks import race
from kvmesh.v1 import bootstrap_pb2 as pb
from kvmesh.v1.bootstrap_pb2_grpc import BootstrapServiceStub

StageCall = grpc.aio.StreamStreamCall[pb.RegisterStageRequest, pb.RegisterStageResponse]


@dataclass(frozen=True, slots=True)
class Registrant:
    """What the lease asks its stage."""

    registration: Callable[[], pb.StageRegistration]
    held: Callable[[], Generation]
    """The running generation, 0 for none."""
    heartbeat: Callable[[], pb.Heartbeat]
    directive: Callable[[pb.RegisterStageResponse], Awaitable[pb.StageLinked | None]]
    """Carries out a directive; what it returns is answered."""


class StageLease:
    """One lease, opened again as long as there is something to hold."""

    def __init__(self, address: str, fence: Fence, *, heartbeat_seconds: float, watchdog_seconds: float) -> None:
        self._address = address
        self._fence = fence
        self._heartbeat_seconds = heartbeat_seconds
        self._watchdog_seconds = watchdog_seconds
        self._nudged = asyncio.Event()

    def nudge(self) -> None:
        """Sends a heartbeat now: something changed that placement should know."""
        self._nudged.set()

    async def run(self, registrant: Registrant) -> None:
        """Holds the lease until cancelled.

        Raises:
            Misfit, InvalidInput: the registry refuses this stage for good, and it holds no generation.
            KvmeshError: the lease was lost while the stage held no generation; it begins anew.
        """

        def may_reopen(error: BaseException) -> bool:
            return isinstance(error, KvmeshError) and registrant.held() != 0  # what runs is not ended by a registry

        async with dial(self._address, watchdog_seconds=self._watchdog_seconds) as channel:
            async for attempt in reconnect_policy(may_reopen):
                with attempt:
                    await self._hold(channel, registrant)

    async def _hold(self, channel: grpc.aio.Channel, registrant: Registrant) -> None:
        """One lease stream, from registration to its loss."""
        with peer_errors("the registry"):
            call = BootstrapServiceStub(channel).RegisterStage()
            try:
                await streams.write(call, pb.RegisterStageRequest(registration=registrant.registration()))
                await race(self._beat(call, registrant), self._obey(call, registrant))
            finally:
                call.cancel()

    async def _beat(self, call: StageCall, registrant: Registrant) -> None:
        while True:
            await streams.write(call, pb.RegisterStageRequest(heartbeat=registrant.heartbeat()))
            self._nudged.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._nudged.wait(), self._heartbeat_seconds)

    async def _obey(self, call: StageCall, registrant: Registrant) -> None:
        while (message := await streams.read(call)) is not None:
            self._fence.hear_term(Term(message.term))
            linked = await registrant.directive(message)
            if linked is not None:
                await streams.write(call, pb.RegisterStageRequest(linked=linked))
        raise Unavailable("the registry ended the lease", reason="lease_lost")
