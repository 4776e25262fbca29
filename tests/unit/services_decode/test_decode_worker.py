"""The decoder's fence: what reaches a page, and what never does. Real model, real pool, real frames; no stream."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue
from time import monotonic

import pytest
import torch

from kvmesh.kv.frames import FrameHeader, FrameKind, seal
from kvmesh.kv.layout import Piece, WireName
from kvmesh.model.files import ModelFiles
from kvmesh.model.runner import Runner, Span
from kvmesh.model.sampling import SamplingParams
from kvmesh.protocol.coverage import ShardSpan
from kvmesh.protocol.ids import PageId, PairingNumber, Rank, RoomId
from kvmesh.v1 import prefill_pb2 as pb
from kvmesh.v1.types_pb2 import FINISH_REASON_LENGTH, FINISH_REASON_STOP
from services.decode.records import (
    CloseRoom,
    FrameArrived,
    LinkBroken,
    OpenRoom,
    Received,
    Report,
    RoomBroken,
    RoomComplete,
    TokenDrawn,
)
from services.decode.threads import DecodeThreads

PROMPT = [5, 9, 200, 17, 33, 80]
PAIRING = PairingNumber(3)
WIRE: WireName = "fp32"
NOWHERE = 999
ROOM = RoomId(41)
PAGES = (PageId(6), PageId(2), PageId(3))


class Bench:
    """A decoder's threads, a prefill runner that feeds them, and the reports that came."""

    def __init__(self, model: Path) -> None:
        files = ModelFiles.open(model)
        self.num_layers = files.config.num_layers
        sizes = {"dtype": "fp32", "device": "cpu", "num_pages": 8, "page_size": 4}
        self.source = Runner.load(files, 0, self.num_layers, **sizes)
        logits = self.source.forward([Span(pages=[0, 1], begin=0, end=6, sample=True)], torch.tensor(PROMPT))
        self.first_token = int(logits.argmax())
        self.target = Runner.load(files, 0, self.num_layers, **sizes)
        self.target.pool.slots.zero_()  # fresh memory holds anything
        self.heads = files.config.num_kv_heads
        self.reports: SimpleQueue[Report] = SimpleQueue()
        self.worker = DecodeThreads(self.target, self.reports.put)
        self.worker.start()

    def open(
        self, room: int = ROOM, pages: tuple[PageId, ...] = PAGES, output: int = 4, stop: tuple[int, ...] = ()
    ) -> None:
        shards = {
            Rank(0): (ShardSpan(0, 1, 0, self.heads),),
            Rank(1): (ShardSpan(1, self.num_layers, 0, self.heads),),
        }
        self.worker.post(
            OpenRoom(
                RoomId(room),
                PAIRING,
                shards,
                pages,
                prompt_len=len(PROMPT),
                cached_len=0,
                output_index=0,
                max_output_len=output,
                sampling=SamplingParams(),
                stop_ids=frozenset(stop),
            )
        )

    def frame(self, rank: int, begin: int = 0, end: int = 6, *, room: int = ROOM, pairing: int = PAIRING) -> bytes:
        layers = (0, 1) if rank == 0 else (1, self.num_layers)
        return self.source.pool.frame([0, 1], Piece(*layers, begin, end), room=room, pairing=pairing)

    def first(self, room: int = ROOM) -> bytes:
        payload = pb.FirstToken(token=self.first_token).SerializeToString()
        return seal(FrameHeader(FrameKind.FIRST_TOKEN, room=room, pairing=PAIRING), payload)

    def goes_on(self, length: int, token: torch.Tensor) -> int:
        """What the source alone draws next: `token` is the last of so many and one."""
        span = Span(pages=[0, 1, 2], begin=length, end=length + 1, sample=True)
        return int(self.source.forward([span], token).argmax())

    def arrive(self, message: bytes, rank: int = 1, pairing: int = PAIRING) -> None:
        self.worker.post(FrameArrived(PairingNumber(pairing), Rank(rank), message, monotonic(), WIRE))

    def next(self, kind: type[Report]) -> Report:
        """The next report of a kind; others before it are passed over."""
        while True:
            report = self.reports.get(timeout=10)
            if isinstance(report, kind):
                return report

    def settle(self) -> list[Report]:
        """Everything reported until now: a frame of a room that never was, over a link that never was, marks the end."""
        self.arrive(self.frame(1, room=999), pairing=NOWHERE)
        seen: list[Report] = []
        while not (isinstance(report := self.reports.get(timeout=10), Received) and report.pairing == NOWHERE):
            seen.append(report)
        while not self.reports.empty():
            seen.append(self.reports.get())
        return seen

    @property
    def written(self) -> bool:
        """Whether anything was ever written to a page."""
        return bool(self.target.pool.slots.any())


