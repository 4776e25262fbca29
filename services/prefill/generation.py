"""One generation at one stage: steps in, steps on, `applied` back, KV out to the links.

Owned by the stage's life; its streams (from the rank before, to the rank behind, links, control) call in here, all on the event
loop. It ends once, with one reason, and everything that waits on it is told. Rank 0's decisions are in `head.py`.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from time import monotonic

from kvmesh.errors import Fault, KvmeshError, Misfit, Unavailable
from kvmesh.kv.layout import Shard
from kvmesh.protocol.ids import Generation as GenerationId
from kvmesh.protocol.ids import Incarnation, PairingNumber, StepNumber
from kvmesh.protocol.scheduler import PairingKey
from kvmesh.protocol.steps import Step
from kvmesh.telemetry import logs, metrics
from kvmesh.v1 import prefill_pb2 as pb
from services.prefill.links import LinkSender
from services.prefill.wire import step_to_messages
from services.prefill.worker import BeginGeneration, FrameCopied, Report, RunStep, StageWorker, StepDone, WorkerFailed

log = logs.get(__name__)

DRAINED = "draining"
"""Reason of a generation that ended because a stage wanted to leave and everything was finished."""


class Generation:
    """A stage's part in one generation."""

    def __init__(self, number: GenerationId, *, rank: int, pp_size: int, shard: Shard, worker: StageWorker) -> None:
        """Begins the generation at the worker: an empty log, an empty page table."""
        self.number = number
        self.rank, self.pp_size = rank, pp_size
        self.ended: asyncio.Future[KvmeshError] = asyncio.get_running_loop().create_future()
        self.downstream: asyncio.Queue[pb.StepsRequest] = asyncio.Queue()  # bounded by the steps in flight
        self.answers: asyncio.Queue[pb.StepsResponse] = asyncio.Queue()  # the same, and four beats a watchdog
        self.on_applied: Callable[[StepNumber], None] | None = None
        """Rank 0: told when every rank has applied a step."""
        self.on_draining: Callable[[], None] | None = None
        """Rank 0: told when a stage behind wants to leave."""
        self.drain_asked = False
        self.links: dict[PairingKey, LinkSender] = {}
        self.applied_number = -1
        self.applied_digest = b""
        self._shard = shard
        self._worker = worker
        self._unconfirmed: deque[tuple[StepNumber, bytes]] = deque()
        self._heard_at = monotonic()
        worker.post(BeginGeneration(number))
        metrics.GENERATIONS_TOTAL.inc()

    @property
    def is_last(self) -> bool:
        """Whether this is the stage that samples."""
        return self.rank == self.pp_size - 1

    # Its end.

    def end(self, error: KvmeshError) -> None:
        """Ends the generation for everyone who waits on it. Only the first reason counts."""
        if not self.ended.done():
            self.ended.set_result(error)
            for link in list(self.links.values()):
                link.end(error)

    async def raise_when_ended(self) -> None:
        """Waits for the end and raises its reason."""
        raise await asyncio.shield(self.ended)

    # Steps.

    def run(self, step: Step, *, tokens: list[int] | None = None, activations: bytes = b"") -> None:
        """Hands a step to the worker; steps come in order."""
        self._worker.post(RunStep(self.number, step, tokens, activations))

    def report(self, report: Report) -> None:
        """The worker did something."""
        if self.ended.done():
            return
        if isinstance(report, StepDone):
            self._step_done(report)
        elif isinstance(report, FrameCopied):
            link = self.links.get(report.asked.key)
            if link is not None:
                link.copied(report)
        elif isinstance(report, WorkerFailed):
            self._failed(report.error)

    def _failed(self, error: BaseException) -> None:
        if isinstance(error, KvmeshError):
            self.end(Fault(f"rank {self.rank}: {error.message}", reason=error.reason))
        else:
            log.error("the worker failed", exc_info=error)
            self.end(Fault(f"rank {self.rank} failed on a step", reason="stage_failed"))

    def _step_done(self, done: StepDone) -> None:
        metrics.STEPS_TOTAL.inc()
        metrics.STEP_SECONDS.observe(done.seconds)
        metrics.PREFILL_TOKENS_TOTAL.inc(done.step.num_tokens)
        metrics.ROOMS_OPEN.set(done.num_rooms)
        metrics.PAGES_FREE.set(done.free_pages)
        for first in done.sampled:
            link = self.links.get(first.key)
            if link is not None:  # no link: computed and discarded, which is no fault
                link.sampled(first)
        for span in done.computed:
            link = self.links.get(span.key)
            if link is not None:
                link.computed(span)
        if self.is_last:
            self._confirmed(done.step.number, done.digest)
            return
        if not self._unconfirmed:
            self._heard_at = monotonic()
        self._unconfirmed.append((done.step.number, done.digest))
        for message in step_to_messages(done.step, done.activations):
            self.downstream.put_nowait(message)

    # The way back.

    def heard(self, message: pb.StepsResponse) -> None:
        """The rank behind answered."""
        self._heard_at = monotonic()
        kind = message.WhichOneof("message")
        if kind == "applied":
            self._applied_behind(StepNumber(message.applied.number), message.applied.digest)
        elif kind == "draining":
            self.draining(message.draining.rank)
        elif kind != "progress":
            log.warning("the rank behind sent a message of an unknown kind")

    def _applied_behind(self, number: StepNumber, digest: bytes) -> None:
        if not self._unconfirmed or self._unconfirmed[0][0] != number:
            self.end(Fault(f"rank {self.rank + 1} applied step {number}, which is not the next to confirm"))
            return
        own = self._unconfirmed.popleft()[1]
        if own != digest:
            self.end(
                Fault(f"rank {self.rank + 1} applied another step {number}: digest {digest.hex()}, here {own.hex()}")
            )
            return
        self._confirmed(number, digest)

    def _confirmed(self, number: StepNumber, digest: bytes) -> None:
        self.applied_number, self.applied_digest = number, digest
        if self.on_applied is not None:
            self.on_applied(number)
        else:
            self.answers.put_nowait(pb.StepsResponse(applied=pb.Applied(number=number, digest=digest)))

    def draining(self, rank: int) -> None:
        """Stage `rank` wants to leave: rank 0 is told, over the ranks between."""
        if self.on_draining is not None:
            self.on_draining()
        elif self.rank == 0:
            self.drain_asked = True  # before rank 0 was admitted
        else:
            self.answers.put_nowait(pb.StepsResponse(draining=pb.Draining(rank=rank)))

    # Links.

    def open_link(self, hello: pb.LinkHello) -> LinkSender:
        """A decoder dialled. Its older link, if one stands, ends.

        Raises:
            Misfit: the decoder can't take this stage's KV.
            Unavailable: the generation is over.
        """
        if self.ended.done():
            raise self.ended.result()
        key = (Incarnation(hello.decoder), PairingNumber(hello.pairing))
        for older in [k for k in self.links if k[0] == key[0]]:
            if older[1] >= key[1]:
                raise Misfit(f"pairing {key[1]} is not newer than the standing {older[1]}", reason="stale_pairing")
            self.links[older].end(Unavailable("a newer pairing took over", reason="pairing_replaced"))
        link = LinkSender(key, self.number, self._shard, hello.window_bytes, self._worker.post)
        self.links[key] = link
        metrics.LINKS_OPEN.set(len(self.links))
        return link

    def close_link(self, link: LinkSender) -> None:
        """A link's stream ended."""
        link.end(Unavailable("the link ended", reason="link_lost"))
        if self.links.get(link.key) is link:
            del self.links[link.key]
        metrics.LINKS_OPEN.set(len(self.links))

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
        if self._unconfirmed and now - self._heard_at > limit_seconds:
            self.end(Unavailable(f"rank {self.rank + 1} made no progress for {limit_seconds:g} s", reason="stage_hung"))
        for link in list(self.links.values()):
            link.check_progress(now, limit_seconds)
