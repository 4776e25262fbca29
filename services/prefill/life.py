"""One life of a stage: from its registration to the end of the generation it served in.

Carries out the registry's directives, accepts the step stream of the rank before, and holds lease, generation and downstream
together: when one ends, all do, and the stage begins a new life with its weights and nothing else. Called by the stage.
"""

import asyncio
import contextlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from kvmesh.errors import Fenced, KvmeshError, Unavailable
from kvmesh.kv.layout import Shard
from kvmesh.protocol.fence import Fence
from kvmesh.protocol.ids import Generation as GenerationId
from kvmesh.protocol.ids import Incarnation, short
from kvmesh.protocol.scheduler import Limits
from kvmesh.rpc.tasks import race
from kvmesh.telemetry import logs, metrics
from kvmesh.v1 import bootstrap_pb2, types_pb2
from kvmesh.v1 import prefill_pb2 as pb
from services.prefill.downstream import Downstream
from services.prefill.generation import DRAINED, Generation
from services.prefill.head import Head
from services.prefill.registration import Registrant, StageLease
from services.prefill.worker import StageWorker

log = logs.get(__name__)


@dataclass(frozen=True, slots=True)
class StageIdentity:
    """What a stage is in every life of its process."""

    member: types_pb2.Member
    pipeline: str
    rank: int
    pp_size: int
    descriptor: types_pb2.Descriptor
    shard: Shard
    limits: Limits
    watchdog_seconds: float

    @property
    def incarnation(self) -> Incarnation:
        """The process's own."""
        return Incarnation(self.member.incarnation)


