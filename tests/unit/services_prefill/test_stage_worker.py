"""The stage's worker: steps in order, KV copied only for rooms that live, faults told and survived. Real model, no stream."""

from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue

import pytest

from kvmesh.errors import Fault
from kvmesh.kv.frames import open_frame
from kvmesh.kv.layout import Piece
from kvmesh.model.files import ModelFiles
from kvmesh.model.runner import Runner
from kvmesh.protocol.ids import Generation, Incarnation, PageId, PairingNumber, RoomId, StepNumber
from kvmesh.protocol.steps import AppliedLog, Entry, RoomAdmitted, RoomDone, RoomDropped, Step, Work
from services.prefill.worker import (
    BeginGeneration,
    CopyFrame,
    FrameCopied,
    Report,
    RunStep,
    StageWorker,
    StepDone,
    WorkerFailed,
)

KEY = (Incarnation(3), PairingNumber(1))
G, H = Generation(1), Generation(2)
PROMPT = [5, 9, 200, 17, 33, 80]


def admitted(room: int = 7, pages: tuple[int, ...] = (4, 1), cached_len: int = 0) -> RoomAdmitted:
    return RoomAdmitted(RoomId(room), KEY[1], KEY[0], len(PROMPT), cached_len, tuple(PageId(p) for p in pages))


class Bench:
    """A worker of the first two of six layers, and one of the other four."""

    def __init__(self, model: Path) -> None:
        files = ModelFiles.open(model)
        sizes = {"dtype": "fp32", "device": "cpu", "num_pages": 8, "page_size": 4}
        self.reports: list[SimpleQueue[Report]] = [SimpleQueue(), SimpleQueue()]
        cuts = [(0, 2), (2, files.config.num_layers)]
        self.runners = [Runner.load(files, *cut, **sizes) for cut in cuts]
        self.workers = [StageWorker(r, q.put) for r, q in zip(self.runners, self.reports, strict=True)]
        for worker in self.workers:
            worker.start()
            worker.post(BeginGeneration(G))

    def next(self, rank: int = 0) -> Report:
        return self.reports[rank].get(timeout=10)

    def step(self, number: int, *entries: Entry, work: tuple[int, int] | None = None, room: int = 7) -> StepDone:
        """One step on both ranks; what the last one said."""
        step = Step(StepNumber(number), entries, (Work(RoomId(room), *work),) if work else ())
        tokens = PROMPT[slice(*work)] if work else []
        self.workers[0].post(RunStep(G, step, tokens, b""))
        first = self.next(0)
        assert isinstance(first, StepDone), first
        self.workers[1].post(RunStep(G, step, None, first.activations))
        last = self.next(1)
        assert isinstance(last, StepDone), last
        assert first.digest == last.digest
        return last


@pytest.fixture
def bench(tiny_model_dir: Path) -> Iterator[Bench]:
    made = Bench(tiny_model_dir)
    yield made
    for worker in made.workers:
        worker.stop()


def test_only_the_last_rank_samples_and_only_when_the_prompt_is_whole(bench: Bench) -> None:
    """F-P14"""
    assert bench.step(0, admitted(), work=(0, 4)).sampled == ()
    done = bench.step(1, work=(4, 6))
    assert [(s.key, s.room) for s in done.sampled] == [(KEY, 7)]
    assert done.activations == b""
    assert (done.computed[0].begin, done.computed[0].end) == (4, 6)


def test_what_the_decoder_has_is_not_sent(bench: Bench) -> None:
    """F-C7: Admit says from where on."""
    assert bench.step(0, admitted(cached_len=4), work=(0, 4)).computed == ()
    done = bench.step(1, work=(4, 6))
    assert (done.computed[0].begin, done.computed[0].end) == (4, 6)


def test_the_books_after_a_step_are_the_logs(bench: Bench) -> None:
    done = bench.step(0, admitted(), work=(0, 6))
    assert (done.num_rooms, done.free_pages) == (1, 6)
    done = bench.step(1, RoomDone(RoomId(7)))
    assert (done.num_rooms, done.free_pages) == (0, 8)


