"""Copier and decode worker share pages: one writes while the other computes, and never what the other holds. Real threads,
real pool, tiny model; a step stands still where a test wants it to, by an event.
"""

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from queue import Empty
from random import Random
from time import monotonic

import pytest
import torch
from test_decode_worker import PAGES, PAIRING, PROMPT, ROOM, WIRE, Bench

from kvmesh.kv.frames import HEADER_BYTES, FrameHeader
from kvmesh.kv.layout import Piece
from kvmesh.model.sampling import SamplingParams
from kvmesh.protocol.coverage import ShardSpan
from kvmesh.protocol.ids import PageId, Rank, RoomId
from kvmesh.v1.types_pb2 import FINISH_REASON_LENGTH, FINISH_REASON_UNSPECIFIED
from services.decode import threads as threads_module
from services.decode.copier import Copier
from services.decode.records import (
    CloseRoom,
    FrameArrived,
    LetGo,
    OpenRoom,
    Received,
    Report,
    RoomBroken,
    RoomComplete,
    ThreadFailed,
    TokenDrawn,
)

NEXT = RoomId(42)
ELSEWHERE = (PageId(1), PageId(0), PageId(4))


class GatedBench(Bench):
    """Its decode steps stand still while the gate is shut."""

    def __init__(self, model: Path) -> None:
        super().__init__(model)
        self.gate = threading.Event()
        self.in_step = threading.Event()
        forward = self.target.forward

        def gated(*args: object, **more: object) -> torch.Tensor:
            self.in_step.set()
            assert self.gate.wait(30)
            return forward(*args, **more)  # type: ignore[arg-type]

        self.target.forward = gated  # type: ignore[method-assign]

    def run_into_step(self, room: int = ROOM, pages: tuple[PageId, ...] = PAGES, output: int = 4) -> None:
        """A whole room arrives, and the worker is in its first step."""
        self.open(room, pages, output)
        for rank in (0, 1):
            self.arrive(self.frame(rank, room=room), rank=rank)
        self.arrive(self.first(room))
        assert self.in_step.wait(10)

    def pages(self, pages: tuple[PageId, ...]) -> torch.Tensor:
        """What they hold now."""
        size = self.target.pool.page_size
        slots = [slot for page in pages for slot in range(page * size, (page + 1) * size)]
        return self.target.pool.slots[:, :, :, slots].clone()


@pytest.fixture
def bench(tiny_model_dir: Path) -> Iterator[GatedBench]:
    made = GatedBench(tiny_model_dir)
    yield made
    made.gate.set()
    asyncio.run(made.worker.stop())


def test_a_frame_is_written_and_credited_while_a_decode_step_runs(bench: GatedBench) -> None:
    bench.run_into_step()
    before = bench.settle()
    assert [r.token for r in before if isinstance(r, TokenDrawn)] == [bench.first_token]
    bench.open(NEXT, ELSEWHERE)
    message = bench.frame(0, room=NEXT)
    bench.arrive(message, rank=0)
    received = bench.next(Received)
    assert isinstance(received, Received)
    assert received.num_bytes == len(message) - HEADER_BYTES
    assert bench.pages(ELSEWHERE[:2]).any()


def test_a_first_token_is_reported_while_a_decode_step_runs(bench: GatedBench) -> None:
    bench.run_into_step()
    bench.settle()
    bench.open(NEXT, ELSEWHERE)
    for rank in (0, 1):
        bench.arrive(bench.frame(rank, room=NEXT), rank=rank)
    bench.arrive(bench.first(NEXT))
    complete = bench.next(RoomComplete)
    assert isinstance(complete, RoomComplete)
    assert complete.room == NEXT
    drawn = bench.next(TokenDrawn)
    assert isinstance(drawn, TokenDrawn)
    assert (drawn.room, drawn.token, drawn.finish_reason) == (NEXT, bench.first_token, FINISH_REASON_UNSPECIFIED)


