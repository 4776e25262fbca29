"""NIXL over UCX: the source writes blocks into the target's memory, picked from lists of all blocks that are made once.

Which transports UCX may use, the path says in the environment (UCX_TLS).
"""

import importlib
from collections.abc import Sequence
from time import sleep
from typing import Any

from torch import Tensor

from bench.kv_transfer.content import block_numbers, blocks_of_page
from bench.kv_transfer.ends import End, NotHere
from bench.kv_transfer.rooms import SHARD, Room, Turn
from kvmesh.kv.pool import PagePool

MODULES = ("nixl_cu12._api", "nixl._api")
KIND = "DRAM"
SOURCE, TARGET = "source", "target"


class _Nixl(End):
    name: str

    def __init__(self, pool: PagePool) -> None:
        super().__init__(pool)
        module = _module()
        # Without its own thread, which spins all the time: both ends poll, and give way where there is nothing. On two cores
        # that is four times as fast between one host's processes, and nine times over TCP.
        config = module.nixl_agent_config(enable_prog_thread=False, backends=["UCX"])
        self._agent = module.nixl_agent(self.name, config)
        self._begin = pool.slots.data_ptr()
        self._registered = self._agent.register_memory([(self._begin, pool.slots.nbytes, 0, "")], KIND)

    def page_of(self, page: int) -> Tensor:
        """In blocks."""
        return blocks_of_page(self.pool, page)

    def _blocks(self, begin: int) -> list[tuple[int, int, int]]:
        """All blocks of a pool that begins there: address, bytes, device."""
        count = SHARD.num_layers * self.pool.num_pages
        size = self.pool.slots.nbytes // count
        return [(begin + number * size, size, 0) for number in range(count)]

    def _numbers(self, rooms: Sequence[Room]) -> list[list[int]]:
        return [block_numbers(room, self.pool.num_pages) for room in rooms]


class NixlSource(_Nixl):
    """Writes all rooms at once."""

    name = SOURCE
    begins = True

    async def offer(self) -> Any:
        """Its metadata."""
        return self._agent.get_agent_metadata()

    async def meet(self, offered: Any) -> None:
        """Knows the target and lists the blocks of both."""
        metadata, begin = offered
        self._agent.add_remote_agent(metadata)
        self._here = self._agent.prep_xfer_dlist("", self._blocks(self._begin), KIND)
        self._there = self._agent.prep_xfer_dlist(TARGET, self._blocks(begin), KIND)

    async def begin(self, turn: Turn) -> None:
        """Which blocks."""
        self._picked = list(zip(self._numbers(turn.rooms), self._numbers(turn.there), strict=True))

    async def carry(self, turn: Turn) -> None:
        """One transfer a room, and its number with it as the note that it is there."""
        self._write(turn.rooms)

    def _write(self, rooms: Sequence[Room]) -> None:
        agent = self._agent
        open_transfers = []
        for room, (here, there) in zip(rooms, self._picked, strict=True):
            transfer = agent.make_prepped_xfer("WRITE", self._here, here, self._there, there, b"%d" % room.number)
            if agent.transfer(transfer) == "ERR":
                raise ConnectionError("NIXL refused a transfer")
            open_transfers.append(transfer)
        while open_transfers:
            state = agent.check_xfer_state(open_transfers[0])
            if state == "ERR":
                raise ConnectionError("a transfer of NIXL failed")
            if state == "DONE":
                agent.release_xfer_handle(open_transfers.pop(0))
            else:
                sleep(0)


class NixlTarget(_Nixl):
    """Polls, which also moves its half of what goes over TCP."""

    name = TARGET

    async def offer(self) -> Any:
        """Its metadata, and where its memory begins."""
        return self._agent.get_agent_metadata(), self._begin

    async def meet(self, offered: Any) -> None:
        """Knows the source."""
        self._agent.add_remote_agent(offered)

    async def carry(self, turn: Turn) -> None:
        """Until each room's note came."""
        self._receive({b"%d" % room.number for room in turn.rooms})

    def _receive(self, missing: set[bytes]) -> None:
        while missing:
            notes = self._agent.get_new_notifs().get(SOURCE, ())
            missing.difference_update(notes)
            if not notes:
                sleep(0)


def _module() -> Any:
    reasons = []
    for name in MODULES:
        try:
            return importlib.import_module(name)
        except ImportError as error:
            reasons.append(str(error))
    raise NotHere(f"nixl can't be imported: {reasons[0]}")
