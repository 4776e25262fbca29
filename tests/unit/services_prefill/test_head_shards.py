"""A stage that sends its heads in shards: its real worker and link, up to the pages of a decoder."""

from pathlib import Path
from queue import SimpleQueue

import pytest
import torch

from kvmesh.kv.frames import FrameKind, open_frame
from kvmesh.kv.layout import Shard, WireName
from kvmesh.kv.pool import PagePool
from kvmesh.model.files import ModelFiles
from kvmesh.model.runner import Runner
from kvmesh.protocol.coverage import ShardSpan
from kvmesh.protocol.ids import Generation, Incarnation, PageId, PairingNumber, Rank, RoomId, StepNumber
from kvmesh.protocol.receiving import Outcome, Receiving
from kvmesh.protocol.steps import RoomAdmitted, Step, Work
from services.prefill.carrier import OnStream
from services.prefill.sender import LinkSender
from services.prefill.worker import BeginGeneration, FrameCopied, Report, RunStep, StageWorker, StepDone

G, KEY, ROOM = Generation(1), (Incarnation(3), PairingNumber(1)), RoomId(7)
PROMPT = [5, 9, 200, 17, 33, 80]
STAGE_PAGES = (PageId(4), PageId(1))


@pytest.mark.parametrize("cached_len", [0, 3])
@pytest.mark.parametrize("wire", ["fp32", "int8"])
async def test_a_stage_that_sends_its_heads_in_two_shards_fills_a_decoders_pages(
    tiny_model_dir: Path, cached_len: int, wire: WireName
) -> None:
    files = ModelFiles.open(tiny_model_dir)
    config, reports = files.config, SimpleQueue[Report]()
    runner = Runner.load(files, 0, config.num_layers, dtype="fp32", device="cpu", num_pages=8, page_size=4)
    worker = StageWorker(runner, reports.put)
    worker.start()
    try:
        worker.post(BeginGeneration(G))
        admitted = RoomAdmitted(ROOM, KEY[1], KEY[0], len(PROMPT), cached_len, STAGE_PAGES)
        step = Step(StepNumber(0), (admitted,), (Work(ROOM, 0, len(PROMPT)),))
        worker.post(RunStep(G, step, PROMPT, b""))
        done = reports.get(timeout=10)
        assert isinstance(done, StepDone), done

        cuts = [(1, config.num_kv_heads), (0, 1)]
        shards = [Shard(0, config.num_layers, *heads, config.head_dim, "fp32") for heads in cuts]
        sender = LinkSender(KEY, G, shards, wire, OnStream(1 << 20), worker.post)
        books, pages = Receiving(), (PageId(2), PageId(0))
        spans = {Rank(0): tuple(ShardSpan(0, config.num_layers, *heads) for heads in cuts)}
        room = books.open(ROOM, KEY[1], spans, pages, begin=cached_len, end=len(PROMPT))
        target = PagePool((0, config.num_layers), config.num_kv_heads, config.head_dim, 3, 4, "fp32")
        target.slots.fill_(7.0)
        for computed in done.computed:
            sender.computed(computed)
        for _ in shards:
            assert not room.coverage.complete
            copied = reports.get(timeout=10)
            assert isinstance(copied, FrameCopied)
            sender.copied(copied)
            header, payload = open_frame(await sender.next_message())
            assert header.kind is FrameKind.KV
            piece = ShardSpan(header.layer_begin, header.layer_end, header.head_begin, header.head_end)
            at = (KEY[1], Rank(0))
            assert books.frame(ROOM, KEY[1], at, piece, header.token_begin, header.token_end) is Outcome.WRITTEN
            target.write(pages, header, payload)
            sender.credit(len(payload))
        assert room.coverage.complete
    finally:
        worker.stop()
    sent = runner.pool.slots[:, :, :, [STAGE_PAGES[t // 4] * 4 + t % 4 for t in range(cached_len, len(PROMPT))]]
    there = target.slots[:, :, :, [pages[t // 3] * 3 + t % 3 for t in range(cached_len, len(PROMPT))]]
    bound = sent.abs().amax((3, 4), keepdim=True) / 253 if wire == "int8" else 0.0
    assert bool(((sent - there).abs() <= bound).all())
    assert int((target.slots == 7.0).sum()) == target.slots.numel() - sent.numel()
    assert torch.isfinite(there).all()
