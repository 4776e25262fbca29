"""What a stage sends over a link: within credit, in order, and never at the cost of the step loop."""

import asyncio
from collections.abc import Iterator

import pytest

from kvmesh.errors import Corrupt, Unavailable
from kvmesh.kv.frames import FrameKind, Handle, handles_in, open_frame
from kvmesh.kv.layout import FRAME_BYTES, Shard
from kvmesh.kv.segment import OfferedSegment, Segment
from kvmesh.protocol.ids import Generation, Incarnation, PairingNumber, RoomId
from kvmesh.v1 import prefill_pb2 as pb
from services.prefill.carrier import InSegment, OnStream
from services.prefill.sender import LinkSender
from services.prefill.worker import Computed, CopyFrame, FrameCopied, Sampled

KEY = (Incarnation(3), PairingNumber(1))
SHARD = Shard(0, 4, 0, 2, 64, "fp32")
TOKEN_BYTES = SHARD.bytes_per_token


class Worker:
    """Notes what it is asked to copy."""

    def __init__(self) -> None:
        self.asked: list[CopyFrame] = []

    def post(self, record: CopyFrame) -> None:
        self.asked.append(record)


def link(worker: Worker, window_bytes: int = 64 << 20) -> LinkSender:
    return LinkSender(KEY, Generation(1), [SHARD], SHARD.dtype, OnStream(window_bytes), worker.post)


def size(asked: CopyFrame) -> int:
    piece = asked.piece
    return (piece.layer_end - piece.layer_begin) * (piece.token_end - piece.token_begin) * SHARD.layer_bytes_per_token


def computed(begin: int = 0, end: int = 1024) -> Computed:
    return Computed(KEY, RoomId(7), begin, end)


async def test_what_was_computed_is_asked_for_in_frames_that_tile_it() -> None:
    worker = Worker()
    link(worker).computed(computed())
    covered = {
        (layer, token)
        for asked in worker.asked
        for layer in range(asked.piece.layer_begin, asked.piece.layer_end)
        for token in range(asked.piece.token_begin, asked.piece.token_end)
    }
    assert covered == {(layer, token) for layer in range(4) for token in range(1024)}
    assert sum(size(a) for a in worker.asked) == 1024 * TOKEN_BYTES
    assert max(size(a) for a in worker.asked) <= FRAME_BYTES


async def test_no_more_is_asked_for_than_the_decoder_gave_credit() -> None:
    worker = Worker()
    sender = link(worker, window_bytes=FRAME_BYTES)
    sender.computed(computed())
    assert sum(size(a) for a in worker.asked) <= 2 * FRAME_BYTES, "the window may be overdrawn by one frame"
    before = len(worker.asked)
    sender.credit(FRAME_BYTES)
    assert before < len(worker.asked)
    while sum(size(a) for a in worker.asked) < 1024 * TOKEN_BYTES:
        sender.credit(FRAME_BYTES)
    assert len({(a.room, a.piece) for a in worker.asked}) == len(worker.asked)


async def test_a_frame_whose_room_ended_gives_its_credit_back() -> None:
    worker = Worker()
    sender = link(worker, window_bytes=1)
    sender.computed(computed())
    (first,) = worker.asked
    sender.copied(FrameCopied(first, None))
    assert len(worker.asked) == 2


async def test_the_time_a_link_was_busy_begins_with_its_work_and_ends_with_the_last_message() -> None:
    worker = Worker()
    sender = link(worker, window_bytes=1)
    assert sender.written() == 0, "nothing to send took no time"
    sender.computed(computed())
    spent = []
    for asked in iter(lambda: worker.asked.pop() if worker.asked else None, None):
        await asyncio.sleep(0.01)
        sender.copied(FrameCopied(asked, b"frame"))
        sender.credit(size(asked))
        await sender.next_message()
        spent.append(sender.written())
    assert len(spent) > 1
    assert all(seconds > 0.009 for seconds in spent), "each wait counts, once"
    await asyncio.sleep(0.01)
    assert sender.written() == 0, "idle time does not count"


async def test_a_room_that_ended_before_its_kv_was_sent_leaves_no_busy_time_behind() -> None:
    worker = Worker()
    sender = link(worker)
    sender.computed(computed())
    for asked in worker.asked:
        sender.copied(FrameCopied(asked, None))
    await asyncio.sleep(0.02)
    sender.sampled(Sampled(KEY, RoomId(8), 5), 0.0)
    await sender.next_message()
    assert sender.written() == 0


