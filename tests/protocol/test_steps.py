import pytest

from kvmesh.errors import Fault
from kvmesh.protocol.ids import Incarnation, PageId, PairingNumber, RoomId, StepNumber
from kvmesh.protocol.steps import AppliedLog, RoomAdmitted, RoomDone, RoomDropped, Sampling, Step, Work


def admitted(room: int, pages: tuple[int, ...] = (0,), prompt_len: int = 4, cached_len: int = 0) -> RoomAdmitted:
    return RoomAdmitted(
        RoomId(room), PairingNumber(1), Incarnation(9), prompt_len, cached_len, tuple(PageId(p) for p in pages)
    )


def step(number: int, *parts: object) -> Step:
    entries = tuple(p for p in parts if not isinstance(p, Work))
    return Step(StepNumber(number), entries, tuple(p for p in parts if isinstance(p, Work)))  # type: ignore[arg-type]


def work(room: int, begin: int, end: int) -> Work:
    return Work(RoomId(room), begin, end)


def log() -> AppliedLog:
    return AppliedLog(num_pages=4, page_size=4)


def test_a_room_lives_from_its_admission_to_its_terminal_entry() -> None:
    applied = log()
    applied.apply(step(0, admitted(1), work(1, 0, 3)))
    assert applied.rooms[RoomId(1)].computed_len == 3
    applied.apply(step(1, work(1, 3, 4)))
    applied.apply(step(2, RoomDone(RoomId(1))))
    assert not applied.rooms


def test_pages_may_be_given_out_again_by_the_very_step_that_frees_them() -> None:
    applied = log()
    applied.apply(step(0, admitted(1, (0, 1), 8)))
    applied.apply(step(1, RoomDropped(RoomId(1)), admitted(2, (1, 0), 8), work(2, 0, 8)))
    assert list(applied.rooms) == [2]


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (step(1), "step 1 came where step 0 is next"),
        (step(0, admitted(1), admitted(1, (1,))), "admitted twice"),
        (step(0, admitted(1), admitted(2)), "page 0 is held by room 1"),
        (step(0, admitted(1, (4,))), "outside a pool of 4"),
        (step(0, admitted(1, (0,), 5)), "1 pages do not hold 5 tokens"),
        (step(0, admitted(1, cached_len=4)), "cached_len 4"),
        (step(0, RoomDone(RoomId(7))), "room 7 ended and is unknown"),
        (step(0, RoomDropped(RoomId(7))), "room 7 ended and is unknown"),
        (step(0, work(7, 0, 1)), "room 7, which is unknown"),
        (step(0, admitted(1), work(1, 1, 2)), "does not continue at 0"),
        (step(0, admitted(1), work(1, 0, 5)), "does not continue"),
        (step(0, admitted(1), work(1, 0, 0)), "does not continue"),
    ],
)
def test_what_can_not_follow_is_a_fault_at_once(wrong: Step, says: str) -> None:
    """F-P4: a gap or a mismatch is found where it happens."""
    with pytest.raises(Fault, match=says):
        log().apply(wrong)


@pytest.mark.parametrize("repeat", [0, 1])
def test_a_step_is_applied_once(repeat: int) -> None:
    applied = log()
    applied.apply(step(0))
    applied.apply(step(1))
    with pytest.raises(Fault, match=f"step {repeat} came where step 2 is next"):
        applied.apply(step(repeat))


def test_equal_logs_have_equal_digests_and_others_have_not() -> None:
    def digest(*steps: Step) -> bytes:
        applied = log()
        for s in steps:
            applied.apply(s)
        return applied.digest

    base = digest(step(0, admitted(1), work(1, 0, 2)), step(1, work(1, 2, 4)))
    assert base == digest(step(0, admitted(1), work(1, 0, 2)), step(1, work(1, 2, 4)))
    others = [
        digest(step(0, admitted(1), work(1, 0, 3)), step(1, work(1, 3, 4))),
        digest(step(0, admitted(1, (1,)), work(1, 0, 2)), step(1, work(1, 2, 4))),
        digest(step(0, admitted(2), work(2, 0, 2)), step(1, work(2, 2, 4))),
        digest(step(0, admitted(1), work(1, 0, 2)), step(1, work(1, 2, 4)), step(2)),
        digest(step(0, admitted(1)), step(1, RoomDone(RoomId(1)))),
        digest(step(0, admitted(1)), step(1, RoomDropped(RoomId(1)))),
    ]
    assert len({base, *others}) == len(others) + 1


def test_what_the_log_only_carries_is_not_in_the_digest() -> None:
    """A sampling temperature loses bits on the wire; the decisions do not."""
    one, other = admitted(1), admitted(1)
    other = RoomAdmitted(other.room, other.pairing, other.decoder, 4, 0, other.pages, Sampling(temperature=0.1), 0)
    logs = [log(), log()]
    logs[0].apply(step(0, one, work(1, 0, 4)))
    logs[1].apply(step(0, other, Work(RoomId(1), 0, 4, queued_seconds=3.0)))
    assert logs[0].digest == logs[1].digest
