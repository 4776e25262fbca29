import random

import pytest

from kvmesh.errors import DuplicateRoom, Fault, Fenced, Full, InvalidInput, Unavailable
from kvmesh.protocol.head_room import RoomState
from kvmesh.protocol.ids import Incarnation, PairingKey, PairingNumber, RoomId, StepNumber
from kvmesh.protocol.scheduler import Limits, Scheduler
from kvmesh.protocol.steps import AppliedLog, RoomAdmitted, RoomDone, RoomDropped, Step

A: PairingKey = (Incarnation(1), PairingNumber(1))
B: PairingKey = (Incarnation(2), PairingNumber(1))


def limits(**changes: int) -> Limits:
    values = {
        "num_pages": 8,
        "page_size": 4,
        "max_prompt_len": 32,
        "step_tokens": 8,
        "max_steps_in_flight": 3,
        "max_waiting_rooms": 4,
        "max_steps_ahead": 99,
    }
    return Limits(**(values | changes))


def scheduler(*keys: PairingKey, **changes: int) -> Scheduler:
    head = Scheduler(limits(**changes))
    for key in keys or (A,):
        head.pair(key)
    return head


def ask(head: Scheduler, room: int, prompt_len: int = 4, key: PairingKey = A) -> None:
    head.admit(key, RoomId(room), prompt_len=prompt_len, cached_len=0)


def take(head: Scheduler) -> Step:
    step = head.next_step()
    assert step is not None
    return step


def admitted_in(step: Step) -> list[int]:
    return [e.room for e in step.entries if isinstance(e, RoomAdmitted)]


def spans(step: Step) -> list[tuple[int, int, int]]:
    return [(w.room, w.begin, w.end) for w in step.work]


def settle(head: Scheduler, step: Step) -> None:
    head.applied(step.number)


def test_admission_is_one_message_and_starts_in_the_very_next_step() -> None:
    """F-P19: it depends on neither the number of stages nor the length of a step."""
    head = scheduler()
    ask(head, 1)
    step = take(head)
    assert admitted_in(step) == [1]
    assert spans(step) == [(1, 0, 4)]


def test_long_prompts_are_cut_and_several_rooms_share_a_step() -> None:
    head = scheduler()
    ask(head, 1, 11)
    ask(head, 2, 7)
    assert spans(take(head)) == [(1, 0, 8)]
    assert spans(take(head)) == [(1, 8, 11), (2, 0, 5)]
    assert spans(take(head)) == [(2, 5, 7)]


def test_steps_in_flight_are_bounded_by_applied() -> None:
    """F-P18: and until then written ahead, without an answer from any stage."""
    head = scheduler()
    ask(head, 1, 32)
    steps = [take(head) for _ in range(3)]
    assert head.next_step() is None
    assert head.steps_in_flight == 3
    settle(head, steps[0])
    assert take(head).number == 3


@pytest.mark.parametrize("number", [-1, 1, 7])
def test_applied_of_a_step_never_written_or_not_newer_is_a_fault(number: int) -> None:
    head = scheduler()
    ask(head, 1)
    settle(head, take(head))
    with pytest.raises(Fault, match="applied"):
        head.applied(StepNumber(number))


def test_received_ends_a_room_with_done_and_frees_its_pages_in_that_step() -> None:
    head = scheduler()
    ask(head, 1, 32)
    for _ in range(4):
        settle(head, take(head))
    ask(head, 2, 4)
    assert head.next_step() is None, "no page is free"
    head.received(A, RoomId(1))
    step = take(head)
    assert step.entries[0] == RoomDone(RoomId(1))
    assert admitted_in(step) == [2]
    assert list(head.states) == [2]


def test_a_drop_while_prefilling_leaves_no_work_behind() -> None:
    head = scheduler()
    ask(head, 1, 20)
    settle(head, take(head))
    head.drop(A, RoomId(1))
    step = take(head)
    assert step.entries == (RoomDropped(RoomId(1)),)
    assert step.work == ()
    assert head.free_pages == 8


def test_a_drop_of_a_waiting_room_never_reaches_the_log() -> None:
    """F-P5: no stage learns of a room that rank 0 dropped before it admitted it."""
    head = scheduler()
    ask(head, 1, 32)
    settle(head, take(head))
    ask(head, 2, 4)
    head.drop(A, RoomId(2))
    assert head.waiting_rooms == 0
    for _ in range(3):
        settle(head, take(head))
    assert head.next_step() is None


def test_an_entry_makes_a_step_of_its_own_at_once() -> None:
    """F-A12: nothing waits for the next work; an abort can't overtake its admission either, both stand in one log."""
    head = scheduler()
    ask(head, 1)
    settle(head, take(head))
    head.drop(A, RoomId(1))
    step = take(head)
    assert (step.entries, step.work) == ((RoomDropped(RoomId(1)),), ())
    assert head.idle is False
    settle(head, step)
    assert head.idle is True


