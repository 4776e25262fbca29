"""The stage's worker: the one thread that owns the stage's layers, its pages and its applied log.

The event loop posts records and receives records; it never touches a tensor, and the worker never awaits. Between two
layers the worker copies KV frames that links asked for, so a step's KV leaves while it computes, and while the next one does.
"""

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic

import torch

from kvmesh.errors import Fault
from kvmesh.kv.frames import Handle
from kvmesh.kv.layout import DTYPE_BYTES, Piece
from kvmesh.kv.segment import Cell
from kvmesh.kv.wire import TORCH_DTYPES
from kvmesh.model.runner import Runner, Span
from kvmesh.model.sampling import SamplingParams, sample
from kvmesh.protocol.ids import Generation, PairingKey, RoomId
from kvmesh.protocol.sending import Computed, computed_spans, readable
from kvmesh.protocol.steps import AppliedLog, RoomOnStage, Step
from services.prefill.filling import Filling


@dataclass(frozen=True, slots=True)
class BeginGeneration:
    """Forget the old log, its pages and all that is queued; begin an empty one."""

    generation: Generation
    """0: none; the worker rests."""
    begun: Callable[[], object] | None = None
    """Called in the worker's thread once the old one is forgotten."""


@dataclass(frozen=True, slots=True)
class RunStep:
    """Apply a step and compute its micro-batch."""

    generation: Generation
    step: Step
    tokens: list[int] | None
    """Rank 0: the micro-batch's token ids."""
    activations: bytes
    """Ranks above 0: [T, hidden] in the pipeline's dtype."""


