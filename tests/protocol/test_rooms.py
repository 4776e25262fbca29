import random

import pytest

from kvmesh.errors import DuplicateRoom, Fault, Full, InvalidInput, Unavailable
from kvmesh.protocol.ids import Generation, RoomId
from kvmesh.protocol.rooms import Action, Ask, DecoderRooms, Limits, RoomEvent, RoomState

G, H = Generation(1), Generation(2)


def rooms(**changes: int) -> DecoderRooms:
    values = {"num_pages": 8, "page_size": 4, "max_tokens": 32, "max_running_rooms": 4, "max_waiting_rooms": 2}
    return DecoderRooms(Limits(**(values | changes)))


def arrive(
    decoder: DecoderRooms, room: int, prompt: int = 4, output: int = 4, generation: Generation = G
) -> list[Action]:
    return decoder.open(RoomId(room), generation, prompt_len=prompt, max_output_len=output)


def asks(actions: list[Action]) -> list[tuple[int, Ask]]:
    return [(a.room, a.ask) for a in actions]


def test_pages_for_prompt_and_output_are_reserved_before_prefill_is_asked() -> None:
    decoder = rooms()
    (action,) = arrive(decoder, 1, prompt=5, output=8)
    assert action.ask is Ask.ADMIT
    assert len(action.pages) == 4
    assert decoder.free_pages == 4


def test_a_room_runs_from_admit_to_release() -> None:
    decoder = rooms()
    arrive(decoder, 1)
    assert asks(decoder.tell(RoomId(1), RoomEvent.COMPLETE)) == [(1, Ask.RECEIVED)]
    assert decoder.states[RoomId(1)] is RoomState.RUNNING
    assert asks(decoder.tell(RoomId(1), RoomEvent.FINISHED)) == [(1, Ask.RELEASE)]
    assert decoder.free_pages == 8
    assert not decoder.states


def test_every_page_is_counted_once_by_what_it_is_for() -> None:
    decoder = rooms()
    arrive(decoder, 1)
    arrive(decoder, 2, prompt=5)
    assert decoder.pages_by_state == {"free": 3, "receiving": 5, "running": 0}
    decoder.tell(RoomId(2), RoomEvent.COMPLETE)
    assert decoder.pages_by_state == {"free": 3, "receiving": 2, "running": 3}
    for room in (1, 2):
        decoder.tell(RoomId(room), RoomEvent.CANCELLED)
    assert decoder.pages_by_state == {"free": 8, "receiving": 0, "running": 0}


def test_a_room_that_ends_before_its_kv_is_complete_ends_with_drop() -> None:
    decoder = rooms()
    arrive(decoder, 1)
    assert asks(decoder.tell(RoomId(1), RoomEvent.FINISHED)) == [(1, Ask.DROP), (1, Ask.RELEASE)]


def test_rooms_wait_in_order_and_begin_when_pages_are_free() -> None:
    decoder = rooms()
    arrive(decoder, 1, 16, 8)
    assert arrive(decoder, 2, 8, 8) == []
    assert arrive(decoder, 3, 1, 1) == [], "one page is free, and room 2 is not overtaken"
    began = decoder.tell(RoomId(1), RoomEvent.CANCELLED)
    assert asks(began) == [(1, Ask.DROP), (1, Ask.RELEASE), (2, Ask.ADMIT), (3, Ask.ADMIT)]


def test_release_comes_before_the_pages_are_given_out_again() -> None:
    """F-A3: the worker hears them in this order, through one queue."""
    decoder = rooms()
    (first,) = arrive(decoder, 1, 24, 8)
    arrive(decoder, 2, 4, 4)
    actions = decoder.tell(RoomId(1), RoomEvent.CANCELLED)
    assert [a.ask for a in actions] == [Ask.DROP, Ask.RELEASE, Ask.ADMIT]
    assert set(actions[-1].pages) <= set(first.pages)


def test_the_batch_is_bounded_even_when_pages_are_free() -> None:
    decoder = rooms(max_running_rooms=1)
    arrive(decoder, 1)
    assert arrive(decoder, 2) == []
    assert asks(decoder.tell(RoomId(1), RoomEvent.REFUSED)) == [(1, Ask.DROP), (1, Ask.RELEASE), (2, Ask.ADMIT)]


def test_a_full_queue_refuses_and_keeps_nothing() -> None:
    """F-K1: with RetryInfo, before any prefill work."""
    decoder = rooms()
    arrive(decoder, 1, 24, 8)
    arrive(decoder, 2)
    arrive(decoder, 3)
    with pytest.raises(Full) as caught:
        arrive(decoder, 4)
    assert caught.value.retry_after_seconds
    assert list(decoder.states) == [1, 2, 3]
    assert decoder.waiting_rooms == 2


