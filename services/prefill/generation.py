"""One generation at one stage: steps in, steps on, `applied` back, KV out to the links.

Owned by the stage's life; its streams (from the rank before, to the rank behind, links, control) call in here, all on the event
loop. It ends once, with one reason, and everything that waits on it is told. Rank 0's decisions are in `head.py`.
"""

import asyncio
from collections.abc import Callable
from time import monotonic

from kvmesh.errors import Fault, KvmeshError, Unavailable
from kvmesh.kv.layout import Shard
from kvmesh.protocol.chain import Chain
from kvmesh.protocol.ids import Generation as GenerationId
from kvmesh.protocol.ids import Rank, StepNumber
from kvmesh.protocol.steps import Step
from kvmesh.telemetry import logs, metrics
from kvmesh.v1 import prefill_pb2 as pb
from services.prefill.gauges import show_age, show_pages
from services.prefill.links import Links
from services.prefill.spans import RoomSpans
from services.prefill.wire import step_to_messages
from services.prefill.worker import (
    BeginGeneration,
    FrameCopied,
    LayersDone,
    Report,
    RunStep,
    StageWorker,
    StepDone,
    WorkerFailed,
)

log = logs.get(__name__)

DRAINED = "draining"
"""Reason of a generation that ended because a stage wanted to leave and everything was finished."""