@pytest.mark.parametrize("twice", ["drop", "received"])
def test_late_words_for_an_ended_room_change_nothing(twice: str) -> None:
    head = scheduler()
    ask(head, 1)
    settle(head, take(head))
    head.received(A, RoomId(1))
    settle(head, take(head))
    getattr(head, twice)(A, RoomId(1))
    assert head.next_step() is None
    assert head.free_pages == 8


def test_another_decoder_can_not_end_a_room() -> None:
    head = scheduler(A, B)
    ask(head, 1)
    settle(head, take(head))
    head.drop(B, RoomId(1))
    head.received(B, RoomId(1))
    assert head.next_step() is None
    assert head.states[RoomId(1)] is RoomState.PREFILLED


def test_received_before_the_last_token_is_scheduled_is_a_fault() -> None:
    head = scheduler()
    ask(head, 1, 20)
    take(head)
    with pytest.raises(Fault, match="received cannot happen while prefilling"):
        head.received(A, RoomId(1))


def test_a_step_is_not_written_long_before_rank_0_can_compute_it() -> None:
    """F-P19: a step that is written takes no room that comes later."""
    head = scheduler(step_tokens=4, max_steps_ahead=2)
    ask(head, 1, prompt_len=16)
    first, _ = take(head), take(head)
    assert head.next_step() is None
    ask(head, 2)
    head.applied_here(first.number)
    assert admitted_in(take(head)) == [2]
    assert head.steps_in_flight == 3


def test_an_admit_that_comes_again_after_its_room_ended_is_refused() -> None:
    """F-R2: nobody would ever end it a second time."""
    head = scheduler()
    for room, end in ((1, head.received), (2, head.drop)):
        ask(head, room)
        settle(head, take(head))
        end(A, RoomId(room))
        with pytest.raises(DuplicateRoom):
            ask(head, room)
        settle(head, take(head))
        with pytest.raises(DuplicateRoom):
            ask(head, room)
    assert head.idle


def test_rooms_in_flight_are_those_with_work_that_is_not_confirmed() -> None:
    """If the generation dies now, one of them may be why."""
    head = scheduler(A, B, step_tokens=4)
    ask(head, 1)
    ask(head, 2, key=B)
    first, second = take(head), take(head)
    assert (head.rooms_in_flight(A), head.rooms_in_flight(B)) == ([1], [2])
    settle(head, first)
    assert (head.rooms_in_flight(A), head.rooms_in_flight(B)) == ([], [2])
    settle(head, second)
    assert head.rooms_in_flight(B) == []


def test_a_second_admit_for_a_known_room_is_refused() -> None:
    """F-R2"""
    head = scheduler()
    ask(head, 1)
    with pytest.raises(DuplicateRoom):
        ask(head, 1)
    settle(head, take(head))
    with pytest.raises(DuplicateRoom):
        ask(head, 1)
    assert spans_of_all(head) == []


def spans_of_all(head: Scheduler) -> list[tuple[int, int, int]]:
    found = []
    while (step := head.next_step()) is not None:
        found += spans(step)
        settle(head, step)
    return found


def test_the_queue_is_bounded_and_says_when_to_come_back() -> None:
    """F-K1, F-T2"""
    head = scheduler()
    for room in range(1, 5):
        ask(head, room)
    with pytest.raises(Full, match="4 rooms wait") as caught:
        ask(head, 5)
    assert caught.value.retry_after_seconds == 1.0
    assert head.waiting_rooms == 4


@pytest.mark.parametrize(("prompt_len", "cached_len"), [(33, 0), (0, 0), (4, 4), (4, -1)])
def test_a_plan_that_can_not_be_is_refused(prompt_len: int, cached_len: int) -> None:
    """F-C8: what an empty pool could not hold is said at once."""
    head = scheduler()
    with pytest.raises(InvalidInput):
        head.admit(A, RoomId(1), prompt_len=prompt_len, cached_len=cached_len)
    assert not head.states


def test_what_a_decoder_says_it_has_is_in_whole_pages_of_its_own() -> None:
    """Its pages, not the pipeline's: those are of 4 tokens here."""
    head = scheduler()
    head.pair(B, decoder_page_size=6)
    for cached_len in (4, 7, 11):
        with pytest.raises(InvalidInput, match=f"cached_len {cached_len} is not in whole pages of 6 tokens") as caught:
            head.admit(B, RoomId(1), prompt_len=16, cached_len=cached_len)
        assert (caught.value.reason, caught.value.field) == ("bad_cached_len", "cached_len")
    assert not head.states
    head.admit(B, RoomId(1), prompt_len=16, cached_len=12)
    assert head.waiting_rooms == 1


