"""A stage's worker: the thread that owns its log and its pages. What services/prefill/worker.py does, without tensors.

Called by the stage's process with each item of its two queues; reports through a third. The witness sees what it applies.
"""

from dataclasses import dataclass, field

from kvmesh.errors import KvmeshError
from kvmesh.protocol.coverage import ShardSpan
from kvmesh.protocol.ids import Generation, PageId, PairingKey, RoomId
from kvmesh.protocol.scheduler import Limits
from kvmesh.protocol.sending import Computed, computed_spans, readable
from kvmesh.protocol.steps import AppliedLog, Step
from simulator.messages import Cell, Frame, token_of
from simulator.process import Process


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
    sampled: tuple[tuple[PairingKey, RoomId, int], ...]
    """Pairing, room and first token."""


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
class StageWorker:
    """What the thread owns."""

    limits: Limits
    shard: ShardSpan
    is_last: bool
    log: AppliedLog = field(init=False)
    generation: Generation = Generation(0)
    cells: dict[tuple[PageId, int], Cell] = field(default_factory=dict)
    """Whose KV each slot of each page holds."""

    def __post_init__(self) -> None:
        self.log = AppliedLog(self.limits.num_pages, self.limits.page_size)

    def begin(self, stage: Process, generation: Generation) -> None:
        """Forgets the old log."""
        self.log = AppliedLog(self.limits.num_pages, self.limits.page_size)
        self.generation = generation
        stage.world.witness.log_begun(stage, generation)

    def run(self, stage: Process, asked: RunStep) -> None:
        """Applies a step and computes it; one of an older generation is passed over."""
        if asked.generation != self.generation:
            return
        try:
            self._apply(stage, asked.step)
        except KvmeshError as error:
            stage.queue("reports", Failed(self.generation, error.reason))

    def _apply(self, stage: Process, step: Step) -> None:
        log = self.log
        log.apply(step)
        stage.world.witness.applied(stage, step)
        sampled = []
        for work in step.work:
            admitted = log.rooms[work.room].admitted
            for token in range(work.begin, work.end):
                self.cells[self._slot(admitted.pages, token)] = (work.room, token)
            if self.is_last and work.end == admitted.prompt_len:
                drawn = token_of(admitted.sampling.seed, admitted.output_index)
                sampled.append(((admitted.decoder, admitted.pairing), work.room, drawn))
        spans = computed_spans(log, step)
        stage.queue("reports", StepDone(self.generation, step, log.digest, spans, tuple(sampled)))

    def _slot(self, pages: tuple[PageId, ...], token: int) -> tuple[PageId, int]:
        return pages[token // self.limits.page_size], token % self.limits.page_size

    def copy(self, stage: Process, asked: Copy) -> None:
        """Copies a frame of a room that lives."""
        span = asked.span
        room = readable(self.log, span.key, span.room) if asked.generation == self.generation else None
        frame = None
        if room is not None:
            cells = tuple(self.cells.get(self._slot(room.pages, token)) for token in range(span.begin, span.end))
            frame = Frame(span.room, span.key[1], self.shard, span.begin, span.end, cells)
        stage.queue("reports", Copied(asked.generation, span.key, frame))
