"""A decoder that owes credit and can't give it yet tells the stage that it lives; one whose threads stand still does not."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest

from kvmesh.kv.frames import FrameHeader, FrameKind, cells_in, open_frame, seal
from kvmesh.protocol.ids import Generation, PairingNumber, Rank
from kvmesh.v1 import prefill_pb2 as pb
from kvmesh.v1.types_pb2 import Descriptor, Member
from services.decode.identity import DecoderIdentity
from services.decode.in_flight import InFlight
from services.decode.link import BEATS, Link
from services.decode.records import FrameArrived, Received
from services.decode.segments import Segments

WATCHDOG_SECONDS = 0.2
KV = seal(FrameHeader(FrameKind.KV, 1, 1, 0, 1, 0, 1, 0, 1, 4, "fp32"), bytes(16 * 2))
STAGE = Member(incarnation=5)


class PlayedCall:
    """The stream to a stage: what it says, and what it heard."""

    def __init__(self) -> None:
        self.says: asyncio.Queue[bytes] = asyncio.Queue()
        self.heard: list[bytes] = []

    async def read(self) -> bytes:
        return await self.says.get()

    async def write(self, message: bytes) -> None:
        self.heard.append(message)

    @property
    def credits(self) -> list[tuple[int, list[int]]]:
        opened = [open_frame(message) for message in self.heard]
        return [(h.credit_bytes, cells_in(p)) for h, p in opened if h.kind is FrameKind.CREDIT]


@asynccontextmanager
async def linked(call: PlayedCall, *, moves: bool) -> AsyncIterator[tuple[Link, list[FrameArrived]]]:
    own = DecoderIdentity(Member(incarnation=7), Descriptor(), 1 << 20, WATCHDOG_SECONDS, 1 << 20)
    link = Link(call, Rank(0), STAGE, "the stage", PairingNumber(1), own, lambda: moves)  # type: ignore[arg-type]
    welcome = pb.LinkWelcome(stage=STAGE.incarnation, kv_wire=pb.KV_WIRE_FP32)
    call.says.put_nowait(seal(FrameHeader(FrameKind.WELCOME), welcome.SerializeToString()))
    await link.greet(Generation(1), Segments(0))
    arrived: list[FrameArrived] = []
    tasks = [
        asyncio.ensure_future(link.read_frames(arrived.append, InFlight(1 << 20))),
        asyncio.ensure_future(link.write_credits()),
    ]
    try:
        yield link, arrived
    finally:
        for task in tasks:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task


async def beats(count: int) -> None:
    await asyncio.sleep((count + 0.5) * WATCHDOG_SECONDS / BEATS)


@pytest.mark.parametrize("moves", [True, False])
async def test_kv_that_waits_without_credit_is_no_standstill_while_the_threads_move(moves: bool) -> None:
    call: Any = PlayedCall()
    async with linked(call, moves=moves) as (link, arrived):
        await beats(2)
        assert not call.credits, "nothing is owed"
        call.says.put_nowait(KV)
        await beats(3)
        assert bool(call.credits) == moves
        assert all(credit == (0, []) for credit in call.credits)
        (frame,) = arrived
        link.credit(Received(PairingNumber(1), Rank(0), len(frame.message) - 64))
        await beats(1)
        assert call.credits[-1] == (len(KV) - 64, [])
        told = len(call.credits)
        await beats(2)
        assert len(call.credits) == told, "nothing is owed any more"