def test_pages_of_a_cancelled_room_are_not_written_before_its_step_is_over(bench: GatedBench) -> None:
    bench.run_into_step()
    bench.settle()
    before = bench.pages(PAGES)
    bench.worker.post(CloseRoom(ROOM))
    bench.open(NEXT, PAGES)
    bench.source.pool.slots.add_(1.0)  # other KV than the first room's
    messages = [bench.frame(rank, room=NEXT) for rank in (0, 1)]
    for rank in (0, 1):
        bench.arrive(messages[rank], rank=rank)
    bench.arrive(bench.first(NEXT))
    assert not [r for r in bench.settle() if isinstance(r, Received | RoomComplete)], "neither credited nor complete"
    assert torch.equal(bench.pages(PAGES), before)
    bench.gate.set()
    credited = [bench.next(Received) for _ in messages]
    assert [c.num_bytes for c in credited if isinstance(c, Received)] == [len(m) - HEADER_BYTES for m in messages]
    complete = bench.next(RoomComplete)
    assert isinstance(complete, RoomComplete)
    assert complete.room == NEXT
    while not (isinstance(last := bench.next(TokenDrawn), TokenDrawn) and last.finish_reason == FINISH_REASON_LENGTH):
        pass
    pool = bench.target.pool
    want = bench.source.pool.slots[:, :, :, : len(PROMPT)]
    slots = [PAGES[token // pool.page_size] * pool.page_size + token % pool.page_size for token in range(len(PROMPT))]
    assert torch.equal(pool.slots[:, :, :, slots], want)


def test_other_rooms_go_on_while_one_waits_for_pages(bench: GatedBench) -> None:
    bench.run_into_step()
    bench.settle()
    bench.worker.post(CloseRoom(ROOM))
    bench.open(NEXT, PAGES)
    bench.arrive(bench.frame(0, room=NEXT), rank=0)
    bench.open(43, ELSEWHERE)
    bench.arrive(bench.frame(0, room=43), rank=0)
    bench.next(Received)
    assert bench.pages(ELSEWHERE[:2]).any()


def test_what_waits_for_pages_is_credited_when_its_room_closes(bench: GatedBench) -> None:
    bench.run_into_step()
    bench.settle()
    bench.worker.post(CloseRoom(ROOM))
    bench.open(NEXT, PAGES)
    bench.arrive(bench.frame(0, room=NEXT), rank=0)
    before = bench.pages(PAGES)
    bench.worker.post(CloseRoom(NEXT))
    bench.next(Received)
    assert torch.equal(bench.pages(PAGES), before)


def test_a_step_that_stands_still_ages_and_a_copier_that_rests_does_not(bench: GatedBench) -> None:
    bench.run_into_step()
    bench.settle()
    ages = bench.worker.ages
    assert ages["worker"]() is not None
    while ages["copier"]() is not None:  # it goes to rest after the last report
        pass
    assert bench.worker.age_seconds() is not None


def test_a_copier_that_stands_still_ages(bench: GatedBench) -> None:
    bench.gate.set()
    stuck, go_on = threading.Event(), threading.Event()

    def write(pages: tuple[PageId, ...], header: FrameHeader, payload: memoryview) -> None:
        stuck.set()
        assert go_on.wait(30)

    bench.target.pool.write = write  # type: ignore[assignment,method-assign]
    bench.open()
    bench.arrive(bench.frame(0), rank=0)
    assert stuck.wait(10)
    assert bench.worker.ages["copier"]() is not None
    assert bench.worker.ages["worker"]() is None
    assert bench.worker.age_seconds() is not None
    go_on.set()


@pytest.mark.parametrize("thread", ["copier", "worker"])
def test_the_failure_of_either_thread_is_reported(bench: GatedBench, thread: str) -> None:
    def fails(*args: object) -> None:
        raise RuntimeError(thread)

    bench.gate.set()
    if thread == "copier":
        bench.target.pool.write = fails  # type: ignore[assignment,method-assign]
    else:
        bench.target.forward = fails  # type: ignore[assignment,method-assign]
    bench.open()
    for rank in (0, 1):
        bench.arrive(bench.frame(rank), rank=rank)
    bench.arrive(bench.first())
    failed = bench.next(ThreadFailed)
    assert isinstance(failed, ThreadFailed)
    assert str(failed.error) == thread


def test_a_thread_that_fails_before_its_first_record_is_reported_and_nobody_waits_for_it(
    tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(_: int) -> None:
        raise RuntimeError("no threads")

    monkeypatch.setattr(threads_module, "_compute_with", fails)
    bench = Bench(tiny_model_dir)
    for _ in range(2):
        failed = bench.next(ThreadFailed)
        assert isinstance(failed, ThreadFailed)
        assert str(failed.error) == "no threads"
    asyncio.run(bench.worker.stop())


def test_every_frame_that_was_put_aside_is_progress(bench: GatedBench) -> None:
    """Many may be due at once."""
    reports, moved = list[Report](), list[None]()
    copier = Copier(
        bench.target.pool, bench.target.vocab_size, lambda _: None, reports.append, lambda: moved.append(None)
    )
    shards = {Rank(0): (ShardSpan(0, bench.num_layers, 0, bench.heads),)}

    def arrives(message: bytes) -> int:
        """How often it moved by then."""
        copier.take(FrameArrived(PAIRING, Rank(0), message, 0.0, WIRE))
        return len(moved)

    def opened(room: RoomId) -> list[bytes]:
        """Its frames, one for each of two tokens."""
        copier.take(OpenRoom(room, PAIRING, shards, PAGES, 2, 0, 0, 4, SamplingParams(), frozenset()))
        layers = (0, bench.num_layers)
        return [bench.source.pool.frame([0], Piece(*layers, at, at + 1), room=room, pairing=PAIRING) for at in range(2)]

    assert [arrives(message) for message in [*opened(ROOM), bench.first()]] == [1, 2, 3]
    copier.take(CloseRoom(ROOM))  # the worker has it
    assert [arrives(message) for message in opened(NEXT)] == [3, 3]
    copier.take(LetGo(ROOM))
    assert len(moved) == 5


def test_the_copier_computes_alone_and_the_worker_with_as_many_threads_as_were_set(tiny_model_dir: Path) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    bench = Bench(tiny_model_dir)
    seen: dict[str, int] = {}
    write, forward = bench.target.pool.write, bench.target.forward

    def writing(*args: object) -> None:
        seen["copier"] = torch.get_num_threads()
        write(*args)  # type: ignore[arg-type]

    def computing(*args: object) -> torch.Tensor:
        seen["worker"] = torch.get_num_threads()
        return forward(*args)  # type: ignore[arg-type]

    bench.target.pool.write = writing  # type: ignore[assignment,method-assign]
    bench.target.forward = computing  # type: ignore[assignment,method-assign]
    try:
        bench.open()
        for rank in (0, 1):
            bench.arrive(bench.frame(rank), rank=rank)
        bench.arrive(bench.first())
        drawn = [bench.next(TokenDrawn) for _ in range(4)]
        assert len(drawn) == 4
    finally:
        asyncio.run(bench.worker.stop())
        torch.set_num_threads(before)
    assert seen == {"copier": 1, "worker": 2}


# A storm.


class Storm:
    """Rooms opened over few pages, each with KV of its own, cancelled at any time: what an event loop does, from a seed."""

    NUM_ROOMS = 120
    OUTPUT = 4

    def __init__(self, bench: Bench, seed: int) -> None:
        self.bench, self.random = bench, Random(seed)
        self.free = [PageId(p) for p in range(8)]
        self.pages: dict[RoomId, tuple[PageId, ...]] = {}
        self.to_send: dict[RoomId, list[tuple[int, bytes]]] = {}
        self.num_tokens: dict[RoomId, int] = {}
        self.num_finished = self.num_cancelled_running = 0
        self.owed = 0
        self.next_room = 100

    def run(self) -> None:
        """Until every room has ended, all is credited, and the threads are idle."""
        while self.next_room < 100 + self.NUM_ROOMS or self.pages:
            self._hear(wait=not self._act())
        while self.owed:
            self._hear(wait=True)
        for _ in range(1000):  # the last room's end may be on its way between the threads
            if self.bench.worker.is_idle:
                break
            self.bench.settle()

    def _act(self) -> bool:
        """One random act; False when there is none but to wait."""
        acts = []
        if self.next_room < 100 + self.NUM_ROOMS and len(self.free) >= 3:
            acts.append(self._open)
        sending = [room for room in self.pages if self.to_send[room]]
        if sending:
            acts += [lambda: self._send(self.random.choice(sending))] * 6
        if self.pages and self.random.random() < 0.05:
            acts.append(self._cancel)
        if not acts:
            return False
        self.random.choice(acts)()
        return True

    def _open(self) -> None:
        room = RoomId(self.next_room)
        self.next_room += 1
        self.random.shuffle(self.free)
        self.pages[room] = tuple(self.free.pop() for _ in range(3))
        self.num_tokens[room] = 0
        bench = self.bench
        bench.source.pool.slots.fill_(float(room))
        messages = [(rank, bench.frame(rank, *span, room=room)) for rank in (0, 1) for span in ((0, 2), (2, 6))]
        messages += [(1, bench.first(room)), (0, bench.frame(0, 0, 2, room=room))]
        self.random.shuffle(messages)
        self.to_send[room] = messages
        bench.open(room, self.pages[room], self.OUTPUT)

    def _send(self, room: RoomId) -> None:
        rank, message = self.to_send[room].pop()
        self.owed += len(message) - HEADER_BYTES if message[5] == 3 else 0
        self.bench.worker.post(FrameArrived(PAIRING, Rank(rank), message, monotonic(), WIRE))

    def _cancel(self) -> None:
        room = self.random.choice(list(self.pages))
        self.num_cancelled_running += self.num_tokens[room] > 0
        self._close(room)

    def _close(self, room: RoomId) -> None:
        for _ in self.to_send[room][:2]:  # some of it is on its way
            self._send(room)
        self.bench.worker.post(CloseRoom(room))
        self.free += self.pages.pop(room)

    def _hear(self, *, wait: bool) -> None:
        try:
            self._take(self.bench.reports.get(block=wait, timeout=10 if wait else None))
        except Empty:
            assert not wait, "nothing comes any more"

    def _take(self, report: Report) -> None:
        assert not isinstance(report, RoomBroken | ThreadFailed), report
        if isinstance(report, Received):
            self.owed -= report.num_bytes
        elif isinstance(report, TokenDrawn) and report.room in self.pages:
            self.num_tokens[report.room] += 1
            if report.finish_reason != FINISH_REASON_UNSPECIFIED:
                assert self.num_tokens[report.room] == self.OUTPUT
                self._check_bytes(report.room)
                self.num_finished += 1
                self._close(report.room)

    def _check_bytes(self, room: RoomId) -> None:
        """A room that has just ended, and whose pages are not free yet, holds its own KV and nobody else's."""
        pool, pages = self.bench.target.pool, self.pages[room]
        slots = [pages[t // pool.page_size] * pool.page_size + t % pool.page_size for t in range(len(PROMPT))]
        assert pool.slots[:, :, :, slots].eq(float(room)).all()


@pytest.mark.parametrize("seed", range(4))
def test_a_storm_of_rooms_on_few_pages_ends_idle_with_the_right_bytes(tiny_model_dir: Path, seed: int) -> None:
    bench = Bench(tiny_model_dir)
    storm = Storm(bench, seed)
    try:
        storm.run()
    finally:
        asyncio.run(bench.worker.stop())
    assert storm.num_finished > 10
    assert storm.num_cancelled_running > 3
    assert bench.worker.is_idle
    assert len(storm.free) == 8