def test_a_copy_is_a_sealed_frame_of_the_rooms_pages(bench: Bench) -> None:
    bench.step(0, admitted(), work=(0, 6))
    bench.workers[0].post(CopyFrame(G, KEY, RoomId(7), Piece(0, 2, 0, 6)))
    copied = bench.next(0)
    assert isinstance(copied, FrameCopied)
    assert copied.frame is not None
    header, payload = open_frame(copied.frame)
    assert (header.room, header.pairing, header.token_end, header.layer_end) == (7, 1, 6, 2)
    assert any(payload)


@pytest.mark.parametrize("end", [RoomDone(RoomId(7)), RoomDropped(RoomId(7))])
def test_a_copy_for_a_room_that_ended_yields_no_frame(bench: Bench, end: Entry) -> None:
    """F-A3: its pages may be another room's."""
    bench.step(0, admitted(), work=(0, 6))
    bench.step(1, end, admitted(room=8))
    bench.workers[0].post(CopyFrame(G, KEY, RoomId(7), Piece(0, 2, 0, 6)))
    copied = bench.next(0)
    assert isinstance(copied, FrameCopied)
    assert copied.frame is None


@pytest.mark.parametrize(("generation", "key"), [(H, KEY), (G, (Incarnation(3), PairingNumber(2)))])
def test_a_copy_for_another_generation_or_pairing_yields_no_frame(
    bench: Bench, generation: Generation, key: tuple[Incarnation, PairingNumber]
) -> None:
    bench.step(0, admitted(), work=(0, 6))
    bench.workers[0].post(CopyFrame(generation, key, RoomId(7), Piece(0, 2, 0, 6)))
    copied = bench.next(0)
    assert isinstance(copied, FrameCopied)
    assert copied.frame is None


def test_a_step_out_of_order_is_told_as_a_fault(bench: Bench) -> None:
    bench.workers[0].post(RunStep(G, Step(StepNumber(1)), [], b""))
    failed = bench.next(0)
    assert isinstance(failed, WorkerFailed)
    assert isinstance(failed.error, Fault)


@pytest.mark.parametrize("size", [0, 10, 6 * 64 * 4 + 4])
def test_activations_of_another_size_are_a_fault(bench: Bench, size: int) -> None:
    step = Step(StepNumber(0), (admitted(),), (Work(RoomId(7), 0, 6),))
    bench.workers[1].post(RunStep(G, step, None, bytes(size)))
    failed = bench.next(1)
    assert isinstance(failed, WorkerFailed)
    assert isinstance(failed.error, Fault)


def test_a_new_generation_begins_with_an_empty_log(bench: Bench) -> None:
    bench.step(0, admitted(), work=(0, 6))
    bench.workers[0].post(BeginGeneration(H))
    bench.workers[0].post(RunStep(H, Step(StepNumber(0), (admitted(),)), [], b""))
    done = bench.next(0)
    assert isinstance(done, StepDone)
    reference = AppliedLog(8, 4)
    reference.apply(Step(StepNumber(0), (admitted(),)))
    assert (done.generation, done.digest) == (H, reference.digest)


def test_a_step_of_an_older_generation_is_not_run(bench: Bench) -> None:
    bench.workers[0].post(BeginGeneration(H))
    bench.workers[0].post(RunStep(G, Step(StepNumber(0), (admitted(),)), [], b""))
    bench.workers[0].post(RunStep(H, Step(StepNumber(0)), [], b""))
    done = bench.next(0)
    assert isinstance(done, StepDone)
    assert done.generation == H


async def test_a_worker_at_rest_owes_nothing(bench: Bench) -> None:
    bench.step(0, admitted(), work=(0, 6))
    await bench.workers[0].rest()
    bench.workers[0].post(CopyFrame(G, KEY, RoomId(7), Piece(0, 2, 0, 6)))
    copied = bench.next(0)
    assert isinstance(copied, FrameCopied)
    assert copied.frame is None


def test_a_rest_is_no_time_without_progress(tiny_model_dir: Path) -> None:
    """A step posted after a long rest is young, even before the worker has woken."""
    files = ModelFiles.open(tiny_model_dir)
    runner = Runner.load(files, 0, 1, dtype="fp32", device="cpu", num_pages=8, page_size=4)
    worker = StageWorker(runner, lambda _: None)  # not started: it never wakes
    worker._moved_at -= 100
    assert worker.age_seconds() is None
    worker.post(RunStep(G, Step(StepNumber(0)), [], b""))
    age = worker.age_seconds()
    assert age is not None
    assert age < 10