@pytest.fixture
def bench(tiny_model_dir: Path) -> Iterator[Bench]:
    made = Bench(tiny_model_dir)
    yield made
    asyncio.run(made.worker.stop())


def drawn(bench: Bench, count: int) -> list[int]:
    reports = [bench.next(TokenDrawn) for _ in range(count)]
    return [r.token for r in reports if isinstance(r, TokenDrawn)]


def test_a_room_joins_only_when_every_shard_and_the_first_token_are_there(bench: Bench) -> None:
    bench.open()
    bench.arrive(bench.frame(0), rank=0)
    bench.arrive(bench.frame(1, 0, 3))
    bench.arrive(bench.first())
    assert not [r for r in bench.settle() if isinstance(r, RoomComplete)]
    bench.arrive(bench.frame(1, 3, 6))
    assert isinstance(bench.next(RoomComplete), RoomComplete)
    tokens = drawn(bench, 4)
    assert tokens[0] == bench.first_token
    expected, length = [bench.first_token], len(PROMPT)
    while len(expected) < 4:  # the source goes on alone
        expected.append(bench.goes_on(length, torch.tensor(expected[-1:])))
        length += 1
    assert tokens == expected


def test_a_late_frame_of_a_closed_room_is_refused_and_writes_nothing(bench: Bench) -> None:
    """F-A3: the pages may be another room's by then."""
    bench.open()
    bench.worker.post(CloseRoom(ROOM))
    bench.arrive(bench.frame(0), rank=0)
    bench.settle()
    assert not bench.written


def test_a_frame_for_an_unknown_room_writes_nothing_and_opens_nothing(bench: Bench) -> None:
    """F-R3"""
    bench.arrive(bench.frame(0, room=7), rank=0)
    assert not [r for r in bench.settle() if not isinstance(r, Received)]
    assert not bench.written


@pytest.mark.parametrize(("in_header", "of_link"), [(PAIRING, 9), (9, PAIRING), (9, 9)])
def test_a_frame_through_another_pairing_writes_nothing(bench: Bench, in_header: int, of_link: int) -> None:
    bench.open()
    bench.arrive(bench.frame(0, pairing=in_header), rank=0, pairing=of_link)
    bench.settle()
    assert not bench.written


@pytest.mark.parametrize("where", [0, 8, 20, 64, 100, -1])
def test_a_flipped_bit_ends_the_pairing_and_writes_nothing(bench: Bench, where: int) -> None:
    bench.open()
    damaged = bytearray(bench.frame(0))
    damaged[where] ^= 4
    bench.arrive(bytes(damaged), rank=0)
    assert isinstance(bench.next(LinkBroken), LinkBroken)
    assert not bench.written


@pytest.mark.parametrize("length", [0, 10, 64, 200])
def test_a_cut_frame_ends_the_pairing_and_writes_nothing(bench: Bench, length: int) -> None:
    bench.open()
    bench.arrive(bench.frame(0)[:length], rank=0)
    assert isinstance(bench.next(LinkBroken), LinkBroken)
    assert not bench.written


def test_kv_in_another_format_than_the_stage_said_ends_the_pairing_and_writes_nothing(bench: Bench) -> None:
    bench.open()
    frame = bench.source.pool.frame([0, 1], Piece(0, 1, 0, 6, wire="int8"), room=ROOM, pairing=PAIRING)
    bench.arrive(frame, rank=0)
    broken, received = bench.next(LinkBroken), bench.next(Received)
    assert isinstance(broken, LinkBroken)
    assert broken.error.message == "KV came as int8, it was to come as fp32"
    assert isinstance(received, Received)
    assert received.num_bytes == len(frame) - 64
    assert not bench.written


@pytest.mark.parametrize("kind", [FrameKind.HELLO, FrameKind.WELCOME, FrameKind.CREDIT, FrameKind.IN_CELLS])
def test_what_no_stage_sends_on_a_link_ends_the_pairing(bench: Bench, kind: FrameKind) -> None:
    bench.open()
    bench.arrive(seal(FrameHeader(kind, pairing=PAIRING), b"eightbyt"), rank=0)
    broken = bench.next(LinkBroken)
    assert isinstance(broken, LinkBroken)
    assert broken.error.message == f"a stage sent {kind.name}"


