"""What the kernel's TCP gives to Python on this host: one connection, one thread a side, memory to memory, no pages."""

import asyncio
import socket
from typing import Any

import torch

from bench.kv_transfer.ends import End
from bench.kv_transfer.rooms import Turn
from kvmesh.kv.pool import PagePool


class SocketSource(End):
    """Sends all of its memory in pieces."""

    begins = True

    def __init__(self, pool: PagePool, piece_bytes: int) -> None:
        super().__init__(pool)
        self._piece_bytes = piece_bytes

    async def offer(self) -> Any:
        """Where it listens."""
        self._door = socket.create_server(("127.0.0.1", 0))
        return self._door.getsockname()

    async def meet(self, offered: Any) -> None:  # noqa: ARG002
        """The target has connected by now, or will in a moment."""
        self._stream, _ = await asyncio.to_thread(self._door.accept)
        self._door.close()

    async def carry(self, turn: Turn) -> None:
        """With sendmsg."""
        await asyncio.to_thread(self._send, _memory(self.pool)[: turn.num_bytes])

    def _send(self, memory: memoryview) -> None:
        for begin in range(0, len(memory), self._piece_bytes):
            piece = memory[begin : begin + self._piece_bytes]
            while piece:
                piece = piece[self._stream.sendmsg([piece]) :]


class SocketTarget(End):
    """Receives into its memory."""

    def __init__(self, pool: PagePool, piece_bytes: int) -> None:
        super().__init__(pool)
        self._piece_bytes = piece_bytes

    async def meet(self, offered: Any) -> None:
        """Connects."""
        self._stream = socket.create_connection(offered)

    async def carry(self, turn: Turn) -> None:
        """With recv_into."""
        await asyncio.to_thread(self._receive, _memory(self.pool)[: turn.num_bytes])

    def _receive(self, memory: memoryview) -> None:
        while memory:
            memory = memory[self._stream.recv_into(memory[: self._piece_bytes]) :]


def _memory(pool: PagePool) -> memoryview:
    return pool.slots.view(torch.uint8).view(-1).numpy().data
