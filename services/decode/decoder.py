"""The decode service: one process, its rooms, its pairings and its lease, composed. Called by `__main__`."""

import asyncio
import contextlib
from collections.abc import Sequence

import grpc

from kvmesh.errors import BadConfig, Internal, InvalidInput, Unavailable
from kvmesh.model.runner import Runner
from kvmesh.protocol.fence import Fence
from kvmesh.protocol.rooms import Limits
from kvmesh.rpc.life import Life
from kvmesh.rpc.tasks import race
from kvmesh.telemetry import logs
from kvmesh.v1 import bootstrap_pb2
from kvmesh.v1.decode_pb2_grpc import add_DecodeServiceServicer_to_server
from services.decode.identity import DecoderIdentity
from services.decode.links import Told
from services.decode.pairings import Pairings
from services.decode.records import (
    FirstTokenArrived,
    LinkBroken,
    Received,
    Report,
    RoomBroken,
    RoomComplete,
    ThreadFailed,
    TokenDrawn,
)
from services.decode.registration import DecoderLease
from services.decode.rooms import Rooms
from services.decode.servicer import DecodeServicer
from services.decode.threads import DecodeThreads

log = logs.get(__name__)


class Decoder:
    """The service that `kvmesh.rpc.life` runs."""

    names: Sequence[str] = ("kvmesh.v1.DecodeService",)

    def __init__(
        self,
        own: DecoderIdentity,
        limits: Limits,
        runner: Runner,
        *,
        bootstrap: str,
        heartbeat_seconds: float,
        drain_seconds: float,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._drain_seconds = drain_seconds
        self._watchdog_seconds = own.watchdog_seconds
        self._failed: asyncio.Future[BaseException] = self._loop.create_future()
        fence = Fence()
        self._threads = DecodeThreads(runner, self._receive_in_thread)
        self._lease = DecoderLease(
            bootstrap, own, fence, heartbeat=self._heartbeat, holds=self._holds, heartbeat_seconds=heartbeat_seconds
        )
        self._rooms = Rooms(limits, self._threads, self._lease.nudge)
        told = Told(self._threads.post, self._rooms.refused, self._moves)
        self._pairings = Pairings(own, told, self._rooms.pairing_lost, self._lease.nudge)
        self._servicer = DecodeServicer(own, fence, self._rooms, self._pairings)

    def add_to(self, server: grpc.aio.Server) -> None:
        """Registers GenerateRoom."""
        add_DecodeServiceServicer_to_server(self._servicer, server)

    async def run(self, life: Life) -> None:
        """Serves until the process is asked to leave.

        Raises:
            Misfit: the registry refuses this decoder.
            BadConfig: the registry finds its registration malformed.
        """
        for name, age_seconds in self._threads.ages.items():
            life.watch_progress(name, age_seconds, limit_seconds=60.0)
        self._threads.start()
        self._rooms.show()
        try:
            async with asyncio.TaskGroup() as tasks:
                pairings = tasks.create_task(self._pairings.run(tasks, self._lease.named))
                await race(
                    self._lease.run(),
                    self._tell_ready(life),
                    self._raise_when_failed(),
                    self._watch(),
                    self._leave(life),
                )
                pairings.cancel()
                self._pairings.stop()
        except* InvalidInput as refusals:
            raise BadConfig(f"the registry refused the registration: {refusals.exceptions[0]}") from refusals
        finally:
            await self._threads.stop()

    async def _tell_ready(self, life: Life) -> None:
        """Ready: the lease ran once and a pairing stands; the threads' and the loop's life is liveness."""
        await self._lease.admitted.wait()
        life.set_ready(True)
        await asyncio.Event().wait()

    async def _leave(self, life: Life) -> None:
        """Takes nothing new, finishes what fits the time to drain, hands the rest over."""
        await life.draining.wait()
        self._rooms.books.draining = True
        self._lease.nudge()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._rooms.empty.wait(), self._drain_seconds * 0.8)
        self._rooms.fail_all(Unavailable("the decoder leaves; the room is handed over", reason="handed_over"))
        await self._rooms.empty.wait()

    async def _watch(self) -> None:
        """Ends all rooms when a thread hangs while this loop lives: their gateways replay them elsewhere."""
        while True:
            await asyncio.sleep(self._watchdog_seconds / 4)
            if not self._moves():
                self._rooms.fail_all(Unavailable("the decoder made no progress", reason="decoder_hung"))

    def _moves(self) -> bool:
        """Whether the threads make progress, or owe none."""
        age = self._threads.age_seconds()
        return age is None or age <= self._watchdog_seconds

    def _holds(self) -> bool:
        return bool(self._pairings.standing) or not self._rooms.empty.is_set()

    async def _raise_when_failed(self) -> None:
        error = await self._failed
        raise Internal("the decoder failed at what its threads do, or say") from error

    def _heartbeat(self) -> bootstrap_pb2.Heartbeat:
        books = self._rooms.books
        return bootstrap_pb2.Heartbeat(
            waiting_rooms=books.waiting_rooms,
            running_rooms=books.running_rooms,
            free_pages=books.free_pages,
            draining=books.draining,
            paired_generations=self._pairings.standing,
        )

    # Reports of the threads.

    def _receive_in_thread(self, report: Report) -> None:
        self._loop.call_soon_threadsafe(self._receive, report)

    def _receive(self, report: Report) -> None:
        """What can't be dealt with ends the process: the event loop would only log it, and rooms would hang."""
        try:
            self._deal_with(report)
        except Exception as error:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        if not self._failed.done():
            self._failed.set_result(error)

    def _deal_with(self, report: Report) -> None:
        if isinstance(report, TokenDrawn):
            self._rooms.drew(report)
        elif isinstance(report, Received):
            self._pairings.credit(report)
        elif isinstance(report, FirstTokenArrived):
            self._rooms.prefilled(report)
        elif isinstance(report, RoomComplete):
            self._rooms.completed(report)
        elif isinstance(report, RoomBroken):
            self._rooms.broke(report)
        elif isinstance(report, LinkBroken):
            self._pairings.break_off(report.pairing, report.error)
        elif isinstance(report, ThreadFailed):
            self._fail(report.error)
