"""A prefill stage, life after life: the machines of `kvmesh.protocol` wired as services/prefill wires them.

Its worker is a thread of its own: steps in one queue, copies of frames in another, served at any time between. The end of its
life is a function call; what others learn of it, they learn from their streams.
"""

from dataclasses import dataclass, field

from kvmesh.errors import Fault, Fenced, KvmeshError, Unavailable
from kvmesh.protocol.chain import Chain
from kvmesh.protocol.coverage import ShardSpan
from kvmesh.protocol.descriptors import Descriptor
from kvmesh.protocol.directives import Admitted, Directive, LinkNext, Withdrawn
from kvmesh.protocol.fence import Fence
from kvmesh.protocol.ids import Generation, Incarnation, LeaseId, PageId, Rank, RoomId, StepNumber
from kvmesh.protocol.life import LifeState, Opening, StageLife, Verdict
from kvmesh.protocol.links import LinkBook
from kvmesh.protocol.members import Load, Member, Stage
from kvmesh.protocol.request import LOST_STEP
from kvmesh.protocol.scheduler import Limits, PairingKey, Scheduler
from kvmesh.protocol.sending import Computed, computed_spans, readable
from kvmesh.protocol.steps import AppliedLog, Step
from simulator.messages import (
    Admit,
    Applied,
    Cell,
    Closed,
    Directed,
    Drop,
    FirstToken,
    Forwarded,
    Frame,
    Heartbeat,
    Hello,
    Linked,
    Message,
    Opened,
    OpenSteps,
    Progress,
    Received,
    RegisterStage,
    RoomRefused,
    Welcome,
    token_of,
)
from simulator.process import Process, Stream


@dataclass(frozen=True, slots=True)
class StageShape:
    """What a stage is in every life of its process, and of the next."""

    pipeline: str
    rank: Rank
    pp_size: int
    descriptor: Descriptor
    limits: Limits
    watchdog_seconds: float = 2.0
    step_seconds: float = 0.01
    """Of one step at this stage, before chance."""

    @property
    def shard(self) -> ShardSpan:
        """What it sends."""
        own = self.descriptor
        return ShardSpan(own.layer_begin, own.layer_end, 0, own.num_kv_heads)


@dataclass(frozen=True, slots=True)
class RunStep:
    """For the worker: apply a step and compute it."""

    generation: Generation
    step: Step


@dataclass(frozen=True, slots=True)
class Begin:
    """For the worker: forget the old log; 0 is for rest."""

    generation: Generation


@dataclass(frozen=True, slots=True)
class Copy:
    """For the worker: copy a frame out of its pages."""

    generation: Generation
    span: Computed


@dataclass(frozen=True, slots=True)
class StepDone:
    """From the worker: a step is applied and computed."""

    generation: Generation
    step: Step
    digest: bytes
    computed: tuple[Computed, ...]
    sampled: tuple[tuple[PairingKey, RoomId], ...]


@dataclass(frozen=True, slots=True)
class Copied:
    """From the worker: a frame, or None when its room had ended."""

    generation: Generation
    key: PairingKey
    frame: Frame | None


@dataclass(frozen=True, slots=True)
class Failed:
    """From the worker: a step could not be applied."""

    generation: Generation
    reason: str


@dataclass(slots=True)
class Part:
    """A stage's part in one generation."""

    number: Generation
    chain: Chain
    scheduler: Scheduler | None = None
    """Rank 0's, once it was admitted."""
    links: dict[PairingKey, Stream] = field(default_factory=dict)
    link_book: LinkBook = field(default_factory=LinkBook)
    controls: dict[PairingKey, Stream] = field(default_factory=dict)
    prompts: dict[RoomId, Admit] = field(default_factory=dict)


