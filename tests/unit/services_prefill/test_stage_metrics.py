"""What a stage's page says: each room ends once, by a reason; a worker that hangs shows its age. No model, no stream."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import count

import pytest
from stage_played import KEY, PROMPT_LEN, SHARD, G, PlayedWorker, admitted, done, shown, spans_of, step

from kvmesh.errors import KvmeshError, Unavailable
from kvmesh.kv.frames import FrameKind, open_frame
from kvmesh.kv.layout import Piece
from kvmesh.protocol.ids import RoomId
from kvmesh.protocol.scheduler import Limits
from kvmesh.protocol.sending import Computed
from kvmesh.telemetry import metrics
from kvmesh.v1 import prefill_pb2 as pb
from services.prefill.carrier import OnStream
from services.prefill.gauges import show_age, show_no_generation
from services.prefill.generation import Generation
from services.prefill.head import Head
from services.prefill.stage import _generation_of
from services.prefill.worker import CopyFrame, LayersDone

ROOMS = count(9_000)
LIMITS = Limits(num_pages=8, page_size=8, max_prompt_len=64, step_tokens=64, max_steps_in_flight=4, max_waiting_rooms=2)
REASONS = ("done", "dropped", "bad_token", "too_long", "queue_full", "duplicate_room", "stage_lost", "draining")


class Stage:
    """One stage, its worker played."""

    def __init__(self, rank: int = 0, pp_size: int = 1) -> None:
        self.worker = PlayedWorker()
        self.generation = Generation(
            G,
            rank=rank,
            pp_size=pp_size,
            num_pages=8,
            shard=SHARD,
            worker=self.worker,  # type: ignore[arg-type]
        )
        self.num_done = 0


class Rank0(Stage):
    """Rank 0 with one decoder's control stream."""

    def __init__(self, pp_size: int = 1) -> None:
        super().__init__(0, pp_size)
        self.head = Head(self.generation, LIMITS, vocab_size=100, clock=lambda: 0.25)
        self.head.pair(KEY)

    def admit(self, room: int, prompt_len: int = PROMPT_LEN, token: int = 5) -> str:
        """Returns the reason of the refusal, if any."""
        refused = self.head.admit(KEY, pb.Admit(room=room, tokens=[token] * prompt_len))
        return refused.reason if refused is not None else ""

    async def written(self) -> None:
        """Waits until what is due was written."""
        await asyncio.sleep(0)

    async def compute(self, drawn: tuple[int, ...] = (), num_rooms: int = 1) -> None:
        """The worker is through with the next step."""
        await self.written()
        self.generation.report(done(self.worker.steps[self.num_done], 1.0, 2.0, drawn=drawn, num_rooms=num_rooms))
        self.num_done += 1
        await self.written()


@contextmanager
def ended(**wanted: int) -> Iterator[None]:
    """What was counted inside, by reason; nothing else was."""
    before = {reason: shown("kvmesh_rooms_ended_total", reason=reason) for reason in REASONS}
    yield
    now = {reason: shown("kvmesh_rooms_ended_total", reason=reason) for reason in REASONS}
    assert {r: now[r] - before[r] for r in REASONS if now[r] != before[r]} == wanted


@pytest.fixture
def room() -> int:
    return next(ROOMS)


# The age of the log.


async def test_a_worker_that_hangs_shows_its_age_also_after_the_watchdog_ended_the_generation() -> None:
    stage = Stage()
    stage.worker.age = 2.5
    assert shown("kvmesh_log_age_seconds") == 2.5
    stage.generation.watch(2.0, 0.5, serving=True)
    assert (await stage.generation.ended).reason == "stage_hung"
    show_no_generation(8)
    stage.worker.age = 12.0  # it still hangs, and this stage waits for it to rest
    assert shown("kvmesh_log_age_seconds") == 12.0
    stage.worker.age = None
    assert shown("kvmesh_log_age_seconds") == 0
    stage.worker.age = 3.0
    show_age(lambda: None)
    assert shown("kvmesh_log_age_seconds") == 0


# Steps.