async def test_messages_leave_in_the_order_they_became_ready() -> None:
    worker = Worker()
    sender = link(worker)
    sender.sampled(Sampled(KEY, RoomId(7), token=42), queued_seconds=0.5)
    sender.computed(computed(0, 1))
    sender.copied(FrameCopied(worker.asked[0], b"frame"))
    header, payload = open_frame(await sender.next_message())
    record = pb.FirstToken.FromString(bytes(payload))
    assert (header.kind, header.room, header.pairing) == (FrameKind.FIRST_TOKEN, 7, 1)
    assert (record.token, record.queued.ToNanoseconds()) == (42, 500_000_000)
    assert await sender.next_message() == b"frame"


async def test_a_link_that_can_not_send_is_cut_and_one_with_nothing_to_send_is_not() -> None:
    """F-D2: only the pairing ends by it."""
    worker = Worker()
    idle, stuck = link(worker), link(worker, window_bytes=1)
    stuck.computed(computed())
    stuck.copied(FrameCopied(worker.asked[0], b"frame"))
    loop_time = asyncio.get_running_loop().time()
    for sender in (idle, stuck):
        sender.check_progress(loop_time, 2.0)
    for sender in (idle, stuck):
        sender.check_progress(loop_time + 1e6, 2.0)
    assert not idle.ended.done()
    error = stuck.ended.result()
    assert isinstance(error, Unavailable)
    assert error.reason == "link_stalled"


async def test_a_link_whose_last_message_is_never_taken_is_cut() -> None:
    worker = Worker()
    sender = link(worker)
    sender.computed(computed(end=1))
    (asked,) = worker.asked
    sender.copied(FrameCopied(asked, b"frame"))
    await sender.next_message()
    now = asyncio.get_running_loop().time()
    sender.check_progress(now, 2.0)
    assert not sender.ended.done()
    sender.check_progress(now + 1e6, 2.0)
    error = sender.ended.result()
    assert isinstance(error, Unavailable)
    assert error.reason == "link_stalled"


async def test_a_link_that_waits_for_its_worker_is_not_cut() -> None:
    worker = Worker()
    sender = link(worker)
    sender.computed(computed())
    sender.check_progress(1e9, 2.0)
    sender.check_progress(2e9, 2.0)
    assert not sender.ended.done()


async def test_an_ended_link_asks_for_nothing_more() -> None:
    worker = Worker()
    sender = link(worker, window_bytes=1)
    sender.end(Unavailable("over"))
    sender.computed(computed())
    assert not worker.asked


@pytest.mark.parametrize("first", ["a", "b"])
async def test_only_the_first_end_counts(first: str) -> None:
    sender = link(Worker())
    sender.end(Unavailable(first))
    sender.end(Unavailable("late"))
    assert str(await sender.ended) == first


@pytest.fixture
def segment() -> Iterator[Segment]:
    offered = OfferedSegment(3)
    yield Segment.join(offered.offer)
    offered.close()


def in_segment(worker: Worker, segment: Segment) -> LinkSender:
    return LinkSender(KEY, Generation(1), [SHARD], SHARD.dtype, InSegment(segment), worker.post)


async def test_in_a_segment_each_frame_has_a_cell_of_its_own_and_no_more_are_asked_for(segment: Segment) -> None:
    worker = Worker()
    sender = in_segment(worker, segment)
    sender.computed(computed(end=4096))
    cells = [asked.cell.number for asked in worker.asked if asked.cell is not None]
    assert sorted(cells) == [0, 1, 2]
    sender.credit(0, [1])
    assert [asked.cell.number for asked in worker.asked[3:] if asked.cell is not None] == [1]


async def test_handles_that_wait_together_go_together_and_before_the_first_token(segment: Segment) -> None:
    worker = Worker()
    sender = in_segment(worker, segment)
    sender.computed(computed(end=4096))
    handles = [Handle(asked.cell.number, 1000 + n) for n, asked in enumerate(worker.asked) if asked.cell is not None]
    for asked, handle in zip(worker.asked, handles, strict=True):
        sender.copied(FrameCopied(asked, handle))
    sender.sampled(Sampled(KEY, RoomId(7), token=42), queued_seconds=0.5)
    header, payload = open_frame(await sender.next_message())
    assert (header.kind, header.pairing) == (FrameKind.IN_CELLS, 1)
    assert handles_in(payload) == handles
    sender.written()
    assert open_frame(await sender.next_message())[0].kind is FrameKind.FIRST_TOKEN


async def test_the_cell_of_a_frame_whose_room_ended_is_free_again(segment: Segment) -> None:
    worker = Worker()
    sender = in_segment(worker, segment)
    sender.computed(computed(end=4096))
    (first, *_) = worker.asked
    sender.copied(FrameCopied(first, None))
    assert worker.asked[3].cell == first.cell


async def test_a_decoder_that_gives_back_what_it_has_not_got_loses_its_link(segment: Segment) -> None:
    sender = in_segment(Worker(), segment)
    sender.credit(0, [2])
    assert isinstance(sender.ended.result(), Corrupt)
