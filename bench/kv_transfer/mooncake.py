"""Mooncake's transfer engine over TCP: the source writes blocks into the target's memory, which registered all of it."""

import asyncio
import importlib
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from bench.kv_transfer.content import block_numbers, blocks_of_page
from bench.kv_transfer.ends import End, NotHere
from bench.kv_transfer.rooms import SHARD, Turn
from kvmesh.kv.pool import PagePool

HOST = "127.0.0.1"
BATCH_BLOCKS = 256
"""Of one call: 16 MiB, a room. A call with more blocks than its queue takes is refused whole."""
WAKE_TRIES, WAKE_SECONDS = 40, 0.25
"""After a pause it refuses what comes until its connections are made anew (kvcache-ai/Mooncake, issue 4209)."""


class _Mooncake(End):
    def __init__(self, pool: PagePool) -> None:
        super().__init__(pool)
        try:
            module = importlib.import_module("mooncake.engine")
        except ImportError as error:
            raise NotHere(f"mooncake can't be imported: {error}") from error
        self._engine = module.TransferEngine()
        self._begin = pool.slots.data_ptr()
        self._block_bytes = pool.slots.nbytes // (SHARD.num_layers * pool.num_pages)
        if self._engine.initialize(HOST, "P2PHANDSHAKE", "tcp", "") != 0:
            raise ConnectionError("Mooncake's engine did not start")
        if self._engine.register_memory(self._begin, pool.slots.nbytes) != 0:
            raise MemoryError("Mooncake did not take the pool's memory")

    def page_of(self, page: int) -> Tensor:
        """In blocks."""
        return blocks_of_page(self.pool, page)


class MooncakeSource(_Mooncake):
    """Writes all blocks of a room, then the next room's."""

    begins = True

    async def meet(self, offered: Any) -> None:
        """Knows the target."""
        self._target, self._target_begin = offered

    async def begin(self, turn: Turn) -> None:
        """Lists addresses, and wakes the connections with one block, which the round writes again."""
        blocks = [
            pair
            for here, there in zip(turn.rooms, turn.there, strict=True)
            for pair in zip(*(block_numbers(room, self.pool.num_pages) for room in (here, there)), strict=True)
        ]
        addresses = [
            (self._begin + here * self._block_bytes, self._target_begin + there * self._block_bytes)
            for here, there in blocks
        ]
        self._batches = [addresses[at : at + BATCH_BLOCKS] for at in range(0, len(addresses), BATCH_BLOCKS)]
        for _ in range(WAKE_TRIES):
            if self._write(addresses[:1]) == 0:
                return
            await asyncio.sleep(WAKE_SECONDS)
        raise ConnectionError("Mooncake does not reach its target")

    async def carry(self, turn: Turn) -> None:  # noqa: ARG002
        """A call returns once the target has it."""
        for batch in self._batches:
            if self._write(batch) != 0:
                raise ConnectionError("Mooncake refused a batch")

    def _write(self, addresses: Sequence[tuple[int, int]]) -> int:
        here, there = ([pair[side] for pair in addresses] for side in (0, 1))
        sizes = [self._block_bytes] * len(addresses)
        return int(self._engine.batch_transfer_sync_write(self._target, here, there, sizes))


class MooncakeTarget(_Mooncake):
    """Its engine's own threads receive."""

    async def offer(self) -> Any:
        """Where it is reached, and where its memory begins."""
        return f"{HOST}:{self._engine.get_rpc_port()}", self._begin

    async def carry(self, turn: Turn) -> None:
        """Nothing to do, and nothing that would tell it the end: that the source knows."""
