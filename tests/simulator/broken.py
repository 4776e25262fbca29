"""Ways to break the core: each replaces methods of its own classes by ones that get something wrong, and says what."""

from dataclasses import replace
from typing import Any

from kvmesh.errors import KvmeshError, Unavailable
from kvmesh.protocol.chain import Chain
from kvmesh.protocol.coverage import Coverage
from kvmesh.protocol.ids import PageId, RoomId, StepNumber
from kvmesh.protocol.life import StageLife
from kvmesh.protocol.pages import Pages
from kvmesh.protocol.pairing import Ask as PairingAsk
from kvmesh.protocol.pairing import Pairing, PairingState
from kvmesh.protocol.pairings import PairingBook
from kvmesh.protocol.receiving import Outcome, Receiving
from kvmesh.protocol.remembered import Remembered
from kvmesh.protocol.request import Request
from kvmesh.protocol.rooms import DecoderRooms
from kvmesh.protocol.scheduler import Scheduler
from kvmesh.protocol.sending import Computed
from kvmesh.protocol.steps import AppliedLog, RoomAdmitted, RoomDropped, Step
from simulator import copier, decode_worker, stage_worker
from simulator.process import Process

Patch = tuple[object, str, Any]


def lenient_log() -> list[Patch]:
    """A stage that shrugs at what it does not know, instead of ending the generation."""
    end, advance = AppliedLog._end, AppliedLog._advance

    def shrugging_end(self: AppliedLog, room: RoomId) -> None:
        if room in self.rooms:
            end(self, room)

    def shrugging_advance(self: AppliedLog, work: Any) -> None:
        if work.room in self.rooms:
            advance(self, work)

    return [(AppliedLog, "_end", shrugging_end), (AppliedLog, "_advance", shrugging_advance)]


def step_written_twice() -> list[Patch]:
    """Rank 0 gives a number out twice when a step has no work."""
    next_step = Scheduler.next_step

    def broken(self: Scheduler) -> Step | None:
        step = next_step(self)
        if step is not None and not step.work:
            self._next_number = StepNumber(self._next_number - 1)
            self._working.pop()
        return step

    return [(Scheduler, "next_step", broken)]


def aborts_told_to_rank_0_only() -> list[Patch]:
    """F-P5: the stages behind never hear of a room that was dropped."""
    apply = stage_worker.StageWorker._apply

    def broken(self: Any, process: Any, step: Step) -> None:
        if process.shape.rank:
            step = Step(step.number, tuple(e for e in step.entries if not isinstance(e, RoomDropped)), step.work)
        apply(self, process, step)

    return [(stage_worker.StageWorker, "_apply", broken)]


def admission_told_a_step_late() -> list[Patch]:
    """Rank 0 schedules a room's work before the step that admits it."""
    next_step, late = Scheduler.next_step, dict[int, list[Any]]()

    def broken(self: Scheduler) -> Step | None:
        step = next_step(self)
        if step is None:
            return None
        kept = late.pop(id(self), [])
        late[id(self)] = [e for e in step.entries if isinstance(e, RoomAdmitted)]
        others = [e for e in step.entries if not isinstance(e, RoomAdmitted)]
        return Step(step.number, (*kept, *others), step.work)

    return [(Scheduler, "next_step", broken), *lenient_log()]


def page_given_out_twice() -> list[Patch]:
    """An allocator that forgets what it gave out."""

    def broken(self: Pages, count: int) -> tuple[PageId, ...] | None:
        return tuple(PageId(p) for p in range(count)) if count <= self.num_pages else None

    return [(Pages, "take", broken), (Pages, "give", lambda self, pages: None)]


def pages_forgotten_on_cancel() -> list[Patch]:
    """A path that ends a room and keeps its pages."""
    forget = DecoderRooms._forget

    def broken(self: DecoderRooms, room: Any) -> None:
        if room.num_pages % 2:
            room.pages = ()
        forget(self, room)

    return [(DecoderRooms, "_forget", broken)]


def late_frames_written() -> list[Patch]:
    """A decoder that writes for rooms that have ended: their pages may be another's."""

    def kept(self: Any, process: Any, room: RoomId) -> None:
        process.world.witness.room_closed(process, room)

    return [(Receiving, "close", lambda self, room: []), (copier.Copier, "_forget", kept)]


def grant_not_waited_for() -> list[Patch]:
    """A copier that writes for a new room while the worker still computes in its pages."""
    return [(Receiving, "put_aside", lambda self, room, pairing, link, item: False)]


def let_go_in_the_step() -> list[Patch]:
    """A worker that lets a room go when it is told of its end, not after the step that writes its pages."""
    post = decode_worker.DecodeWorker.post

    def broken(self: Any, process: Any, record: Any) -> None:
        if isinstance(record, decode_worker.CloseRoom) and record.room in self.running:
            process.world.witness.let_go(process, record.room)
            process.queue("inbox", decode_worker.LetGo(record.room))
        post(self, process, record)

    return [(decode_worker.DecodeWorker, "post", broken)]