class StageLife:
    """The life that runs now; `run` returns by raising why it ended."""

    def __init__(self, identity: StageIdentity, fence: Fence, lease: StageLease, worker: StageWorker) -> None:
        self.identity = identity
        self.generation: Generation | None = None
        self.head: Head | None = None
        self.admitted = asyncio.Event()
        self.serving = False
        self.draining = False
        self._fence, self._lease, self._worker = fence, lease, worker
        self._downstream: Downstream | None = None
        self._begun = asyncio.Event()
        self._num_streams = 0
        self._no_streams = asyncio.Event()
        self._no_streams.set()
        self._waits_for = ""
        self._admitted_to = GenerationId(0)
        self._over = False

    async def run(self) -> None:
        """Registers, serves, ends.

        Raises:
            Misfit, InvalidInput: the registry refuses this stage for good.
            KvmeshError: otherwise, always: why the life is over.
        """
        registrant = Registrant(self._registration, self._held, self._heartbeat, self._directive)
        try:
            await race(self._lease.run(registrant), self._hold(), self._run_downstream(), self._watch())
        except KvmeshError as error:
            self.end(error)
            raise
        finally:
            self.end(Unavailable("the stage is ending", reason="stage_lost"))
            if self._downstream is not None:
                await self._downstream.close(drained=self._drained)
            await self._no_streams.wait()
            await self._worker.rest()
            metrics.PAGES_FREE.set(self.identity.limits.num_pages)
            for gauge in (metrics.ROOMS_OPEN, metrics.ROOMS_WAITING, metrics.STEPS_IN_FLIGHT):
                gauge.set(0)

    def end(self, error: KvmeshError) -> None:
        """Ends the generation, if there is one; the life follows. Repeated: nothing."""
        self.serving = False
        self._over = True
        if self.generation is not None:
            self.generation.end(error)

    def drain(self) -> bool:
        """The process wants to leave. Returns whether there is anything to wait for."""
        self.draining = True
        self._lease.nudge()
        if not self.serving or self.generation is None:
            return False
        if self.head is not None:
            self.head.drain()
        else:
            self.generation.draining(self.identity.rank)
        return True

    @property
    def _drained(self) -> bool:
        ended = self.generation.ended if self.generation is not None else None
        return ended is not None and ended.done() and ended.result().reason == DRAINED

    @contextmanager
    def stream(self) -> Iterator[None]:
        """Counts a stream served in this life: the next life waits for its end."""
        self._num_streams += 1
        self._no_streams.clear()
        try:
            yield
        finally:
            self._num_streams -= 1
            if self._num_streams == 0:
                self._no_streams.set()

    def require_serving(self, generation: int) -> Generation:
        """The running generation.

        Raises:
            Fenced: it is not the one meant.
        """
        if self.generation is None or not self.serving or self.generation.number != generation:
            raise Fenced(f"generation {short(generation)} is not served here")
        return self.generation

    async def accept(self, opening: pb.StepOpen) -> Generation:
        """The rank before opens its step stream: the generation begins here.

        A middle rank was ordered to link under that generation; the last rank was admitted to it, in this very life: one
        that the registry minted for an earlier lease is over, whatever the rank before believes. The stream may overtake
        the registry's word, so that is waited for.

        Raises:
            Fenced: it means another process, pipeline or rank, or a generation that can't begin here.
        """
        own = self.identity
        wanted = (opening.to_incarnation, opening.pipeline, opening.from_rank + 1)
        if wanted != (own.incarnation, own.pipeline, own.rank):
            raise Fenced(
                f"meant for rank {wanted[2]} of {wanted[1]}, or another process; this is rank {own.rank} of {own.pipeline}"
            )
        number = GenerationId(opening.generation)
        if own.rank == own.pp_size - 1:
            await self._told_of(number)
        if self.serving and self.generation is not None and number > self.generation.number:
            self.end(Unavailable(f"generation {short(number)} took over", reason="generation_replaced"))
        if self._over or self.serving or (self.generation is not None and self.generation.number != number):
            raise Fenced(f"generation {short(number)} can't begin here: another one stands or is being linked")
        if self.generation is None and own.rank != own.pp_size - 1:
            raise Fenced(f"rank {own.rank} is not linked to rank {own.rank + 1} yet")
        self._fence.begin(number)
        generation = self.generation or self._make(number)
        self.serving = True
        return generation

    async def _told_of(self, number: GenerationId) -> None:
        """Waits, at most the watchdog's time, to be admitted in this life, to that generation."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.admitted.wait(), self.identity.watchdog_seconds)
        if self._admitted_to != number:
            raise Fenced(f"generation {short(number)} is not the one this stage was admitted to")

    # Directives.

    async def _directive(self, message: bootstrap_pb2.RegisterStageResponse) -> bootstrap_pb2.StageLinked | None:
        kind = message.WhichOneof("directive")
        if kind == "wait_for":
            if message.wait_for.peer != self._waits_for:
                self._waits_for = message.wait_for.peer
                log.info("waits for %s", self._waits_for)
        elif kind == "link_next":
            return await self._link_next(message.link_next)
        elif kind == "admitted":
            self._admit(GenerationId(message.admitted.generation))
        elif kind == "withdrawn":
            raise Unavailable(f"the admission was withdrawn: {message.withdrawn.reason}", reason="withdrawn")
        else:
            log.warning("the registry sent a directive of an unknown kind")
        return None

    async def _link_next(self, order: bootstrap_pb2.LinkNext) -> bootstrap_pb2.StageLinked:
        own = self.identity
        if self._downstream is not None:
            raise Unavailable("ordered to link twice", reason="withdrawn")
        self._downstream = Downstream(own.pipeline, own.rank, own.incarnation, own.watchdog_seconds)
        await self._downstream.open(order.next, GenerationId(order.generation))
        self._make(GenerationId(order.generation))
        log.info("linked to rank %d", own.rank + 1)
        return bootstrap_pb2.StageLinked(generation=order.generation)

    def _admit(self, number: GenerationId) -> None:
        own = self.identity
        with logs.bind(generation=short(number)):
            log.info("admitted")
        if own.rank == 0 and not self.serving:
            self._fence.begin(number)
            generation = self.generation or self._make(number)
            self.head = Head(generation, own.limits, own.descriptor.vocab_size)
            self.serving = True
        self._admitted_to = number
        self.admitted.set()

    def _make(self, number: GenerationId) -> Generation:
        own = self.identity
        self.generation = Generation(number, rank=own.rank, pp_size=own.pp_size, shard=own.shard, worker=self._worker)
        self._begun.set()
        return self.generation

    # What the lease asks.

    def _held(self) -> GenerationId:
        return self.generation.number if self.serving and self.generation is not None else GenerationId(0)

    def _registration(self) -> bootstrap_pb2.StageRegistration:
        own = self.identity
        return bootstrap_pb2.StageRegistration(
            member=own.member,
            pipeline=own.pipeline,
            rank=own.rank,
            pp_size=own.pp_size,
            descriptor=own.descriptor,
            highest_term=self._fence.term,
            held_generation=self._held(),
        )

    def _heartbeat(self) -> bootstrap_pb2.Heartbeat:
        beat = bootstrap_pb2.Heartbeat(draining=self.draining)
        if self.head is not None:
            books = self.head.scheduler
            beat.waiting_rooms, beat.running_rooms = books.waiting_rooms, books.running_rooms
            beat.free_pages, beat.queued_tokens = books.free_pages, books.queued_tokens
            beat.draining = beat.draining or books.draining
        return beat

    # What lives with it.

    async def _hold(self) -> None:
        await self._begun.wait()
        assert self.generation is not None, "begun"
        await self.generation.raise_when_ended()

    async def _run_downstream(self) -> None:
        await self._begun.wait()
        assert self.generation is not None, "begun"
        if self._downstream is not None:
            await self._downstream.run(self.generation)
        await self._hold()

    async def _watch(self) -> None:
        limit = self.identity.watchdog_seconds
        while True:
            await asyncio.sleep(limit / 4)
            if self.generation is not None:
                self.generation.watch(limit, limit / 4, serving=self.serving)