class StageProcess(Process):
    """One process; `shape` outlives it."""

    local_kinds = ("steps", "copies", "reports")

    def __init__(self, world: object, name: str, address: str, incarnation: int, shape: StageShape) -> None:
        super().__init__(world, name, address, incarnation)
        self.shape = shape
        self.fence = Fence()
        self.part: Part | None = None
        self.log = AppliedLog(shape.limits.num_pages, shape.limits.page_size)
        self.log_generation = Generation(0)
        self.cells: dict[PageId, Cell] = {}
        """Whose KV each page holds."""
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
            self._last_words(part)
            for stream in [*part.controls.values(), *part.links.values()]:
                self.close(stream, end)
        for held in (self.behind, self.before, self.lease, self.early[0] if self.early else None):
            self.close(held, end)
        self.part = None
        self.local["steps"].items.clear()
        self.local["copies"].items.clear()
        for timer in ("early is over", "linking is over", "lease again"):
            self.cancel_timer(timer)
        self.queue("steps", Begin(Generation(0)))

    def _last_words(self, part: Part) -> None:
        """Names the rooms that had work in the step the generation died in."""
        if part.scheduler is not None:
            for key, stream in part.controls.items():
                for room in part.scheduler.rooms_in_flight(key):
                    self.send(stream, RoomRefused(room, LOST_STEP))

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
        if self.part is None:
            self._make_part(opening.generation)
        self.before = stream
        self.send(stream, Opened())

    def _open_pairing(self, stream: Stream, hello: Hello) -> None:
        if hello.to != self.incarnation:
            raise Fenced("meant for another process")
        self.life.require_serving(hello.generation)
        part, key = self.part, (hello.decoder, hello.pairing)
        assert part is not None, "serving"
        if stream.kind == "link":
            for older in part.link_book.open(key):
                self.close(part.links.pop(older, None), Closed("Unavailable", "pairing_replaced"))
            part.links[key] = stream
            self.send(stream, Welcome(self.shape.rank, self.shape.shard))
            return
        if part.scheduler is None or key not in part.link_book:
            raise Fenced("this pairing has no link to rank 0")
        self._forget(part, part.scheduler.pair(key))
        part.controls[key] = stream
        self.send(stream, Opened())
        self._pump()

    def heard(self, stream: Stream, message: Message) -> None:
        """A directive, a step, its confirmation, or a decoder's word."""
        try:
            if stream is self.lease:
                assert isinstance(message, Directed)
                self._directed(message)
            elif stream is self.before:
                assert isinstance(message, Forwarded)
                self._run(message.step)
            elif stream is self.behind:
                self._from_behind(message)
            else:
                self._from_decoder(stream, message)
        except KvmeshError as error:
            self._broke(stream, error)

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
            self._lost_decoder(self.part, stream)

    def _lost_decoder(self, part: Part, stream: Stream) -> None:
        for key in [k for k, link in part.links.items() if link is stream]:
            del part.links[key]
            part.link_book.close(key)
        for key in [k for k, control in part.controls.items() if control is stream]:
            del part.controls[key]
            assert part.scheduler is not None, "it has a control stream"
            self._forget(part, part.scheduler.unpair(key))
            self._pump()

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
                    part = self.part or self._make_part(generation)
                    part.scheduler = Scheduler(self.shape.limits)
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

    def _from_behind(self, message: Message) -> None:
        if isinstance(message, Opened):
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
            return
        assert self.part is not None, "linked"
        if isinstance(message, Applied):
            self.part.chain.applied_behind(message.number, message.digest, self.now)
            self._confirmed(self.part)
        else:
            self.part.chain.heard(self.now)

    # Steps.

    def _run(self, step: Step) -> None:
        assert self.part is not None, "serving"
        self.part.chain.received += 1
        self.queue("steps", RunStep(self.part.number, step))

    def _confirmed(self, part: Part) -> None:
        number = StepNumber(part.chain.confirmed.num_steps - 1)
        if part.scheduler is not None:
            part.scheduler.applied(number)
            self._pump()
        else:
            self.send(self.before, Applied(number, part.chain.confirmed.digest))

    def take(self, kind: str, item: object) -> None:
        """The worker's next job, or its next report."""
        match item:
            case Begin(generation):
                self.log = AppliedLog(self.shape.limits.num_pages, self.shape.limits.page_size)
                self.log_generation = generation
                self.world.witness.log_begun(self, generation)
                if generation == 0 and self.life.state is LifeState.OVER:
                    self.after(self.world.pause(), "next life")
            case RunStep(generation, step):
                if generation == self.log_generation:
                    self._work(step)
            case Copy(generation, span):
                self._copy(generation, span)
            case StepDone(generation) | Copied(generation) | Failed(generation):
                if self.part is not None and self.part.number == generation:
                    try:
                        self._reported(self.part, item)
                    except KvmeshError as error:
                        self.end_life(error)

    def _work(self, step: Step) -> None:
        """In the worker: applies a step and computes it."""
        log = self.log
        try:
            log.apply(step)
        except KvmeshError as error:
            self.queue("reports", Failed(self.log_generation, error.reason))
            return
        self.world.witness.applied(self, step)
        sampled = []
        for work in step.work:
            admitted = log.rooms[work.room].admitted
            for page in admitted.pages:
                self.cells[page] = (self.log_generation, work.room)
            if self.life.is_last and work.end == admitted.prompt_len:
                sampled.append(((admitted.decoder, admitted.pairing), work.room))
        spans = computed_spans(log, step)
        self.queue("reports", StepDone(self.log_generation, step, log.digest, spans, tuple(sampled)))

    def _copy(self, generation: Generation, span: Computed) -> None:
        """In the worker: copies a frame of a room that lives."""
        room = readable(self.log, span.key, span.room) if generation == self.log_generation else None
        frame = None
        if room is not None:
            cells = frozenset(self.cells[page] for page in room.pages)
            frame = Frame(span.room, span.key[1], self.shape.shard, span.begin, span.end, cells)
        self.queue("reports", Copied(generation, span.key, frame))

    def _reported(self, part: Part, report: object) -> None:
        match report:
            case StepDone():
                self._step_done(part, report)
            case Copied(_, key, Frame() as frame):
                self.send(part.links.get(key), frame)
            case Failed(_, reason):
                self.end_life(Fault(f"rank {self.shape.rank} could not apply a step", reason=reason))
            case _:
                pass

    def _step_done(self, part: Part, done: StepDone) -> None:
        for key, room in done.sampled:
            request, index = self.world.witness.prompt_of(room)
            self.send(part.links.get(key), FirstToken(room, key[1], token_of(request, index)))
        for span in done.computed:
            if span.key in part.links:
                self.queue("copies", Copy(part.number, span))
        confirmed = part.chain.applied_here(done.step.number, done.digest, self.now)
        self.send(self.behind, Forwarded(done.step))
        if confirmed:
            self._confirmed(part)

    # Rank 0.

    def _from_decoder(self, stream: Stream, message: Message) -> None:
        part = self.part
        if part is None or part.scheduler is None:
            return
        key = next((k for k, control in part.controls.items() if control is stream), None)
        if key is None:
            return
        match message:
            case Admit():
                self._admit(part, part.scheduler, key, message, stream)
            case Drop(room):
                part.scheduler.drop(key, room)
                self._forget(part, [room])
            case Received(room):
                part.scheduler.received(key, room)
        self._pump()

    def _admit(self, part: Part, scheduler: Scheduler, key: PairingKey, admit: Admit, stream: Stream) -> None:
        try:
            scheduler.admit(
                key,
                admit.room,
                prompt_len=admit.prompt_len,
                cached_len=0,
                now=self.now,
                output_index=admit.output_index,
            )
        except KvmeshError as error:
            self.send(stream, RoomRefused(admit.room, error.reason))
            return
        part.prompts[admit.room] = admit

    def _pump(self) -> None:
        part = self.part
        if part is None or part.scheduler is None:
            return
        while (step := part.scheduler.next_step(self.now)) is not None:
            self.world.witness.written(self, step)
            for entry in step.entries:
                self._forget(part, [entry.room])
            self._run(step)
        self.world.witness.pumped(part.scheduler)

    def _forget(self, part: Part, rooms: list[RoomId]) -> None:
        for room in rooms:
            if part.scheduler is not None and not part.scheduler.holds(room):
                part.prompts.pop(room, None)

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
        if not self.hung and self.life.serving:
            self.send(self.before, Progress())
        if self.hung and self.local["steps"].items:
            self.end_life(Unavailable(f"rank {self.shape.rank} made no progress", reason="stage_hung"))
        elif self.part.chain.is_behind_silent(self.now, self.shape.watchdog_seconds):
            self.end_life(Unavailable(f"rank {self.shape.rank + 1} made no progress", reason="stage_hung"))

    def _load(self) -> Load:
        scheduler = self.part.scheduler if self.part is not None else None
        if scheduler is None:
            return Load(free_pages=self.shape.limits.num_pages)
        return Load(
            waiting_rooms=scheduler.waiting_rooms,
            running_rooms=scheduler.running_rooms,
            free_pages=scheduler.free_pages,
            queued_tokens=scheduler.queued_tokens,
        )
