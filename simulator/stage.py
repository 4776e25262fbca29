"""A prefill stage, life after life: the machines of `kvmesh.protocol` wired as services/prefill wires them.

Its worker is a thread of its own: steps in one queue, copies of frames in another, served at any time between. The end of its
life is a function call; what others learn of it, they learn from their streams.
"""

from kvmesh.errors import Fenced, KvmeshError, Unavailable
from kvmesh.protocol.chain import Chain
from kvmesh.protocol.directives import Admitted, Directive, LinkNext, Withdrawn
from kvmesh.protocol.fence import Fence
from kvmesh.protocol.ids import Generation, Incarnation, LeaseId
from kvmesh.protocol.life import LifeState, Opening, StageLife, Verdict
from kvmesh.protocol.members import Load, Member, Stage
from kvmesh.protocol.scheduler import Scheduler
from simulator.head import Head
from simulator.messages import (
    Closed,
    Directed,
    Forwarded,
    Heartbeat,
    Hello,
    Linked,
    Message,
    Opened,
    OpenSteps,
    Progress,
    RegisterStage,
)
from simulator.part import Part
from simulator.process import Process, Stream
from simulator.shapes import StageShape
from simulator.stage_worker import Begin, Copied, Copy, Failed, RunStep, StageWorker, StepDone


