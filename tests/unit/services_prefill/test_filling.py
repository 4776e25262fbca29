"""KV leaves in whole frames while its step still computes: the same frames, and never a layer that is not computed."""

from pathlib import Path
from queue import SimpleQueue

import pytest
from test_stage_worker import KEY, PROMPT, G, admitted

from kvmesh.kv.layout import FRAME_BYTES, Piece, Shard, plan_frames
from kvmesh.model.files import ModelFiles
from kvmesh.model.runner import Runner
from kvmesh.protocol.ids import RoomId, StepNumber
from kvmesh.protocol.sending import Computed
from kvmesh.protocol.steps import Step, Work
from services.prefill import filling as filling_module
from services.prefill.carrier import OnStream
from services.prefill.filling import Filling
from services.prefill.links import LinkSender
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

SHARD = Shard(15, 30, 0, 3, 64, "fp32")
"""A stage of smollm2: of 256 tokens five layers fill a frame."""


def span(room: int = 7, begin: int = 0, end: int = 256) -> Computed:
    return Computed(KEY, RoomId(room), begin, end)


def told(spans: list[Computed], shard: Shard = SHARD) -> tuple[list[tuple[int, Computed]], tuple[Computed, ...]]:
    """What is told after each layer, with the first layer not computed then; and what is left for the end."""
    filling = Filling(spans, shard)
    early = [(layer + 1, c) for layer in range(shard.layer_begin, shard.layer_end) for c in filling.layer()]
    return early, filling.rest()


@pytest.mark.parametrize("num_tokens", [1, 7, 64, 100, 128, 300, 682, 683, 2048])
@pytest.mark.parametrize("first", [0, 15])
async def test_told_early_or_not_a_step_is_cut_into_the_same_frames(num_tokens: int, first: int) -> None:
    shard, posted = Shard(first, 15 + first, 0, 3, 64, "fp32"), list[CopyFrame]()
    link = LinkSender(KEY, G, [shard], shard.dtype, OnStream(1 << 40), posted.append)
    early, rest = told([span(end=num_tokens)], shard)
    for computed in [*(c for _, c in early), *rest]:
        link.computed(computed)
    assert [asked.piece for asked in posted] == plan_frames(shard, 0, num_tokens)


def test_only_layers_that_are_computed_are_told_and_in_whole_frames() -> None:
    early, rest = told([span()])
    assert [(computed, c.layers) for computed, c in early] == [(20, (15, 20)), (25, (20, 25)), (30, (25, 30))]
    assert rest == ()


def test_what_fills_no_frame_comes_whole_with_the_end_of_its_step() -> None:
    short = span(end=8)
    assert 8 * SHARD.bytes_per_token < FRAME_BYTES
    assert told([short]) == ([], (short,))


def test_rooms_of_one_step_fill_their_own_frames() -> None:
    early, rest = told([span(7, 0, 240), span(8, 40, 48)])
    assert {c.room for _, c in early} == {7}
    assert rest == (span(8, 40, 48),)


@pytest.fixture
def one_layer_a_frame(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(filling_module, "layers_per_frame", lambda shard, num_tokens: 1)


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
                layers = computed.layers
                assert layers is not None
                self.worker.post(
                    CopyFrame(G, computed.key, computed.room, Piece(*layers, computed.begin, computed.end))
                )

    def step(self) -> list[Report]:
        """A step of the whole prompt; its reports, up to its end."""
        step = Step(StepNumber(0), (admitted(),), (Work(RoomId(7), 0, len(PROMPT)),))
        self.worker.post(RunStep(G, step, PROMPT, b""))
        came = [self.reports.get(timeout=10)]
        while not isinstance(came[-1], StepDone | WorkerFailed):
            came.append(self.reports.get(timeout=10))
        self.worker.stop()
        return came


@pytest.mark.usefixtures("one_layer_a_frame")
def test_a_frame_is_copied_while_its_step_computes(tiny_model_dir: Path) -> None:
    bench = Layered(tiny_model_dir)
    came = bench.step()
    assert [type(report).__name__ for report in came] == ["LayersDone", "FrameCopied"] * 3 + ["StepDone"]
    done = came[-1]
    assert isinstance(done, StepDone)
    assert done.computed == ()
    for layer, copied in enumerate(came[1:-1:2]):
        whole = bench.runner.pool.frame(admitted().pages, Piece(layer, layer + 1, 0, 6), room=7, pairing=1)
        assert copied.frame == whole, "as it stands after the step"  # type: ignore[union-attr]


@pytest.mark.usefixtures("one_layer_a_frame")
def test_a_step_that_fails_midway_told_only_layers_that_were_computed(tiny_model_dir: Path) -> None:
    bench = Layered(tiny_model_dir)
    bench.runner._weights.layers[2:] = [None]  # type: ignore[list-item]
    came = bench.step()
    assert [r.computed[0].layers for r in came if isinstance(r, LayersDone)] == [(0, 1), (1, 2)]
    assert isinstance(came[-1], WorkerFailed)
