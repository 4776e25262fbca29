"""A pairing whose stream is lost takes no room from that moment on; the rooms it has are told once the last words are in."""

import asyncio
from typing import Any

import pytest

from kvmesh.errors import Fenced, KvmeshError, Unavailable
from kvmesh.protocol.ids import Generation, PairingNumber, Rank
from kvmesh.v1.bootstrap_pb2 import WholePipeline
from kvmesh.v1.types_pb2 import Descriptor, Member
from services.decode import pairings as pairings_module
from services.decode.identity import DecoderIdentity
from services.decode.in_flight import InFlight
from services.decode.links import PairingStreams, Told
from services.decode.pairings import Pairings
from services.decode.records import Received

G = Generation(4)


async def test_a_fallen_pairing_takes_no_room_while_its_rooms_wait_for_the_last_words(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lost: list[tuple[Generation, KvmeshError]] = []
    stream_lost, last_words = asyncio.Event(), asyncio.Event()

    async def run(self: Any) -> None:
        self.stood = True
        self._told.standing(self)
        await stream_lost.wait()
        self._told.fallen(self)
        await last_words.wait()
        raise Unavailable("rank 1 is lost", reason="link_lost")

    monkeypatch.setattr(PairingStreams, "run", run)
    own = DecoderIdentity(Member(incarnation=7), Descriptor(), 1 << 20, 0.2, 1 << 20)
    told = Told(lambda _: None, lambda _number, _message: None, lambda: True)
    pairings = Pairings(own, told, lambda generation, error: lost.append((generation, error)), lambda: None)
    named: asyncio.Queue[list[WholePipeline]] = asyncio.Queue()
    async with asyncio.TaskGroup() as tasks:
        following = tasks.create_task(pairings.run(tasks, named))  # type: ignore[arg-type]
        named.put_nowait([WholePipeline(pipeline="p0", generation=G)])
        for _ in range(5):
            await asyncio.sleep(0)
        assert pairings.require(G).number == 1
        stream_lost.set()
        await asyncio.sleep(0)
        assert not pairings.standing
        with pytest.raises(Fenced):
            pairings.require(G)
        named.put_nowait([])  # nor does the registry, which names the generation no more, cut the last words short
        for _ in range(5):
            await asyncio.sleep(0)
        assert not lost
        last_words.set()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert [(generation, error.reason) for generation, error in lost] == [(G, "link_lost")]
        following.cancel()
        pairings.stop()


async def test_what_a_pairing_brought_before_it_ended_leaves_the_bound_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    bounds: list[InFlight] = []

    class Seen(InFlight):
        def __init__(self, limit_bytes: int) -> None:
            super().__init__(limit_bytes)
            bounds.append(self)

    monkeypatch.setattr(pairings_module, "InFlight", Seen)
    own = DecoderIdentity(Member(incarnation=7), Descriptor(), 1 << 20, 0.2, 1 << 20)
    told = Told(lambda _: None, lambda _number, _message: None, lambda: True)
    pairings = Pairings(own, told, lambda _generation, _error: None, lambda: None)
    bounds[0].took(300)
    pairings.credit(Received(PairingNumber(9), Rank(0), 100))
    pairings.credit(Received(PairingNumber(9), Rank(0), 50, cell=3))  # shared memory is not counted
    pairings.credit(Received(PairingNumber(9), Rank(1), 200))
    assert bounds[0].num_bytes == 0
