"""Deliberately broken variants of the core: each breaks one rule, and the invariant it must be caught by is named beside it.

A variant replaces methods of the core's own classes while it is entered. What it is called says what it gets wrong.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from kvmesh.errors import KvmeshError
from kvmesh.protocol.coverage import Coverage
from kvmesh.protocol.ids import PageId, RoomId, StepNumber
from kvmesh.protocol.pages import Pages
from kvmesh.protocol.pairings import PairingBook
from kvmesh.protocol.receiving import Receiving
from kvmesh.protocol.request import Request
from kvmesh.protocol.rooms import DecoderRooms
from kvmesh.protocol.scheduler import Scheduler
from kvmesh.protocol.steps import AppliedLog, RoomAdmitted, RoomDropped, Step
from simulator import decode_worker, stage_worker

Patch = tuple[object, str, Any]


@dataclass(frozen=True)
class Mutation:
    """One broken variant."""

    name: str
    invariant: int
    patches: Callable[[], list[Patch]]

    @contextmanager
    def entered(self) -> Iterator[None]:
        """The core is broken while this is entered."""
        patches = self.patches()
        before = [(owner, name, getattr(owner, name)) for owner, name, _ in patches]
        for owner, name, broken in patches:
            setattr(owner, name, broken)
        try:
            yield
        finally:
            for owner, name, whole in before:
                setattr(owner, name, whole)


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

    def broken(self: Scheduler, now: float) -> Step | None:
        step = next_step(self, now)
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

    def broken(self: Scheduler, now: float) -> Step | None:
        step = next_step(self, now)
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

    return [(Receiving, "close", lambda self, room: None), (decode_worker.DecodeWorker, "_forget", kept)]


def complete_after_one_stage() -> list[Patch]:
    """F-C1: a decoder that takes the first stage's chunks for all of them."""

    def broken(self: Coverage) -> bool:
        return any(all(s.overlap(self.begin, self.end) for s in layers) for layers in self._layers.values())

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


def admission_by_rounds() -> list[Patch]:
    """F-P19: rank 0 admits only when every step before went all the way round."""
    admit_rooms = Scheduler._admit_rooms

    def broken(self: Scheduler, now: float) -> list[Any]:
        return admit_rooms(self, now) if self.steps_in_flight == 0 else []

    return [(Scheduler, "_admit_rooms", broken)]


MUTATIONS = [
    Mutation("rank 0 gives a step's number out twice", 1, step_written_twice),
    Mutation("aborts are told to rank 0 only", 1, aborts_told_to_rank_0_only),
    Mutation("work is scheduled before its room is admitted", 2, admission_told_a_step_late),
    Mutation("a page is given out twice", 3, page_given_out_twice),
    Mutation("a room ends and its pages stay taken", 3, pages_forgotten_on_cancel),
    Mutation("late frames are written", 4, late_frames_written),
    Mutation("a room counts as complete after one stage", 4, complete_after_one_stage),
    Mutation("a frame is read from another room's pages", 4, frames_read_after_the_end),
    Mutation("a replay forgets what the client has", 5, output_forgotten_on_replay),
    Mutation("a replay skips a token", 5, tokens_skipped),
    Mutation("a lost pairing is never made again", 6, never_paired_again),
    Mutation("a room is admitted only between rounds", 8, admission_by_rounds),
]