def test_a_room_is_used_once() -> None:
    """F-R2"""
    decoder = rooms()
    arrive(decoder, 1)
    with pytest.raises(DuplicateRoom):
        arrive(decoder, 1)
    decoder.tell(RoomId(1), RoomEvent.CANCELLED)
    with pytest.raises(DuplicateRoom):
        arrive(decoder, 1)
    assert decoder.free_pages == 8


@pytest.mark.parametrize(("prompt", "output"), [(0, 4), (4, 0), (30, 3)])
def test_what_an_empty_pool_could_not_hold_is_invalid(prompt: int, output: int) -> None:
    decoder = rooms()
    with pytest.raises(InvalidInput) as caught:
        arrive(decoder, 1, prompt, output)
    assert caught.value.field
    assert not decoder.states


def test_a_draining_decoder_takes_nothing_new_and_finishes_what_it_has() -> None:
    decoder = rooms()
    arrive(decoder, 1)
    decoder.draining = True
    with pytest.raises(Unavailable, match="drains"):
        arrive(decoder, 2)
    assert asks(decoder.tell(RoomId(1), RoomEvent.COMPLETE)) == [(1, Ask.RECEIVED)]


def test_a_lost_generation_ends_its_rooms_that_still_need_it_and_no_other() -> None:
    """F-D5"""
    decoder = rooms(max_running_rooms=3)
    for room, generation in ((1, G), (2, G), (3, H), (4, G)):
        arrive(decoder, room, generation=generation)
    decoder.tell(RoomId(1), RoomEvent.COMPLETE)
    lost, actions = decoder.generation_lost(G)
    assert lost == [2, 4], "room 1 has all it needs"
    assert asks(actions) == [(2, Ask.RELEASE)]
    assert list(decoder.states) == [1, 3]


@pytest.mark.parametrize("late", [e for e in RoomEvent if e is not RoomEvent.RESERVED])
def test_late_events_of_an_ended_room_are_absorbed(late: RoomEvent) -> None:
    """F-C11: terminal states absorb."""
    decoder = rooms()
    arrive(decoder, 1)
    decoder.tell(RoomId(1), RoomEvent.CANCELLED)
    assert decoder.tell(RoomId(1), late) == []
    assert decoder.free_pages == 8


def test_an_event_without_a_row_changes_nothing() -> None:
    decoder = rooms()
    arrive(decoder, 1)
    decoder.tell(RoomId(1), RoomEvent.COMPLETE)
    with pytest.raises(Fault):
        decoder.tell(RoomId(1), RoomEvent.COMPLETE)
    assert decoder.states[RoomId(1)] is RoomState.RUNNING


def test_a_complete_room_needs_rank_0_no_more() -> None:
    """Rank 0 names it, with its last words, as one that had work in the step its generation died in: it decodes on."""
    decoder = rooms()
    arrive(decoder, 1)
    decoder.tell(RoomId(1), RoomEvent.COMPLETE)
    assert decoder.tell(RoomId(1), RoomEvent.REFUSED) == []
    assert decoder.states[RoomId(1)] is RoomState.RUNNING


@pytest.mark.parametrize("seed", range(40))
def test_whatever_happens_the_books_balance_and_all_returns_to_idle(seed: int) -> None:
    """F-A6, F-A7: every path gives back what it took."""
    rng = random.Random(seed)
    decoder = rooms(max_waiting_rooms=6)
    for room in range(1, 200):
        try:
            arrive(decoder, room, rng.randint(1, 20), rng.randint(1, 12), rng.choice([G, H]))
        except Full:
            assert decoder.waiting_rooms == 6
        for known in rng.sample(list(decoder.states), k=min(2, len(decoder.states))):
            state = decoder.states[known]
            fitting = {
                RoomState.WAITING: [RoomEvent.CANCELLED],
                RoomState.RECEIVING: [e for e in RoomEvent if e is not RoomEvent.RESERVED],
                RoomState.RUNNING: [RoomEvent.FINISHED, RoomEvent.CANCELLED, RoomEvent.BROKEN],
            }[state]
            decoder.tell(known, rng.choice(fitting))
        if rng.random() < 0.05:
            decoder.generation_lost(rng.choice([G, H]))
        decoder.check()
    for known in list(decoder.states):
        decoder.tell(known, RoomEvent.CANCELLED)
    assert decoder.free_pages == 8
    assert decoder.waiting_rooms == decoder.running_rooms == 0