class Generation:
    """A stage's part in one generation."""

    def __init__(
        self, number: GenerationId, *, rank: int, pp_size: int, num_pages: int, shard: Shard, worker: StageWorker
    ) -> None:
        """Begins the generation at the worker: an empty log, an empty page table."""
        self.number = number
        self.rank, self.pp_size = rank, pp_size
        self.ended: asyncio.Future[KvmeshError] = asyncio.get_running_loop().create_future()
        self.downstream: asyncio.Queue[pb.StepsRequest] = asyncio.Queue()  # bounded by the steps in flight
        self.answers: asyncio.Queue[pb.StepsResponse] = asyncio.Queue()  # the same, and four beats a watchdog
        self.on_applied: Callable[[StepNumber], None] | None = None
        """Rank 0: told when every rank has applied a step."""
        self.on_applied_here: Callable[[StepNumber], None] | None = None
        """Rank 0: told when its own worker has applied a step."""
        self.on_draining: Callable[[], None] | None = None
        """Rank 0: told when a stage behind wants to leave."""
        self.on_end: Callable[[KvmeshError], None] | None = None
        """Rank 0: told why the generation ended."""
        self.drain_asked = False
        self.chain = Chain(Rank(rank), rank == pp_size - 1, monotonic())
        self.num_written = 0
        """Steps that rank 0 had written, as far as is known here."""
        self.num_rooms = 0
        self._shard, self._num_pages = shard, num_pages
        self.spans = RoomSpans(rank, shard)
        self.links = Links(number, self.spans, worker.post)
        self._worker = worker
        worker.post(BeginGeneration(number))
        metrics.GENERATIONS_TOTAL.inc()
        show_age(worker.age_seconds)

    @property
    def lag_steps(self) -> int:
        """Steps that rank 0 wrote, as far as is known here, and this stage has not applied."""
        return self.num_written - self.chain.applied.num_steps

    def age_seconds(self) -> float | None:
        """Time since the worker last moved; None when it owes nothing."""
        return self._worker.age_seconds()

    # Its end.

    def end(self, error: KvmeshError) -> None:
        """Ends the generation for everyone who waits on it. Only the first reason counts."""
        if not self.ended.done():
            self.ended.set_result(error)
            metrics.GENERATIONS_ENDED_TOTAL.labels(reason=error.label).inc()
            self.spans.close(error.message, monotonic())
            if self.on_end is not None:
                self.on_end(error)
            self.links.end(error)

    async def raise_when_ended(self) -> None:
        """Waits for the end and raises its reason."""
        raise await asyncio.shield(self.ended)

    # Steps.

    def run(self, step: Step, *, tokens: list[int] | None = None, activations: bytes = b"") -> None:
        """Hands a step to the worker; steps come in order."""
        self.chain.received += 1
        self.num_written = max(self.num_written, self.chain.received)
        self._worker.post(RunStep(self.number, step, tokens, activations))

    def report(self, report: Report) -> None:
        """The worker did something. What can't be dealt with ends the generation: the event loop would only log it."""
        if self.ended.done():
            return
        try:
            self._reported(report)
        except Exception as error:
            self.fail(error)

    def _reported(self, report: Report) -> None:
        if isinstance(report, StepDone):
            self._step_done(report)
        elif isinstance(report, LayersDone):
            self.spans.begun(report.step)
            self.links.computed(report.computed, report.at)
        elif isinstance(report, FrameCopied):
            self.links.copied(report)
        elif isinstance(report, WorkerFailed):
            self.fail(report.error)

    def fail(self, error: BaseException) -> None:
        """Something here failed: this rank is named."""
        if isinstance(error, KvmeshError):
            self.end(Fault(f"rank {self.rank}: {error.message}", reason=error.reason))
        else:
            log.error("the stage failed", exc_info=error)
            self.end(Fault(f"rank {self.rank} failed on a step", reason="stage_failed"))

    def _step_done(self, done: StepDone) -> None:
        self.spans.applied(done)
        step = self.spans.told(done.step)
        self._count(done)
        waits = {work.room: work.queued_seconds for work in step.work}
        for first in done.sampled:
            self.links.sampled(first, waits[first.room])
        self.links.computed(done.computed, done.ended)
        if self.on_applied_here is not None:
            self.on_applied_here(done.step.number)
        if self.chain.applied_here(done.step.number, done.digest, monotonic()):
            self._confirmed(done.step.number)
        if self.rank < self.pp_size - 1:
            for message in step_to_messages(step, done.activations, self.num_written):
                self.downstream.put_nowait(message)
        self.show()

    def _count(self, done: StepDone) -> None:
        metrics.STEPS_TOTAL.inc()
        if done.step.work:
            metrics.STEP_SECONDS.observe(done.ended - done.began)
        metrics.PREFILL_TOKENS_TOTAL.inc(done.step.num_tokens)
        self.num_rooms = done.num_rooms
        if self.rank > 0:
            metrics.ROOMS_OPEN.set(done.num_rooms)
        metrics.ROOMS_RUNNING.set(done.num_rooms)
        show_pages(done.free_pages, self._num_pages)

    # The way back.

    def heard(self, message: pb.StepsResponse) -> None:
        """The rank behind answered."""
        kind = message.WhichOneof("message")
        if kind == "applied":
            self._applied_behind(StepNumber(message.applied.number), message.applied.digest)
            return
        self.chain.heard(monotonic())
        if kind == "draining":
            self.draining(message.draining.rank)
        elif kind != "progress":
            log.warning("the rank behind sent a message of an unknown kind")

    def _applied_behind(self, number: StepNumber, digest: bytes) -> None:
        try:
            self.chain.applied_behind(number, digest, monotonic())
        except Fault as error:
            self.end(error)
            return
        self._confirmed(number)

    def _confirmed(self, number: StepNumber) -> None:
        if self.on_applied is not None:
            self.on_applied(number)
        else:
            digest = self.chain.confirmed.digest
            self.answers.put_nowait(pb.StepsResponse(applied=pb.Applied(number=number, digest=digest)))

    def draining(self, rank: int) -> None:
        """Stage `rank` wants to leave: rank 0 is told, over the ranks between."""
        if self.on_draining is not None:
            self.on_draining()
        elif self.rank == 0:
            self.drain_asked = True  # before rank 0 was admitted
        else:
            self.answers.put_nowait(pb.StepsResponse(draining=pb.Draining(rank=rank)))

    # The watchdog, four times in its time.

    def watch(self, limit_seconds: float, beat: float, *, serving: bool) -> None:
        """Ends what made no progress, and tells the rank before that this stage lives.

        Args:
            limit_seconds: the watchdog's time.
            beat: time between two calls; a worker that moved since the last, or owes nothing, is alive.
            serving: whether the rank before has opened its stream, and hears.
        """
        now = monotonic()
        age = self._worker.age_seconds()
        if self.rank > 0 and serving and (age is None or age <= beat):
            self.answers.put_nowait(pb.StepsResponse(progress=pb.Progress()))
        if age is not None and age > limit_seconds:
            self.end(Unavailable(f"rank {self.rank} made no progress for {limit_seconds:g} s", reason="stage_hung"))
        if self.chain.is_behind_silent(now, limit_seconds):
            self.end(Unavailable(f"rank {self.rank + 1} made no progress for {limit_seconds:g} s", reason="stage_hung"))
        self.links.check_progress(now, limit_seconds)
        self.show()

    # What people see of it.

    def describe(self, told: pb.DescribeLogResponse) -> None:
        """Fills in where this stage stands in the log."""
        chain, age = self.chain, self.age_seconds()
        told.generation, told.num_received = self.number, chain.received
        told.num_applied, told.digest = chain.applied.num_steps, chain.applied.digest
        told.num_confirmed, told.confirmed_digest = chain.confirmed.num_steps, chain.confirmed.digest
        told.lag_steps, told.open_rooms = self.lag_steps, self.num_rooms
        if age is not None:
            told.age.FromNanoseconds(int(age * 1e9))

    def show(self) -> None:
        """Sets the gauges of the log."""
        chain = self.chain
        metrics.LOG_STEPS_RECEIVED.set(chain.received)
        metrics.LOG_STEPS_APPLIED.set(chain.applied.num_steps)
        metrics.LOG_STEPS_CONFIRMED.set(chain.confirmed.num_steps)
        metrics.LOG_DIGEST.set(int.from_bytes(chain.applied.digest[: metrics.DIGEST_METRIC_BYTES], "big"))
        metrics.LOG_LAG_STEPS.set(self.lag_steps)
