"""The decoder's lease at the registry: registers, beats, and passes the live list of whole pipelines on.

Opened again for as long as the process lives; what runs is not touched by its loss. Knows nothing of rooms or streams.
"""

import asyncio
import contextlib
from collections.abc import Callable, Sequence

import grpc

from kvmesh.errors import KvmeshError, Unavailable
from kvmesh.protocol.fence import Fence
from kvmesh.protocol.ids import Term
from kvmesh.rpc import streams
from kvmesh.rpc.channels import dial
from kvmesh.rpc.retry import is_transient, reconnect_policy
from kvmesh.rpc.status import peer_errors
from kvmesh.rpc.tasks import race
from kvmesh.telemetry import logs
from kvmesh.v1 import bootstrap_pb2 as pb
from kvmesh.v1.bootstrap_pb2_grpc import BootstrapServiceStub
from services.decode.identity import DecoderIdentity

log = logs.get(__name__)

DecoderCall = grpc.aio.StreamStreamCall[pb.RegisterDecoderRequest, pb.RegisterDecoderResponse]


class DecoderLease:
    """One lease, for the life of the process."""

    def __init__(
        self,
        address: str,
        own: DecoderIdentity,
        fence: Fence,
        *,
        heartbeat: Callable[[], pb.Heartbeat],
        holds: Callable[[], bool],
        heartbeat_seconds: float,
    ) -> None:
        """Args:
        address: of the registry.
        heartbeat: the load now.
        holds: whether a pairing stands or a room is open.
        """
        self.named: asyncio.Queue[Sequence[pb.WholePipeline]] = asyncio.Queue()  # drained by the pairings at once
        self.admitted = asyncio.Event()
        self._address, self._own, self._fence = address, own, fence
        self._heartbeat, self._heartbeat_seconds = heartbeat, heartbeat_seconds
        self._holds = holds
        self._trouble = logs.OnChange(log)
        self._nudged = asyncio.Event()

    def nudge(self) -> None:
        """Sends a heartbeat now: something changed that placement should know."""
        self._nudged.set()

    async def run(self) -> None:
        """Holds the lease until cancelled.

        Raises:
            Misfit, InvalidInput: the registry refuses this decoder for good.
        """

        async with dial(self._address, watchdog_seconds=self._own.watchdog_seconds) as channel:
            async for attempt in reconnect_policy(self._may_reopen):
                with attempt:
                    try:
                        await self._hold(channel)
                    except KvmeshError as error:
                        self._trouble.info(f"no lease: {error.message}")
                        raise

    def _may_reopen(self, error: BaseException) -> bool:
        """A refusal is final only while nothing runs: what runs is not ended by a registry."""
        return is_transient(error) or (isinstance(error, KvmeshError) and self._holds())

    async def _hold(self, channel: grpc.aio.Channel) -> None:
        registration = pb.DecoderRegistration(
            member=self._own.member, descriptor=self._own.descriptor, highest_term=self._fence.term
        )
        with peer_errors("the registry"):
            call = BootstrapServiceStub(channel).RegisterDecoder()
            try:
                await streams.write(call, pb.RegisterDecoderRequest(registration=registration))
                await race(self._beat(call), self._obey(call))
            finally:
                call.cancel()

    async def _beat(self, call: DecoderCall) -> None:
        while True:
            await streams.write(call, pb.RegisterDecoderRequest(heartbeat=self._heartbeat()))
            self._nudged.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._nudged.wait(), self._heartbeat_seconds)

    async def _obey(self, call: DecoderCall) -> None:
        while (message := await streams.read(call)) is not None:
            self._fence.hear_term(Term(message.term))
            kind = message.WhichOneof("directive")
            if kind == "admitted":
                log.info("the lease runs, registry term %d", message.term)
                self._trouble.clear()
                self.admitted.set()
            elif kind == "pipelines":
                self.named.put_nowait(list(message.pipelines.pipelines))
            else:
                log.warning("the registry sent a directive of an unknown kind")
        raise Unavailable("the registry ended the lease", reason="lease_lost")