async def test_a_report_that_can_not_be_dealt_with_ends_the_generation_and_names_the_rank() -> None:
    stage = Stage()
    unknown = step(0, work=((next(ROOMS), 0, PROMPT_LEN),))
    stage.generation.report(replace(done(unknown, 1.0, 2.0), computed=(None,)))  # type: ignore[arg-type]
    assert (await asyncio.wait_for(stage.generation.ended, 1)).reason == "stage_failed"


async def test_a_step_that_can_not_be_written_ends_the_generation_and_names_the_rank(
    room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else rooms would wait for a step that nobody computes."""

    def fails(_: object) -> None:
        raise KeyError(room)

    stage = Rank0()
    monkeypatch.setattr(stage.head, "_launch", fails)
    stage.admit(room)
    await stage.written()
    assert (await asyncio.wait_for(stage.generation.ended, 1)).reason == "stage_failed"


async def test_only_a_step_with_work_is_a_time_to_compute() -> None:
    stage, before = Stage(), shown("kvmesh_step_seconds_count")
    total = shown("kvmesh_steps_total")
    stage.generation.report(done(step(0, admitted(next(ROOMS))), 1.0, 1.0))
    assert shown("kvmesh_step_seconds_count") == before
    room = next(ROOMS)
    stage.generation.report(done(step(1, admitted(room), work=((room, 0, 8),)), 1.0, 2.0))
    assert shown("kvmesh_step_seconds_count") == before + 1
    assert shown("kvmesh_steps_total") == total + 2


# A room's wait, told by whoever draws its first token.


def hello() -> pb.LinkHello:
    return pb.LinkHello(generation=G, pairing=KEY[1], decoder=KEY[0], window_bytes=1 << 20)


async def test_a_pipeline_of_one_stage_tells_the_wait_with_the_first_token(room: int) -> None:
    stage = Rank0()
    link = stage.generation.links.open(hello(), [SHARD], "fp32", OnStream(1 << 20))
    stage.admit(room)
    await stage.compute(drawn=(room,))
    header, payload = open_frame(await link.next_message())
    assert header.kind is FrameKind.FIRST_TOKEN
    assert pb.FirstToken.FromString(bytes(payload)).queued.ToMilliseconds() == 750, "Admit at 0.25, taken up at 1"
    stage.generation.end(Unavailable("over"))
    assert spans_of(room)["send"][0] == 2.0, "since its KV lies in its pages"


async def test_rank_0_tells_the_wait_to_the_ranks_behind_and_the_last_one_to_the_decoder(room: int) -> None:
    first, last = Rank0(pp_size=2), Stage(rank=1, pp_size=2)
    first.admit(room)
    await first.compute()
    message = first.generation.downstream.get_nowait()
    assert [w.queued.ToMilliseconds() for w in message.step.work] == [750]
    link = last.generation.links.open(hello(), [SHARD], "fp32", OnStream(1 << 20))
    heard = step(0, admitted(room), work=((room, 0, PROMPT_LEN),))
    last.generation.report(done(first.generation.spans.told(heard), 7.0, 8.0, drawn=(room,)))
    _, payload = open_frame(await link.next_message())
    assert pb.FirstToken.FromString(bytes(payload)).queued.ToMilliseconds() == 750


async def test_kv_of_a_step_that_still_computes_is_asked_for_and_its_sending_has_begun(room: int) -> None:
    stage = Stage()
    stage.generation.links.open(hello(), [SHARD], "fp32", OnStream(1 << 30))
    whole = step(0, admitted(room), work=((room, 0, PROMPT_LEN),))
    early = Computed(KEY, RoomId(room), 0, PROMPT_LEN, layers_end=SHARD.layer_end)
    told = LayersDone(G, whole, (early,), at=1.5)
    assert _generation_of(told) == G, "else the stage hands it to no generation"
    stage.generation.report(told)
    asked = stage.worker.posted[-1]
    assert isinstance(asked, CopyFrame)
    assert (asked.room, asked.piece) == (room, Piece(0, SHARD.layer_end, 0, PROMPT_LEN, (0, 1), "fp32"))
    stage.generation.end(Unavailable("over"))
    assert spans_of(room)["send"][0] == 1.5


# Rooms.


async def test_a_room_at_rank_0_is_open_from_its_admit_to_its_entry_whether_it_waits_or_not(room: int) -> None:
    stage, waits = Rank0(), next(ROOMS)
    with ended(done=1):
        stage.admit(room)
        stage.admit(waits)
        await stage.written()
        assert (shown("kvmesh_rooms_open"), shown("kvmesh_rooms_waiting")) == (2, 1), (
            "two need more pages than there are"
        )
        await stage.compute()
        stage.head.received(KEY, RoomId(room))
        await stage.written()
        assert (shown("kvmesh_rooms_open"), shown("kvmesh_rooms_waiting")) == (1, 0)


async def test_a_stage_behind_has_open_what_its_log_has() -> None:
    stage, room = Stage(rank=1, pp_size=2), next(ROOMS)
    stage.generation.report(done(step(0, admitted(room)), 1.0, 2.0, num_rooms=1))
    assert (shown("kvmesh_rooms_open"), shown("kvmesh_rooms_running")) == (1, 1)


async def test_a_room_dropped_while_it_waits_is_counted_and_shows_its_wait(room: int) -> None:
    stage, waits = Rank0(), next(ROOMS)
    stage.admit(room)
    stage.admit(waits)
    await stage.written()
    with ended(dropped=1):
        stage.head.drop(KEY, RoomId(waits))
        stage.head.drop(KEY, RoomId(waits))
    begun, until, why = spans_of(waits)["queue"]
    assert begun <= until
    assert why == "dropped"


async def test_a_room_dropped_in_its_prefill_is_counted_once_with_its_entry(room: int) -> None:
    stage = Rank0()
    stage.admit(room)
    await stage.compute()
    with ended():
        stage.head.drop(KEY, RoomId(room))
    with ended(dropped=1):
        await stage.written()
        stage.head.drop(KEY, RoomId(room))
        await stage.compute(num_rooms=0)


async def test_the_end_of_a_pairing_drops_its_rooms_those_that_wait_at_once(room: int) -> None:
    stage, waits = Rank0(), next(ROOMS)
    stage.admit(room)
    stage.admit(waits)
    await stage.written()
    with ended(dropped=2):
        stage.head.unpair(KEY)
        await stage.compute()
    assert spans_of(waits)["queue"][2] == "its pairing is over"


async def test_rooms_lost_with_a_generation_are_counted_by_its_reason_and_not_again(room: int) -> None:
    stage, waits = Rank0(), next(ROOMS)
    stage.admit(room)
    stage.admit(waits)
    await stage.compute()
    lost: KvmeshError = Unavailable("rank 1 of p0 was lost", reason="stage_lost")
    with ended(stage_lost=2):
        stage.generation.end(lost)
        stage.generation.end(Unavailable("the stage is ending"))
        stage.head.unpair(KEY)  # as its control stream does, a moment later
        await stage.written()
    assert spans_of(waits)["queue"][2] == lost.message


async def test_a_drained_generation_loses_no_room() -> None:
    stage = Rank0()
    with ended():
        stage.head.drain()
        await stage.written()
    assert stage.generation.ended.done()


async def test_a_refused_room_is_counted_by_the_reason_that_its_decoder_is_told(room: int) -> None:
    stage = Rank0()
    with ended(bad_token=1):
        assert stage.admit(room, token=100) == "bad_token"
    with ended(too_long=1):
        assert stage.admit(room, prompt_len=65) == "too_long"
    for _ in range(3):
        stage.admit(room)
        await stage.written()
    with ended(duplicate_room=1):
        assert stage.admit(room) == "duplicate_room"
    stage.admit(next(ROOMS))
    stage.admit(next(ROOMS))
    with ended(queue_full=1):
        assert stage.admit(next(ROOMS)) == "queue_full"


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    yield
    show_age(lambda: None)
    show_no_generation(8)
    metrics.LINKS_OPEN.set(0)
