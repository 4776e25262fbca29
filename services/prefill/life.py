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
from kvmesh.protocol.ids import Incarnation, Rank, short
from kvmesh.protocol.life import Opening, StageLife, Verdict
from kvmesh.protocol.scheduler import Limits
from kvmesh.rpc.tasks import race
from kvmesh.rpc.tls import Tls
from kvmesh.telemetry import logs
from kvmesh.v1 import bootstrap_pb2, types_pb2
from services.prefill.downstream import Downstream
from services.prefill.gauges import show_no_generation
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
    tls: Tls | None = None
    """What the rank behind is dialled with."""

    @property
    def shards(self) -> tuple[Shard, ...]:
        """What it sends: so far all of its heads in one."""
        return (self.shard,)

    @property
    def incarnation(self) -> Incarnation:
        """The process's own."""
        return Incarnation(self.member.incarnation)


class LiveStage:
    """The life that runs now, and its streams; `run` returns by raising why it ended. What it may do, `protocol.life` says."""

    def __init__(self, identity: StageIdentity, fence: Fence, lease: StageLease, worker: StageWorker) -> None:
        own = identity
        self.identity = identity
        self.life = StageLife(own.incarnation, own.pipeline, Rank(own.rank), own.pp_size, fence)
        self.generation: Generation | None = None
        self.head: Head | None = None
        self.admitted = asyncio.Event()
        self.draining = False
        self._fence, self._lease, self._worker = fence, lease, worker
        self._downstream: Downstream | None = None
        self._begun = asyncio.Event()
        self._num_streams = 0
        self._no_streams = asyncio.Event()
        self._no_streams.set()
        self._waits_for = ""

    async def run(self) -> None:
        """Registers, serves, ends.

        Raises:
            Misfit, InvalidInput: the registry refuses this stage for good.
            KvmeshError: otherwise, always: why the life is over.
        """
        registrant = Registrant(self._registration, lambda: self.life.held, self._heartbeat, self._directive)
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
            show_no_generation(self.identity.limits.num_pages)

    def end(self, error: KvmeshError) -> None:
        """Ends the generation, if there is one; the life follows. Repeated: nothing."""
        self.life.end()
        if self.generation is not None:
            self.generation.end(error)

    def drain(self) -> bool:
        """The process wants to leave. Returns whether there is anything to wait for."""
        self.draining = True
        self._lease.nudge()
        if not self.life.serving or self.generation is None:
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
        self.life.require_serving(GenerationId(generation))
        assert self.generation is not None, "serving"
        return self.generation

    async def accept(self, opening: Opening) -> Generation:
        """The rank before opens its step stream: the generation begins here, once the registry's word is here as well.

        Raises:
            Fenced: it means another process, pipeline or rank, or a generation that can't begin here.
        """
        verdict = self.life.judge(opening)
        if verdict is Verdict.WAIT:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.admitted.wait(), self.identity.watchdog_seconds)
            verdict = self.life.judge(opening)
        number = opening.generation
        if verdict is Verdict.GIVE_WAY:
            self.end(Unavailable(f"generation {short(number)} took over", reason="generation_replaced"))
        if verdict is not Verdict.BEGIN:
            raise Fenced(f"generation {short(number)} can't begin here yet")
        self.life.begin(number)
        return self.generation or self._make(number)

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
        own, number = self.identity, GenerationId(order.generation)
        self.life.ordered(number)
        self._downstream = Downstream(own.pipeline, own.rank, own.incarnation, own.watchdog_seconds, own.tls)
        await self._downstream.open(order.next, number)
        if not self.life.linked():
            raise Unavailable("the life ended while it linked", reason="stage_lost")
        self._make(number)
        log.info("linked to rank %d", own.rank + 1)
        return bootstrap_pb2.StageLinked(generation=order.generation)

    def _admit(self, number: GenerationId) -> None:
        own = self.identity
        with logs.bind(generation=short(number)):
            log.info("admitted")
        if self.life.admitted(number):
            self.head = Head(self.generation or self._make(number), own.limits, own.descriptor.vocab_size)
        self.admitted.set()

    def _make(self, number: GenerationId) -> Generation:
        own = self.identity
        self.generation = Generation(
            number,
            rank=own.rank,
            pp_size=own.pp_size,
            num_pages=own.limits.num_pages,
            shard=own.shard,
            worker=self._worker,
        )
        self._begun.set()
        return self.generation

    # What the lease asks.

    def _registration(self) -> bootstrap_pb2.StageRegistration:
        own = self.identity
        return bootstrap_pb2.StageRegistration(
            member=own.member,
            pipeline=own.pipeline,
            rank=own.rank,
            pp_size=own.pp_size,
            descriptor=own.descriptor,
            highest_term=self._fence.term,
            held_generation=self.life.held,
        )

    def _heartbeat(self) -> bootstrap_pb2.Heartbeat:
        """Without a head the pool is idle: a stage that waits for its pipeline must not look full once it is whole."""
        beat = bootstrap_pb2.Heartbeat(draining=self.draining, free_pages=self.identity.limits.num_pages)
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
                self.generation.watch(limit, limit / 4, serving=self.life.serving)
