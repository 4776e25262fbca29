"""What a stage sends for a step, and which pages it may still read."""

from kvmesh.protocol.ids import Incarnation, PageId, PairingNumber, RoomId, StepNumber
from kvmesh.protocol.sending import Computed, computed_spans, readable
from kvmesh.protocol.steps import AppliedLog, RoomAdmitted, RoomDone, Step, Work

KEY = (Incarnation(1), PairingNumber(2))
ROOM = RoomId(9)


def admitted(cached_len: int) -> RoomAdmitted:
    return RoomAdmitted(ROOM, KEY[1], KEY[0], prompt_len=8, cached_len=cached_len, pages=(PageId(0), PageId(1)))


def applied(*steps: Step) -> AppliedLog:
    log = AppliedLog(num_pages=4, page_size=4)
    for step in steps:
        log.apply(step)
    return log


def test_a_step_sends_its_work_less_what_the_decoder_has() -> None:
    first = Step(StepNumber(0), (admitted(4),), (Work(ROOM, 0, 6),))
    second = Step(StepNumber(1), (), (Work(ROOM, 6, 8),))
    assert computed_spans(applied(first), first) == (Computed(KEY, ROOM, 4, 6),)
    assert computed_spans(applied(first, second), second) == (Computed(KEY, ROOM, 6, 8),)


def test_work_that_the_decoder_has_whole_is_not_sent() -> None:
    step = Step(StepNumber(0), (admitted(4),), (Work(ROOM, 0, 4),))
    assert computed_spans(applied(step), step) == ()


def test_pages_are_read_only_for_a_room_that_lives_and_its_own_pairing() -> None:
    """F-A3: they may be another room's by then."""
    begun = Step(StepNumber(0), (admitted(0),), (Work(ROOM, 0, 8),))
    log = applied(begun)
    assert readable(log, KEY, ROOM) is log.rooms[ROOM]
    assert readable(log, (Incarnation(1), PairingNumber(3)), ROOM) is None
    log.apply(Step(StepNumber(1), (RoomDone(ROOM),)))
    assert readable(log, KEY, ROOM) is None
