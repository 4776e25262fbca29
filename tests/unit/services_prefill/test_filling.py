"""The worker copies KV of a step that still computes, and tells no layer that is not computed."""

from pathlib import Path
from queue import SimpleQueue

import pytest
from test_stage_worker import PROMPT, G, admitted

from kvmesh.kv.layout import Piece
from kvmesh.model.files import ModelFiles
from kvmesh.model.runner import Runner
from kvmesh.protocol.ids import RoomId, StepNumber
from kvmesh.protocol.steps import Step, Work
from services.prefill import filling as filling_module
from services.prefill.worker import (
    BeginGeneration,
    CopyFrame,
    LayersDone,
    Report,
    RunStep,
    StageWorker,
    StepDone,
    WorkerFailed,
)


@pytest.fixture
def any_span_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(filling_module, "FRAME_BYTES", 1)


class Layered:
    """A worker of three layers whose links ask for what is told at once; its reports."""

    def __init__(self, model: Path) -> None:
        sizes = {"dtype": "fp32", "device": "cpu", "num_pages": 8, "page_size": 4}
        self.runner = Runner.load(ModelFiles.open(model), 0, 3, **sizes)  # type: ignore[arg-type]
        self.reports: SimpleQueue[Report] = SimpleQueue()
        self.worker = StageWorker(self.runner, self.receive)
        self.worker.start()
        self.worker.post(BeginGeneration(G))

    def receive(self, report: Report) -> None:
        """In the worker's thread: what it posts is there before the next layer."""
        self.reports.put(report)
        if isinstance(report, LayersDone):
            for computed in report.computed:
                assert computed.layers_end is not None
                piece = Piece(computed.layers_end - 1, computed.layers_end, computed.begin, computed.end)
                self.worker.post(CopyFrame(G, computed.key, computed.room, piece))

    def step(self) -> list[Report]:
        """A step of the whole prompt; its reports, up to its end."""
        step = Step(StepNumber(0), (admitted(),), (Work(RoomId(7), 0, len(PROMPT)),))
        self.worker.post(RunStep(G, step, PROMPT, b""))
        came = [self.reports.get(timeout=10)]
        while not isinstance(came[-1], StepDone | WorkerFailed):
            came.append(self.reports.get(timeout=10))
        self.worker.stop()
        return came


@pytest.mark.usefixtures("any_span_is_large")
def test_a_frame_is_copied_while_its_step_computes(tiny_model_dir: Path) -> None:
    bench = Layered(tiny_model_dir)
    came = bench.step()
    assert [type(report).__name__ for report in came] == ["LayersDone", "FrameCopied"] * 3 + ["StepDone"]
    done = came[-1]
    assert isinstance(done, StepDone)
    assert [(c.begin, c.end, c.layers_end) for c in done.computed] == [(0, len(PROMPT), None)]
    for layer, copied in enumerate(came[1:-1:2]):
        whole = bench.runner.pool.frame(admitted().pages, Piece(layer, layer + 1, 0, 6), room=7, pairing=1)
        assert copied.frame == whole, "as it stands after the step"  # type: ignore[union-attr]


@pytest.mark.usefixtures("any_span_is_large")
def test_a_step_that_fails_midway_told_only_layers_that_were_computed(tiny_model_dir: Path) -> None:
    bench = Layered(tiny_model_dir)
    bench.runner._weights.layers[2:] = [None]  # type: ignore[list-item]
    came = bench.step()
    assert [r.computed[0].layers_end for r in came if isinstance(r, LayersDone)] == [1, 2]
    assert isinstance(came[-1], WorkerFailed)