def test_a_room_that_waits_for_pages_is_not_overtaken() -> None:
    head = scheduler(A, B)
    ask(head, 1, 16)
    ask(head, 2, 12, B)
    first = take(head)
    assert admitted_in(first) == [1, 2]
    head.drop(A, RoomId(1))
    ask(head, 3, 32)  # needs all eight pages
    ask(head, 4, 4, B)
    step = take(head)
    assert admitted_in(step) == []
    head.received(B, RoomId(2)) if head.states[RoomId(2)] is RoomState.PREFILLED else head.drop(B, RoomId(2))
    assert admitted_in(take(head)) == [3]


def test_one_stopped_decoder_can_not_hold_the_pipeline() -> None:
    head = scheduler(A, B, max_waiting_rooms=100)
    for room in range(1, 9):
        ask(head, room, 4)
    ask(head, 20, 16, B)
    step = take(head)
    assert admitted_in(step) == [1, 20, 2, 3, 4], "A keeps to its half"
    assert head.waiting_rooms == 4


def test_decoders_are_served_in_turn() -> None:
    head = scheduler(A, B)
    for room in (1, 2):
        ask(head, room)
    for room in (3, 4):
        ask(head, room, 4, B)
    assert admitted_in(take(head)) == [1, 3, 2, 4]


def test_the_end_of_a_control_stream_drops_all_its_rooms_and_no_other() -> None:
    """F-D5, F-D17"""
    head = scheduler(A, B)
    ask(head, 1)
    ask(head, 2, 4, B)
    take(head)
    ask(head, 3)
    assert sorted(head.unpair(A)) == [1, 3]
    assert head.unpair(A) == []
    step = take(head)
    assert step.entries == (RoomDropped(RoomId(1)),)
    assert list(head.states) == [2]
    with pytest.raises(Fenced):
        ask(head, 4)


def test_a_newer_pairing_of_a_decoder_replaces_the_older_and_an_older_is_refused() -> None:
    head = scheduler(A)
    ask(head, 1)
    take(head)
    newer: PairingKey = (A[0], PairingNumber(2))
    assert head.pair(newer) == [1]
    with pytest.raises(Fenced):
        head.pair(newer)
    with pytest.raises(Fenced):
        head.pair(A)
    assert take(head).entries == (RoomDropped(RoomId(1)),)


def test_a_draining_pipeline_finishes_what_it_has_and_takes_nothing() -> None:
    """F-D14"""
    head = scheduler()
    ask(head, 1)
    head.drain()
    with pytest.raises(Unavailable, match="drains"):
        ask(head, 2)
    with pytest.raises(Unavailable, match="drains"):
        head.pair(B)
    settle(head, take(head))
    assert not head.idle
    head.received(A, RoomId(1))
    settle(head, take(head))
    assert head.idle


@pytest.mark.parametrize("seed", range(40))
def test_whatever_happens_every_step_applies_on_every_stage_and_all_returns_to_idle(seed: int) -> None:
    """Invariants 1 to 3 at the level of rank 0: aborts, lost pairings and slow stages at random. F-P4, F-P6."""
    rng = random.Random(seed)
    head = Scheduler(limits(max_waiting_rooms=50))
    stages = [AppliedLog(8, 4) for _ in range(3)]
    numbers = {1: 0, 2: 0}
    pairings: dict[int, PairingKey] = {}
    rooms: dict[int, PairingKey] = {}
    flying: list[Step] = []
    for turn in range(300):
        event = rng.random()
        decoder = rng.choice([1, 2])
        if event < 0.1 or decoder not in pairings:
            numbers[decoder] += 1
            pairings[decoder] = (Incarnation(decoder), PairingNumber(numbers[decoder]))
            head.pair(pairings[decoder])
        elif event < 0.5:
            room = turn + 1
            rooms[room] = pairings[decoder]
            head.admit(pairings[decoder], RoomId(room), prompt_len=rng.randint(1, 32), cached_len=0)
        elif event < 0.7 and rooms:
            room = rng.choice(list(rooms))
            head.drop(rooms[room], RoomId(room))
        elif rooms:
            room = rng.choice(list(rooms))
            if head.states.get(RoomId(room)) is RoomState.PREFILLED:
                head.received(rooms.pop(room), RoomId(room))
        while (step := head.next_step()) is not None:
            flying.append(step)
            for stage in stages:
                stage.apply(step)
        while flying and rng.random() < 0.7:
            head.applied(flying.pop(0).number)
        head.check()
    for key in pairings.values():
        head.unpair(key)
    while not head.idle:
        while (step := head.next_step()) is not None:
            flying.append(step)
            for stage in stages:
                stage.apply(step)
        while flying:
            head.applied(flying.pop(0).number)
    assert head.free_pages == 8
    assert head.running_rooms == head.waiting_rooms == head.queued_tokens == 0
    assert len({s.digest for s in stages}) == 1
    assert not stages[0].rooms
