"""A decoder with little memory costs only those who wait for it, and whoever waits is counted."""

import random
from collections import deque

import pytest

from kvmesh.protocol.ids import Generation, Incarnation, PairingKey, PairingNumber, RoomId
from kvmesh.protocol.rooms import Action, Ask, DecoderRooms, RoomEvent, RoomState
from kvmesh.protocol.rooms import Limits as DecoderLimits
from kvmesh.protocol.scheduler import Limits, Scheduler
from kvmesh.protocol.steps import AppliedLog, Step

G = Generation(1)
KEY: PairingKey = (Incarnation(1), PairingNumber(1))


class Pair:
    """A decoder whose pages hold one room, and a pipeline of stages that apply steps each at its own time."""

    def __init__(self, pp_size: int) -> None:
        self.decoder = DecoderRooms(
            DecoderLimits(num_pages=2, page_size=4, max_tokens=8, max_running_rooms=4, max_waiting_rooms=50)
        )
        self.head = Scheduler(
            Limits(
                num_pages=8, page_size=4, max_prompt_len=32, step_tokens=4, max_steps_in_flight=3, max_waiting_rooms=50
            )
        )
        self.head.pair(KEY)
        self.stages = [AppliedLog(8, 4) for _ in range(pp_size)]
        self.steps: list[deque[Step]] = [deque() for _ in range(pp_size)]
        self.finished: list[int] = []

    def arrive(self, room: int) -> None:
        self._carry_out(self.decoder.open(RoomId(room), G, prompt_len=6, max_output_len=2))

    def _carry_out(self, actions: list[Action]) -> None:
        for action in actions:
            if action.ask is Ask.ADMIT:
                self.head.admit(KEY, action.room, prompt_len=6, cached_len=0)
            elif action.ask is Ask.RECEIVED:
                self.head.received(KEY, action.room)

    def write(self) -> None:
        """Rank 0 writes a step, if one is due."""
        step = self.head.next_step()
        for queue in self.steps if step is not None else ():
            queue.append(step)  # type: ignore[arg-type]

    def apply(self, rank: int) -> None:
        """A stage applies the next step it has; the last rank's answer reaches rank 0 at once."""
        if self.steps[rank] and (rank == 0 or self.stages[rank].next_number < self.stages[rank - 1].next_number):
            step = self.steps[rank].popleft()
            self.stages[rank].apply(step)
            if rank == len(self.stages) - 1:
                self.head.applied(step.number)

    def receive(self) -> None:
        """KV is complete where every stage has computed it; a room that runs says its last token."""
        for room, state in list(self.decoder.states.items()):
            held = [stage.rooms.get(room) for stage in self.stages]
            if state is RoomState.RECEIVING and all(r is not None and r.computed_len == 6 for r in held):
                self._carry_out(self.decoder.tell(room, RoomEvent.COMPLETE))
            elif state is RoomState.RUNNING:
                self.finished.append(room)
                self._carry_out(self.decoder.tell(room, RoomEvent.FINISHED))


@pytest.mark.parametrize("seed", range(10))
def test_fifty_rooms_pass_through_a_decoder_that_holds_one_whatever_each_stage_has_seen(seed: int) -> None:
    """F-P2: what is not there yet is not finished, and nothing breaks of it."""
    rng = random.Random(seed)
    pair = Pair(pp_size=3)
    for room in range(1, 51):
        pair.arrive(room)
    deeds = [pair.write, pair.receive, *(lambda r=r: pair.apply(r) for r in range(3))]
    while pair.decoder.states or not pair.head.idle:
        rng.choices(deeds, weights=[4, 4, 4, 1, 2])[0]()
        assert pair.decoder.running_rooms <= 1
        pair.decoder.check()
        pair.head.check()
    assert pair.finished == list(range(1, 51))
    assert pair.decoder.free_pages == 2
    assert {stage.free_pages for stage in pair.stages} == {8}
    assert len({stage.digest for stage in pair.stages}) == 1


def test_whoever_waits_for_one_of_four_places_is_counted_and_served_in_order() -> None:
    """F-K3: pages are plenty, places are not; nobody waits unseen."""
    decoder = DecoderRooms(
        DecoderLimits(num_pages=100, page_size=4, max_tokens=8, max_running_rooms=4, max_waiting_rooms=96)
    )
    begun: list[int] = []
    for room in range(1, 101):
        begun += [a.room for a in decoder.open(RoomId(room), G, prompt_len=1, max_output_len=1) if a.ask is Ask.ADMIT]
        assert decoder.running_rooms + decoder.waiting_rooms == len(decoder.states) == room
    assert (decoder.running_rooms, decoder.waiting_rooms) == (4, 96)
    for room in range(1, 101):
        begun += [a.room for a in decoder.tell(RoomId(room), RoomEvent.CANCELLED) if a.ask is Ask.ADMIT]
    assert begun == list(range(1, 101))
    assert decoder.free_pages == 100
