"""KV leaves beside the steps: before the next one is through, and without a trace in the log."""

from pathlib import Path
from queue import SimpleQueue

import pytest
from test_stage_worker import KEY, PROMPT, Bench, G, admitted

from kvmesh.kv.layout import Piece
from kvmesh.model.files import ModelFiles
from kvmesh.model.runner import Runner
from kvmesh.protocol.ids import RoomId, StepNumber
from kvmesh.protocol.steps import RoomDone, Step, Work
from services.prefill.worker import BeginGeneration, CopyFrame, FrameCopied, Report, RunStep, StageWorker, StepDone

ROOM = RoomId(7)


def test_kv_of_a_step_is_copied_before_the_next_step_ends(tiny_model_dir: Path) -> None:
    """F-P21: the next step is queued when the copy is asked for, and still the copy comes first."""
    runner = Runner.load(ModelFiles.open(tiny_model_dir), 0, 2, dtype="fp32", device="cpu", num_pages=8, page_size=4)
    reports: SimpleQueue[Report] = SimpleQueue()

    def receive(
        report: Report,
    ) -> None:  # in the worker's thread: what it posts is there before the next record is taken
        if isinstance(report, StepDone) and report.step.number == 0:
            worker.post(RunStep(G, Step(StepNumber(1), (), (Work(ROOM, 3, 6),)), PROMPT[3:], b""))
            worker.post(CopyFrame(G, KEY, ROOM, Piece(0, 2, 0, 3)))
        reports.put(report)

    worker = StageWorker(runner, receive)
    worker.start()
    worker.post(BeginGeneration(G))
    worker.post(RunStep(G, Step(StepNumber(0), (admitted(),), (Work(ROOM, 0, 3),)), PROMPT[:3], b""))
    came = [reports.get(timeout=10) for _ in range(3)]
    worker.stop()
    assert [type(report) for report in came] == [StepDone, FrameCopied, StepDone]
    assert isinstance(came[1], FrameCopied)
    assert came[1].frame is not None


@pytest.mark.parametrize("sender", [0, 1])
def test_what_one_stage_has_sent_and_another_has_not_does_not_show_in_their_logs(
    tiny_model_dir: Path, sender: int
) -> None:
    """F-P10, impossible: a room ends by its name in the log, on all stages in the same step; no stage counts what is done."""
    bench = Bench(tiny_model_dir)
    bench.step(0, admitted(), work=(0, 6))
    bench.workers[sender].post(CopyFrame(G, KEY, ROOM, Piece(2 * sender, 2 * sender + 1, 0, 6)))
    copied = bench.next(sender)
    assert isinstance(copied, FrameCopied)
    assert copied.frame is not None
    done = bench.step(1, RoomDone(ROOM))  # compares the digests of both
    assert (done.num_rooms, done.free_pages) == (0, 8)
    for worker in bench.workers:
        worker.stop()