@dataclass(frozen=True, slots=True)
class CopyFrame:
    """Copy a piece of a room's KV out of its pages into a sealed frame."""

    generation: Generation
    key: PairingKey
    room: RoomId
    piece: Piece
    cell: Cell | None = None
    """Where the frame goes; None: into bytes of its own."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """The first token of a room, drawn by the last rank."""

    key: PairingKey
    room: RoomId
    token: int


@dataclass(frozen=True, slots=True)
class StepDone:
    """A step was applied here and its micro-batch computed."""

    generation: Generation
    step: Step
    digest: bytes
    activations: bytes
    """What the next rank continues with; empty at the last rank or without work."""
    computed: tuple[Computed, ...]
    """KV that lies in its pages now; some of its layers may have been told as LayersDone."""
    sampled: tuple[Sampled, ...]
    began: float
    """When the worker took it up, on the monotonic clock."""
    ended: float
    """The same: when it was through."""
    num_rooms: int
    """Rooms of the log after it."""
    free_pages: int
    """Pages that no room of the log holds after it."""


@dataclass(frozen=True, slots=True)
class LayersDone:
    """One more layer of a step that goes on was computed here."""

    generation: Generation
    step: Step
    computed: tuple[Computed, ...]
    at: float
    """Monotonic time."""


@dataclass(frozen=True, slots=True)
class FrameCopied:
    """A frame is ready to be sent."""

    asked: CopyFrame
    frame: bytes | Handle | None
    """The frame itself, or where it stands in the segment; None when its room had ended."""


@dataclass(frozen=True, slots=True)
class WorkerFailed:
    """A step could not be applied or computed: the generation is over."""

    generation: Generation
    error: BaseException


Report = StepDone | LayersDone | FrameCopied | WorkerFailed


class StageWorker:
    """A thread with two queues in: steps, in order, and copies, served first and between layers."""

    def __init__(self, runner: Runner, receive: Callable[[Report], None]) -> None:
        """Args:
        runner: the stage's layers and pool; from here on only this thread touches it.
        receive: called in this thread with each report; hands it to the event loop.
        """
        self._runner = runner
        self._receive = receive
        self._steps: deque[BeginGeneration | RunStep] = deque()
        self._copies: deque[CopyFrame] = deque()
        self._wake = threading.Condition()
        self._stopping = False
        self._busy = False
        self._moved_at = monotonic()
        self._generation = Generation(0)
        self._log = AppliedLog(runner.pool.num_pages, runner.pool.page_size)
        self._thread = threading.Thread(target=self._run, name="stage-worker", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Lets the thread end after the step it is in, and waits for it."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        self._thread.join()

    def post(self, record: BeginGeneration | RunStep | CopyFrame) -> None:
        """Queues a record. Steps of one generation run in the order posted."""
        with self._wake:
            if self.idle:  # the time it rested is no time without progress
                self._moved_at = monotonic()
            if isinstance(record, CopyFrame):
                self._copies.append(record)
            else:
                if isinstance(record, BeginGeneration):
                    self._steps.clear()
                    self._copies.clear()
                self._steps.append(record)
            self._wake.notify()

    def age_seconds(self) -> float | None:
        """Time since the worker last moved (a layer, a frame, a step); None when it owes nothing."""
        return monotonic() - self._moved_at if self._busy or self._steps else None

    @property
    def idle(self) -> bool:
        """Nothing queued, nothing computing."""
        return not (self._busy or self._steps or self._copies)

    async def rest(self) -> None:
        """Forgets everything queued and waits until the worker is idle."""
        loop, resting = asyncio.get_running_loop(), asyncio.Event()
        self.post(BeginGeneration(Generation(0), lambda: loop.call_soon_threadsafe(resting.set)))
        await resting.wait()

    def _run(self) -> None:
        while True:
            with self._wake:
                self._busy = False
                while not (self._steps or self._copies or self._stopping):
                    self._wake.wait()
                if self._stopping:
                    return
                self._busy = True
                self._moved_at = monotonic()
                record = self._copies.popleft() if self._copies else self._steps.popleft()
            try:
                self._take(record)
            except Exception as error:
                self._receive(WorkerFailed(self._generation, error))
            del record  # and with it the cell of a segment that may have ended

    def _take(self, record: BeginGeneration | RunStep | CopyFrame) -> None:
        if isinstance(record, CopyFrame):
            self._copy(record)
        elif isinstance(record, BeginGeneration):
            self._generation = record.generation
            self._log = AppliedLog(self._runner.pool.num_pages, self._runner.pool.page_size)
            if record.begun is not None:
                record.begun()
        elif record.generation == self._generation:
            self._receive(self._step(record))

    def _step(self, record: RunStep) -> StepDone:
        step, log, began = record.step, self._log, monotonic()
        log.apply(step)
        rooms = [log.rooms[w.room] for w in step.work]
        computed = computed_spans(log, step)
        filling = Filling(computed, self._runner.pool.shard)
        activations, sampled = self._compute(record, rooms, filling) if step.work else (b"", ())
        return StepDone(
            record.generation,
            step,
            log.digest,
            activations,
            computed,
            sampled,
            began=began,
            ended=monotonic(),
            num_rooms=len(log.rooms),
            free_pages=log.free_pages,
        )

    def _compute(
        self, record: RunStep, rooms: list[RoomOnStage], filling: Filling
    ) -> tuple[bytes, tuple[Sampled, ...]]:
        runner, work = self._runner, record.step.work
        whole = [w.end == r.admitted.prompt_len for w, r in zip(work, rooms, strict=True)]
        spans = [
            Span(pages=r.pages, begin=w.begin, end=w.end, sample=last)
            for w, r, last in zip(work, rooms, whole, strict=True)
        ]
        out = runner.forward(spans, self._inputs(record), lambda: self._between_layers(record, filling))
        if not runner.is_last:
            return out.contiguous().view(torch.uint8).cpu().numpy().tobytes(), ()
        ending = [r.admitted for r, last in zip(rooms, whole, strict=True) if last]
        params = [
            SamplingParams(a.sampling.temperature, a.sampling.top_k, a.sampling.top_p, a.sampling.seed) for a in ending
        ]
        tokens = sample(out, params, [a.output_index for a in ending]) if ending else []
        return b"", tuple(
            Sampled((a.decoder, a.pairing), a.room, token) for a, token in zip(ending, tokens, strict=True)
        )

    def _inputs(self, record: RunStep) -> torch.Tensor:
        """Token ids [T] at rank 0, activations [T, hidden] above."""
        if record.tokens is not None:
            return torch.tensor(record.tokens, dtype=torch.int64)
        dtype, hidden, num_tokens = self._runner.pool.shard.dtype, self._runner.hidden_size, record.step.num_tokens
        if len(record.activations) != num_tokens * hidden * DTYPE_BYTES[dtype]:
            raise Fault(f"step {record.step.number} came with {len(record.activations)} bytes for {num_tokens} tokens")
        # A bytearray, since torch warns of memory it may not write.
        return torch.frombuffer(bytearray(record.activations), dtype=TORCH_DTYPES[dtype]).view(num_tokens, hidden)

    def _between_layers(self, record: RunStep, filling: Filling) -> None:
        self._moved_at = monotonic()
        computed = filling.layer()
        if computed:
            self._receive(LayersDone(record.generation, record.step, computed, self._moved_at))
        while (asked := self._next_copy()) is not None:
            self._copy(asked)

    def _next_copy(self) -> CopyFrame | None:
        with self._wake:  # a new generation clears them
            return self._copies.popleft() if self._copies else None

    def _copy(self, asked: CopyFrame) -> None:
        """Copies for a room of the running log; a room that ended, or an older generation, yields None."""
        room = readable(self._log, asked.key, asked.room) if asked.generation == self._generation else None
        if room is None:
            self._receive(FrameCopied(asked, None))
            return
        pool, cell, pairing = self._runner.pool, asked.cell, asked.key[1]
        if cell is None:
            frame: bytes | Handle = pool.frame(room.pages, asked.piece, room=asked.room, pairing=pairing)
        else:
            num_bytes = pool.seal_frame(cell.memory, room.pages, asked.piece, room=asked.room, pairing=pairing)
            frame = Handle(cell.number, num_bytes)
        self._receive(FrameCopied(asked, frame))
        self._moved_at = monotonic()