def put_aside_and_dropped() -> list[Patch]:
    """A copier that forgets what came before the grant."""
    let_go = Receiving.let_go

    def broken(self: Receiving[Any], room: RoomId) -> list[Any]:
        let_go(self, room)
        return []

    return [(Receiving, "let_go", broken)]


def complete_after_one_stage() -> list[Patch]:
    """F-C1: a decoder that takes the first stage's chunks for all of them."""

    def broken(self: Coverage) -> bool:
        return any(
            all(spans.overlap(self.begin, self.end) for _, layers in own for spans in layers)
            for own in self._shards.values()
        )

    return [(Coverage, "complete", property(broken))]


def frames_read_after_the_end() -> list[Patch]:
    """A stage that copies out of pages without asking whose they are now; and says the room it was asked for."""

    def broken(log: AppliedLog, key: Any, room: RoomId) -> Any:
        held = log.rooms.get(room)
        if held is not None:
            others = [r for r in log.rooms.values() if r is not held]
            return others[0] if others else held
        return None

    return [(stage_worker, "readable", broken)]


def output_forgotten_on_replay() -> list[Patch]:
    """A gateway that replays the prompt without what the client has."""
    failed = Request.failed

    def broken(self: Request, error: KvmeshError) -> bool:
        again = failed(self, error)
        self.output.clear()
        return again

    return [(Request, "failed", broken)]


def tokens_skipped() -> list[Patch]:
    """A gateway that replays more than the client has."""
    failed = Request.failed

    def broken(self: Request, error: KvmeshError) -> bool:
        again = failed(self, error)
        if self.left > 1:
            self.output.append(0)
        return again

    return [(Request, "failed", broken)]


def never_paired_again() -> list[Patch]:
    """F-D3: a decoder that gives a generation up with its first pairing."""
    return [(PairingBook, "may_pair_again", lambda self, generation: False)]


def held_generation_forgotten() -> list[Patch]:
    """A stage that registers anew whenever its lease is lost, as if nothing ran."""
    return [(StageLife, "held", property(lambda self: 0))]


def never_retried() -> list[Patch]:
    """A gateway that gives a request up with its first room."""

    def broken(self: Request, error: KvmeshError) -> bool:
        self.failures.append(error.reason)
        return False

    return [(Request, "failed", broken)]


def every_room_refused() -> list[Patch]:
    """A decoder that takes nothing."""

    def broken(self: DecoderRooms, *args: object, **more: object) -> None:
        raise Unavailable("not today")

    return [(DecoderRooms, "open", broken)]


def sent_before_computed() -> list[Patch]:
    """A stage that sends a whole prompt with its first chunk."""

    def broken(log: AppliedLog, step: Step) -> tuple[Computed, ...]:
        spans = []
        for work in [w for w in step.work if w.begin == 0]:
            own = log.rooms[work.room].admitted
            spans.append(Computed((own.decoder, own.pairing), work.room, 0, own.prompt_len))
        return tuple(spans)

    return [(stage_worker, "computed_spans", broken)]


def output_index_not_in_the_log() -> list[Patch]:
    """Rank 0 lets the last rank draw the first token as if nothing had come before."""
    begin = Scheduler._begin

    def broken(self: Scheduler, room: Any, pages: Any) -> RoomAdmitted:
        return replace(begin(self, room, pages), output_index=0)

    return [(Scheduler, "_begin", broken)]


def head_paired_first() -> list[Patch]:
    """A decoder that links rank 0, and the ranks behind when it is too late."""

    def start(self: Pairing) -> list[PairingAsk]:
        self.state = PairingState.LINKING_HEAD
        return [PairingAsk.DIAL_HEAD]

    def linked(self: Pairing, rank: int, shard: Any) -> list[PairingAsk]:
        self.shards[rank] = shard  # type: ignore[index]
        if rank:
            return []
        self.state = PairingState.OPENING_CONTROL
        return [PairingAsk.DIAL_TAIL, PairingAsk.OPEN_CONTROL]

    return [(Pairing, "start", start), (Pairing, "linked", linked)]


def first_tokens_lost() -> list[Patch]:
    """A decoder that loses a first token now and then, and waits for it."""
    first_token = Receiving.first_token

    def broken(self: Receiving[Any], room: RoomId, *rest: Any) -> Outcome:
        return Outcome.LATE if room % 3 == 0 else first_token(self, room, *rest)

    return [(Receiving, "first_token", broken)]


def no_watchdog() -> list[Patch]:
    """Nobody minds that a worker stands still."""
    return [
        (Chain, "is_behind_silent", lambda self, now, limit: False),
        (Process, "age_seconds", lambda self: None),
    ]


def ended_rooms_forgotten() -> list[Patch]:
    """An Admit that comes again is taken for a new one."""
    return [(Remembered, "__contains__", lambda self, room: False)]


def admission_by_rounds() -> list[Patch]:
    """F-P19: rank 0 admits only when every step before went all the way round."""
    admit_rooms = Scheduler._admit_rooms

    def broken(self: Scheduler) -> list[Any]:
        return admit_rooms(self) if self.steps_in_flight == 0 else []

    return [(Scheduler, "_admit_rooms", broken)]
