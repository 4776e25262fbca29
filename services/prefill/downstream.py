"""The step stream to the rank behind: opened once for a generation, never again. Called by the stage's life."""

import asyncio
import contextlib
from typing import Self

import grpc

from kvmesh.errors import Fault, InvalidInput, Misfit, Unavailable
from kvmesh.protocol.ids import Generation as GenerationId
from kvmesh.protocol.ids import Incarnation
from kvmesh.rpc import streams
from kvmesh.rpc.channels import dial
from kvmesh.rpc.status import peer_errors
from kvmesh.rpc.tasks import race, until
from kvmesh.rpc.tls import Tls
from kvmesh.v1 import prefill_pb2 as pb
from kvmesh.v1.prefill_pb2_grpc import PrefillServiceStub
from kvmesh.v1.types_pb2 import Member
from services.prefill.generation import Generation


class Downstream:
    """An open step stream to rank + 1."""

    def __init__(
        self, pipeline: str, rank: int, own: Incarnation, watchdog_seconds: float, tls: Tls | None = None
    ) -> None:
        self.generation = GenerationId(0)
        self._pipeline, self._rank, self._own = pipeline, rank, own
        self._who = f"rank {rank + 1} of {pipeline}"
        self._watchdog_seconds = watchdog_seconds
        self._tls = tls
        self._channel: grpc.aio.Channel | None = None
        self._call: grpc.aio.StreamStreamCall[pb.StepsRequest, pb.StepsResponse] | None = None
        self._hearing: asyncio.Future[None] | None = None
        """A read that is cancelled cancels its call: this one lives until the stream is closed."""

    async def open(self, peer: Member, generation: GenerationId) -> Self:
        """Dials the peer and opens the stream.

        Raises:
            KvmeshError: the peer did not answer, or refused.
        """
        self._channel = dial(peer.address, watchdog_seconds=self._watchdog_seconds, tls=self._tls)
        opening = pb.StepOpen(
            pipeline=self._pipeline,
            generation=generation,
            from_incarnation=self._own,
            to_incarnation=peer.incarnation,
            from_rank=self._rank,
        )
        try:
            async with asyncio.timeout(self._watchdog_seconds * 2):  # the peer may wait for the registry's word itself
                with peer_errors(self._who):
                    self._call = PrefillServiceStub(self._channel).Steps()
                    await streams.write(self._call, pb.StepsRequest(open=opening))
                    answer = await streams.read(self._call)
        except TimeoutError as error:
            raise Unavailable(f"{self._who} did not answer in time", reason="stage_lost") from error
        except (Misfit, InvalidInput) as error:
            raise Fault(error.message, reason=error.reason) from error
        if answer is None or answer.WhichOneof("message") != "opened":
            raise Unavailable(f"{self._who} did not open the step stream", reason="stage_lost")
        self.generation = generation
        return self

    async def run(self, generation: Generation) -> None:
        """Sends steps and hears answers until either ends.

        Raises:
            KvmeshError: always, in the end: the rank behind is lost, and with it the generation.
        """
        self._hearing = asyncio.ensure_future(self._hear(generation))
        try:
            with peer_errors(self._who):
                await race(self._send(generation), until(self._hearing))
        except (Misfit, InvalidInput) as error:  # final only when the registry says so; a peer's ends the generation
            raise Fault(error.message, reason=error.reason) from error
        raise Unavailable(f"{self._who} was lost", reason="stage_lost")

    async def _send(self, generation: Generation) -> None:
        assert self._call is not None, "opened before it runs"
        while True:
            await streams.write(self._call, await generation.downstream.get())

    async def _hear(self, generation: Generation) -> None:
        assert self._call is not None, "opened before it runs"
        while (message := await streams.read(self._call)) is not None:
            generation.heard(message)

    async def close(self, *, drained: bool) -> None:
        """Ends stream and channel. Repeated: nothing.

        Args:
            drained: the generation ended because nothing was left to do: the rank behind is told so.
        """
        if self._call is not None and drained:
            with contextlib.suppress(TimeoutError, grpc.aio.AioRpcError, asyncio.InvalidStateError):
                async with asyncio.timeout(self._watchdog_seconds):
                    await self._call.write(pb.StepsRequest(drained=pb.Drained()))
                    await self._call.done_writing()
                    await self._call.code()
        if self._hearing is not None:
            self._hearing.cancel()
            await asyncio.gather(self._hearing, return_exceptions=True)
        if self._call is not None:
            self._call.cancel()
        if self._channel is not None:
            await self._channel.close()
            self._channel = None