class StageProcess(Process):
    """One process; `shape` outlives it."""

    local_kinds = ("steps", "copies", "reports")
    threads = (("steps", "copies"),)

    def __init__(self, world: object, name: str, address: str, incarnation: int, shape: StageShape) -> None:
        super().__init__(world, name, address, incarnation)
        self.shape = shape
        self.fence = Fence()
        self.part: Part | None = None
        self.worker = StageWorker(shape.limits, shape.shard, shape.rank == shape.pp_size - 1)
        self._no_streams()

    def _no_streams(self) -> None:
        shape = self.shape
        self.life = StageLife(Incarnation(self.incarnation), shape.pipeline, shape.rank, shape.pp_size, self.fence)
        self.lease: Stream | None = None
        self.before: Stream | None = None
        self.behind: Stream | None = None
        self.early: tuple[Stream, Opening] | None = None
        """A step stream that overtook the registry's word."""
        self.unread: list[Directed] = []
        """Directives that wait until linking is done."""

    def start(self) -> None:
        """Registers; and keeps watch, where time passes."""
        self._register()
        self.after(self.shape.watchdog_seconds / 4, "watch")

    # Life.

    def _register(self) -> None:
        shape, life = self.shape, self.life
        member = Member(Incarnation(self.incarnation), self.address)
        registration = Stage(
            LeaseId(0),
            member,
            shape.pipeline,
            shape.rank,
            shape.pp_size,
            shape.descriptor,
            self.fence.term,
            life.held,
        )
        self.lease = self.dial("registry", "lease", RegisterStage(registration))

    def end_life(self, error: KvmeshError) -> None:
        """Everything ends with it; the next begins once the worker rests."""
        if self.life.state is LifeState.OVER:
            return
        self.world.witness.life_over(self, error)
        self.life.end()
        end, part = Closed.by(Unavailable(error.message, reason=error.reason)), self.part
        if part is not None:
            part.close(self, end)
        for held in (self.behind, self.before, self.lease, self.early[0] if self.early else None):
            self.close(held, end)
        self.part = None
        self.local["steps"].items.clear()
        self.local["copies"].items.clear()
        for timer in ("early is over", "linking is over", "lease again"):
            self.cancel_timer(timer)
        self.queue("steps", Begin(Generation(0)))

    def _make_part(self, number: Generation) -> Part:
        self.part = Part(number, Chain(self.shape.rank, self.life.is_last, self.now))
        self.queue("steps", Begin(number))
        return self.part

    # Streams.

    def opened(self, stream: Stream, first: Message) -> None:
        """The rank before, or a decoder, dialled."""
        try:
            if self.life.state is LifeState.OVER:
                raise Unavailable("the stage is between two generations", reason="stage_lost")
            match first:
                case OpenSteps(pipeline, generation, from_rank, to):
                    self._judge(stream, Opening(pipeline, generation, from_rank, to))
                case Hello():
                    self._open_pairing(stream, first)
                case _:
                    raise AssertionError(first)
        except KvmeshError as error:
            self.close(stream, Closed.by(error))

    def _judge(self, stream: Stream, opening: Opening) -> None:
        verdict = self.life.judge(opening)
        if verdict is Verdict.GIVE_WAY:
            self.end_life(Unavailable("a higher generation took over", reason="generation_replaced"))
            raise Fenced("it can't begin here yet")
        if verdict is Verdict.WAIT:
            if self.early is not None:
                raise Fenced("another step stream waits already")
            self.early = (stream, opening)
            self.after(self.shape.watchdog_seconds, "early is over")
            return
        self.early = None
        self.cancel_timer("early is over")
        self.life.begin(opening.generation)
        self.world.witness.life_begun(self, opening.generation)
        if self.part is None:
            self._make_part(opening.generation)
        self.before = stream
        self.send(stream, Opened())

    def _open_pairing(self, stream: Stream, hello: Hello) -> None:
        if hello.to != self.incarnation:
            raise Fenced("meant for another process")
        self.life.require_serving(hello.generation)
        assert self.part is not None, "serving"
        self.part.open_pairing(self, stream, hello, self.shape.shard)

    def heard(self, stream: Stream, message: Message) -> None:
        """A directive, a step, its confirmation, or a decoder's word."""
        try:
            if stream is self.lease:
                assert isinstance(message, Directed)
                self._directed(message)
            elif stream is self.behind and isinstance(message, Opened):
                self._linked()
            elif self.part is not None:
                self._from_peer(self.part, stream, message)
        except KvmeshError as error:
            self._broke(stream, error)

    def _from_peer(self, part: Part, stream: Stream, message: Message) -> None:
        if stream is self.before:
            assert isinstance(message, Forwarded)
            part.run(self, message.step)
        elif stream is self.behind:
            part.heard_behind(self, message, self.before)
        else:
            part.heard_decoder(self, stream, message)

    def _broke(self, stream: Stream, error: KvmeshError) -> None:
        """An error in what a stream carried: it ends, and what lived by it."""
        self.close(stream, Closed.by(error))
        self.lost(stream, Closed.by(error))

    def lost(self, stream: Stream, end: Closed) -> None:
        """What lived by a stream ends with it."""
        if stream is self.lease:
            self.lease, self.unread = None, []
            if self.life.held:
                self.after(self.world.pause(), "lease again")
            else:
                self.end_life(end.raised())
        elif stream is self.before:
            self.end_life(Unavailable(f"rank {self.shape.rank - 1} was lost", reason="stage_lost"))
        elif stream is self.behind:
            self.end_life(Unavailable(f"rank {self.shape.rank + 1} was lost", reason="stage_lost"))
        elif self.early is not None and stream is self.early[0]:
            self.early = None
            self.cancel_timer("early is over")
        elif self.part is not None:
            self.part.lost_decoder(self, stream)

    # The registry's word.

    def _directed(self, message: Directed) -> None:
        if self.life.state is LifeState.LINKING:
            self.unread.append(message)
            return
        self.fence.hear_term(message.term)
        self._obey(message.directive)

    def _obey(self, directive: Directive) -> None:
        match directive:
            case LinkNext(member, generation):
                self.life.ordered(generation)
                first = OpenSteps(self.shape.pipeline, generation, self.shape.rank, member.incarnation)
                self.behind = self.dial(member.address, "steps", first)
                self.after(self.shape.watchdog_seconds * 2, "linking is over")
            case Admitted(generation):
                if self.life.admitted(generation):
                    self.world.witness.life_begun(self, generation)
                    part = self.part or self._make_part(generation)
                    part.head = Head(Scheduler(self.shape.limits))
                if self.early is not None:
                    stream, opening = self.early
                    self.early = None
                    self.cancel_timer("early is over")
                    self._retry_early(stream, opening)
            case Withdrawn(_, reason):
                raise Unavailable(reason, reason="withdrawn")
            case _:
                pass

    def _retry_early(self, stream: Stream, opening: Opening) -> None:
        try:
            self._judge(stream, opening)
        except KvmeshError as error:
            self.close(stream, Closed.by(error))

    def _linked(self) -> None:
        """The rank behind took the step stream."""
        self.cancel_timer("linking is over")
        if not self.life.linked():
            return
        self._make_part(self.life.generation)
        self.send(self.lease, Linked(self.life.generation))
        unread, self.unread = self.unread, []
        lease = self.lease
        for directed in unread:
            if lease is not None and lease is self.lease:
                self.heard(lease, directed)

    # Its threads.

    def take(self, kind: str, item: object) -> None:
        """The worker's next job, or its next report."""
        match item:
            case Begin(generation):
                self.worker.begin(self, generation)
                if generation == 0 and self.life.state is LifeState.OVER:
                    self.after(self.world.pause(), "next life")
            case RunStep():
                self.worker.run(self, item)
            case Copy():
                self.worker.copy(self, item)
            case StepDone(generation) | Copied(generation) | Failed(generation):
                if self.part is not None and self.part.number == generation:
                    try:
                        self.part.reported(self, item, self.before, self.behind)
                    except KvmeshError as error:
                        self.end_life(error)

    # Time.

    def seconds_of(self, kind: str, item: object) -> float:
        """Of one step, or of taking up anything else."""
        return self.shape.step_seconds if isinstance(item, RunStep) else super().seconds_of(kind, item)

    def fired(self, timer: str) -> None:
        """Pauses, patience, heartbeats and the watchdog."""
        match timer:
            case "next life":
                self._no_streams()
                self._register()
            case "lease again":
                if self.lease is None and self.life.held:
                    self._register()
            case "early is over":
                stream, _ = self.early or (None, None)
                self.early = None
                self.close(stream, Closed("Fenced", "fenced"))
            case "linking is over":
                self.end_life(Unavailable("the rank behind did not answer in time", reason="stage_lost"))
            case "watch":
                self._watch()

    def _watch(self) -> None:
        """Four times in the watchdog's time: shows that it lives, and looks whether the rank behind does."""
        self.after(self.shape.watchdog_seconds / 4, "watch")
        if self.lease is not None:
            self.send(self.lease, Heartbeat(self._load()))
        if self.part is None or self.life.state is LifeState.OVER:
            return
        age, beat = self.age_seconds(), self.shape.watchdog_seconds / 4
        if self.life.serving and (age is None or age <= beat):
            self.send(self.before, Progress())
        if age is not None and age > self.shape.watchdog_seconds:
            self.end_life(Unavailable(f"rank {self.shape.rank} made no progress", reason="stage_hung"))
        elif self.part.chain.is_behind_silent(self.now, self.shape.watchdog_seconds):
            self.end_life(Unavailable(f"rank {self.shape.rank + 1} made no progress", reason="stage_hung"))

    def _load(self) -> Load:
        if self.part is None:
            return Load(free_pages=self.shape.limits.num_pages)
        return self.part.load(self.shape.limits)