def test_layers_of_another_stage_break_the_room_and_write_nothing(bench: Bench) -> None:
    """F-C3"""
    bench.open()
    bench.arrive(bench.frame(1), rank=0)
    broken = bench.next(RoomBroken)
    assert isinstance(broken, RoomBroken)
    assert broken.error.reason == "outside_plan"
    assert not bench.written


def test_a_repeat_is_not_written_again(bench: Bench) -> None:
    bench.open()
    bench.arrive(bench.frame(0), rank=0)
    bench.settle()
    before = bench.target.pool.slots.clone()
    bench.source.pool.slots.fill_(7.0)
    bench.arrive(bench.frame(0), rank=0)
    bench.settle()
    assert torch.equal(bench.target.pool.slots, before)


def test_only_the_rooms_own_pages_are_written(bench: Bench) -> None:
    bench.open()
    bench.arrive(bench.frame(0), rank=0)
    bench.settle()
    pool = bench.target.pool
    pages = {slot // pool.page_size for slot in pool.slots[0, 0, 0].abs().sum(-1).nonzero().flatten().tolist()}
    assert pages == {6, 2}


def test_credit_comes_back_for_every_payload_even_of_ended_rooms(bench: Bench) -> None:
    message = bench.frame(0, room=7)
    bench.arrive(message, rank=0)
    received = bench.next(Received)
    assert isinstance(received, Received)
    assert received.num_bytes == len(message) - 64


def test_the_last_token_carries_the_reason(bench: Bench) -> None:
    bench.open(output=1)
    for rank in (0, 1):
        bench.arrive(bench.frame(rank), rank=rank)
    bench.arrive(bench.first())
    last = bench.next(TokenDrawn)
    assert isinstance(last, TokenDrawn)
    assert last.finish_reason == FINISH_REASON_LENGTH


def test_a_stop_id_ends_the_room_with_that_token(bench: Bench) -> None:
    bench.open(stop=(bench.first_token,))
    for rank in (0, 1):
        bench.arrive(bench.frame(rank), rank=rank)
    bench.arrive(bench.first())
    last = bench.next(TokenDrawn)
    assert isinstance(last, TokenDrawn)
    assert (last.token, last.finish_reason) == (bench.first_token, FINISH_REASON_STOP)


def test_rooms_decode_side_by_side_as_each_would_alone(bench: Bench) -> None:
    bench.open(41, (PageId(6), PageId(2), PageId(3)))
    bench.open(42, (PageId(1), PageId(0), PageId(4)))
    for room in (41, 42):
        for rank in (0, 1):
            bench.arrive(bench.frame(rank, room=room), rank=rank)
        bench.arrive(bench.first(room))
    tokens: dict[int, list[int]] = {41: [], 42: []}
    while any(len(t) < 4 for t in tokens.values()):
        report = bench.next(TokenDrawn)
        assert isinstance(report, TokenDrawn)
        tokens[report.room].append(report.token)
    assert tokens[41] == tokens[42]


def test_frames_outside_the_plan_do_not_disturb_a_room_that_decodes(bench: Bench) -> None:
    bench.open(output=6)
    for rank in (0, 1):
        bench.arrive(bench.frame(rank), rank=rank)
    bench.arrive(bench.first())
    bench.next(TokenDrawn)
    bench.arrive(bench.frame(1), rank=0)
    bench.arrive(bench.frame(0), rank=0)
    for _ in range(3):
        assert not isinstance(bench.next(TokenDrawn), RoomBroken)
    bench.worker.post(CloseRoom(ROOM))
    assert not [r for r in bench.settle() if isinstance(r, RoomBroken)]


@pytest.mark.parametrize("last", ["frame", "first token"])
def test_a_room_is_complete_when_the_last_of_it_arrived_however_late_the_worker_gets_to_it(
    bench: Bench, last: str
) -> None:
    """Else the worker's own step would count as transfer."""
    bench.open()
    came = [(bench.frame(0), 0), (bench.frame(1), 1)]
    came.insert(len(came) if last == "first token" else 0, (bench.first(), 1))
    for at, (message, rank) in enumerate(came, 10):
        bench.worker.post(FrameArrived(PAIRING, Rank(rank), message, float(at), WIRE))
    complete = bench.next(RoomComplete)
    assert isinstance(complete, RoomComplete)
    assert complete.complete_at == 12.0
