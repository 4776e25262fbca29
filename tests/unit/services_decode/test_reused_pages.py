"""Pages and links that an earlier room used: what was left there is neither read nor taken for what is awaited."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_decode_worker import PAGES, PAIRING, PROMPT, ROOM, Bench

from kvmesh.errors import Corrupt
from kvmesh.kv.frames import FrameHeader, FrameKind, seal
from kvmesh.protocol.ids import RoomId
from kvmesh.v1 import prefill_pb2 as pb
from services.decode.records import CloseRoom, LinkBroken, RoomBroken, RoomComplete, TokenDrawn

NEXT = RoomId(42)


@pytest.fixture
def bench(tiny_model_dir: Path) -> Iterator[Bench]:
    made = Bench(tiny_model_dir)
    yield made
    asyncio.run(made.worker.stop())


def first_token(token: int, *, room: int, pairing: int) -> bytes:
    payload = pb.FirstToken(token=token).SerializeToString()
    return seal(FrameHeader(FrameKind.FIRST_TOKEN, room=room, pairing=pairing), payload)


def first_drawn(bench: Bench) -> TokenDrawn:
    drawn = bench.next(TokenDrawn)
    assert isinstance(drawn, TokenDrawn)
    return drawn


@pytest.mark.parametrize(
    ("room", "in_header", "of_link"), [(40, PAIRING, PAIRING), (ROOM, 9, PAIRING), (ROOM, PAIRING, 9), (ROOM, 9, 9)]
)
def test_a_first_token_of_another_room_or_pairing_is_not_taken(
    bench: Bench, room: int, in_header: int, of_link: int
) -> None:
    """F-C4: the record names its room and pairing, and is fenced by both."""
    bench.open()
    for rank in (0, 1):
        bench.arrive(bench.frame(rank), rank=rank)
    stray = (bench.first_token + 1) % 256
    bench.arrive(first_token(stray, room=room, pairing=in_header), pairing=of_link)
    assert not [r for r in bench.settle() if isinstance(r, RoomComplete | TokenDrawn | RoomBroken)]
    bench.arrive(bench.first())
    assert first_drawn(bench).token == bench.first_token


def test_the_second_first_token_of_a_room_does_not_replace_the_first(bench: Bench) -> None:
    """F-C4: a late writer."""
    bench.open()
    bench.arrive(bench.first())
    bench.arrive(first_token((bench.first_token + 1) % 256, room=ROOM, pairing=PAIRING))
    for rank in (0, 1):
        bench.arrive(bench.frame(rank), rank=rank)
    assert first_drawn(bench).token == bench.first_token


def test_a_room_in_used_pages_is_neither_complete_nor_broken_until_its_own_kv_is_there(bench: Bench) -> None:
    """F-C5: what has not been written is missing, not wrong, whatever the pages hold."""
    bench.open()
    for rank in (0, 1):
        bench.arrive(bench.frame(rank), rank=rank)
    bench.arrive(bench.first())
    bench.next(RoomComplete)
    bench.worker.post(CloseRoom(ROOM))
    bench.open(NEXT, PAGES)
    bench.arrive(bench.first(NEXT))
    bench.arrive(bench.frame(0, room=NEXT), rank=0)
    assert bench.written
    assert not [r for r in bench.settle() if isinstance(r, RoomComplete | RoomBroken | LinkBroken)]
    bench.arrive(bench.frame(1, room=NEXT))
    complete = bench.next(RoomComplete)
    assert isinstance(complete, RoomComplete)
    assert complete.room == NEXT


FAR = 2**32 - 1
"""The last token a header can name."""


@pytest.mark.parametrize(
    "where",
    [
        {"token_begin": FAR - 1, "token_end": FAR},
        {"token_begin": len(PROMPT), "token_end": len(PROMPT) + 1},
        {"token_begin": 2**31, "token_end": 2**31 + 1},
        {"layer_begin": 2**16 - 2, "layer_end": 2**16 - 1},
        {"head_begin": 2**16 - 3, "head_end": 2**16 - 1},
    ],
    ids=["last-token", "next-token", "sign-bit", "last-layer", "last-head"],
)
def test_an_offset_at_the_end_of_its_range_fails_the_attempt_and_writes_nothing(
    bench: Bench, where: dict[str, int]
) -> None:
    """F-C9: judged against the plan, before any slot is computed from it. The frame itself is well sealed."""
    bench.open()
    ranges = {
        "layer_begin": 0,
        "layer_end": 1,
        "head_begin": 0,
        "head_end": bench.heads,
        "token_begin": 0,
        "token_end": 1,
    }
    header = FrameHeader(FrameKind.KV, room=ROOM, pairing=PAIRING, head_dim=16, dtype="fp32", **(ranges | where))
    bench.arrive(seal(header, bytes([7]) * header.kv_bytes), rank=0)
    broken = bench.next(RoomBroken)
    assert isinstance(broken, RoomBroken)
    assert isinstance(broken.error, Corrupt)
    assert broken.error.reason == "outside_plan"
    assert not bench.written
