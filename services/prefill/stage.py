"""The prefill service: one process, one stage, life after life.

Composes worker, lease and servicer; begins a new life when one ends; leaves when asked. Called by `__main__`.
"""

import asyncio
from collections.abc import Sequence

import grpc

from kvmesh.errors import BadConfig, InvalidInput, KvmeshError, Unavailable
from kvmesh.model.runner import Runner
from kvmesh.protocol.fence import Fence
from kvmesh.protocol.ids import short
from kvmesh.rpc.life import Life
from kvmesh.rpc.raw import raw_stream_handler
from kvmesh.rpc.retry import reconnect_policy
from kvmesh.rpc.tasks import race
from kvmesh.rpc.tls import TLS_REASON
from kvmesh.telemetry import logs, metrics
from kvmesh.v1 import prefill_pb2 as pb
from kvmesh.v1.prefill_pb2_grpc import add_PrefillServiceServicer_to_server
from services.prefill.gauges import show_age, show_no_generation
from services.prefill.generation import Generation
from services.prefill.life import LiveStage, StageIdentity
from services.prefill.registration import StageLease
from services.prefill.servicer import PrefillServicer
from services.prefill.worker import FrameCopied, Report, StageWorker

log = logs.get(__name__)

SERVICE = "kvmesh.v1.PrefillService"


class PrefillStage:
    """The service that `kvmesh.rpc.life` runs."""

    names: Sequence[str] = (SERVICE,)

    def __init__(self, identity: StageIdentity, lease: StageLease, fence: Fence, runner: Runner) -> None:
        self._identity, self._lease, self._fence = identity, lease, fence
        self._loop = asyncio.get_running_loop()
        self._worker = StageWorker(runner, self._receive_in_thread)
        self._life: LiveStage | None = None
        self._last_end = ""
        self._trouble = logs.OnChange(log)
        self._servicer = PrefillServicer(self._current, self._describe, identity.watchdog_seconds)

    def add_to(self, server: grpc.aio.Server) -> None:
        """Registers Steps, Control and the raw Link."""
        add_PrefillServiceServicer_to_server(self._servicer, server)
        server.add_generic_rpc_handlers((raw_stream_handler(SERVICE, {"Link": self._servicer.Link}),))

    async def run(self, life: Life) -> None:
        """Lives until the process is asked to leave.

        Raises:
            Misfit: the registry refuses this stage.
            BadConfig: the registry finds its registration malformed.
        """
        life.watch_progress("worker", self._worker.age_seconds, limit_seconds=60.0)
        own = self._identity
        metrics.STAGE_INFO.labels(pipeline=own.pipeline, rank=own.rank, pp_size=own.pp_size).set(1)
        show_no_generation(own.limits.num_pages)
        self._worker.start()
        try:
            await race(self._lives(life), self._leave(life))
        except InvalidInput as error:
            raise BadConfig(f"the registry refused the registration: {error.message}") from error
        finally:
            await asyncio.to_thread(self._worker.stop)
            show_age(lambda: None)

    async def _lives(self, life: Life) -> None:
        async for attempt in reconnect_policy():
            with attempt:
                await self._live(life)

    async def _live(self, life: Life) -> None:
        self._life = LiveStage(self._identity, self._fence, self._lease, self._worker)
        try:
            await race(self._life.run(), self._tell_ready(self._life, life))
        except KvmeshError as error:
            self._tell_end(self._life.generation, error)
            raise
        finally:
            self._life = None
            life.set_ready(False, "not admitted")

    def _tell_end(self, generation: Generation | None, error: KvmeshError) -> None:
        """A life that came to no generation is tried again without end: what is in its way is said once."""
        text = f"life over: {error.message}"
        if generation is not None:
            self._last_end = generation.ended.result().message
            with logs.bind(generation=short(generation.number)):
                log.info(text)
        elif error.reason == TLS_REASON:
            self._trouble.warning(text)
        else:
            self._trouble.info(text)

    async def _tell_ready(self, stage: LiveStage, life: Life) -> None:
        await stage.admitted.wait()
        self._trouble.clear()
        life.set_ready(True)
        await asyncio.Event().wait()

    async def _leave(self, life: Life) -> None:
        await life.draining.wait()
        stage = self._life
        if stage is not None and stage.drain() and stage.generation is not None:
            await asyncio.wait([stage.generation.ended])

    def _current(self) -> LiveStage:
        if self._life is None:
            raise Unavailable("the stage is between two generations", reason="stage_lost")
        return self._life

    def _describe(self) -> pb.DescribeLogResponse:
        """Where this stage stands in the log."""
        own, live = self._identity, self._life
        told = pb.DescribeLogResponse(
            pipeline=own.pipeline, rank=own.rank, incarnation=own.incarnation, last_end=self._last_end
        )
        if live is not None and live.generation is not None:
            live.generation.describe(told)
        return told

    def _receive_in_thread(self, report: Report) -> None:
        self._loop.call_soon_threadsafe(self._receive, report)

    def _receive(self, report: Report) -> None:
        generation = self._life.generation if self._life is not None else None
        if generation is not None and generation.number == _generation_of(report):
            generation.report(report)


def _generation_of(report: Report) -> int:
    return report.asked.generation if isinstance(report, FrameCopied) else report.generation
