"""How fast KV goes from one idle process to another: the product's frames, copies, checksums and streams, without a mesh.

`python -m bench.kv_overlap.link SHAPE` is the sending process. As in a stage, one thread copies frames out of pages and the
event loop writes them; as in a decoder, the loop reads and one thread verifies and writes into pages.
"""

import asyncio
import json
import sys
from collections import deque
from collections.abc import AsyncIterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from itertools import islice
from time import perf_counter
from typing import Any

import grpc
import torch

from kvmesh.kv.frames import open_frame
from kvmesh.kv.layout import DTypeName, Piece, Shard, plan_frames
from kvmesh.kv.pool import PagePool
from kvmesh.rpc import streams
from kvmesh.rpc.allocator import keep_freed_megabytes
from kvmesh.rpc.channels import dial, server_options
from kvmesh.rpc.raw import raw_stream_call, raw_stream_handler

SERVICE, METHOD = "kvmesh.bench.KvOverlap", "Room"
PAGE_SIZE = 16
COPIED_AHEAD = 32
"""Frames of about a megabyte: as many as a decoder's window lets be in flight."""


@dataclass(frozen=True)
class RoomShape:
    """A room's KV, and how a pipeline cuts it into frames."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: DTypeName
    pp: int
    prompt_len: int
    step_tokens: int

    def shard(self, rank: int) -> Shard:
        """What a stage sends."""
        begin, end = rank * self.num_layers // self.pp, (rank + 1) * self.num_layers // self.pp
        return Shard(begin, end, 0, self.num_kv_heads, self.head_dim, self.dtype)

    @property
    def num_bytes(self) -> int:
        """Of KV."""
        return self.prompt_len * sum(self.shard(rank).bytes_per_token for rank in range(self.pp))

    def frames(self) -> list[Piece]:
        """Step by step, as for a room that is alone."""
        begins = range(0, self.prompt_len, self.step_tokens)
        steps = [(begin, min(begin + self.step_tokens, self.prompt_len)) for begin in begins]
        return [p for step in steps for rank in range(self.pp) for p in plan_frames(self.shard(rank), *step)]

    def pool(self) -> PagePool:
        """Pages for the room, touched: else the kernel's first touch would be measured too."""
        num_pages = -(-self.prompt_len // PAGE_SIZE)
        pool = PagePool((0, self.num_layers), self.num_kv_heads, self.head_dim, PAGE_SIZE, num_pages, self.dtype)
        pool.slots.fill_(0.5)
        return pool


class Receiver:
    """The receiving end: asks the sending process for the room, again and again."""

    def __init__(self, channel: grpc.aio.Channel, shape: RoomShape, worker: ThreadPoolExecutor) -> None:
        self._call = raw_stream_call(channel, f"/{SERVICE}/{METHOD}")
        self._num_frames = len(shape.frames())
        self._pool, self._worker = shape.pool(), worker

    async def room(self) -> float:
        """Has the room sent; seconds from asking until all of it is verified and written."""
        began, writes = perf_counter(), list[Future[None]]()
        await streams.write(self._call, b"again")
        for _ in range(self._num_frames):
            message = await streams.read(self._call)
            assert message is not None, "the sending process left"
            writes.append(self._worker.submit(self._write, message))
        await asyncio.gather(*map(asyncio.wrap_future, writes))
        return perf_counter() - began

    def _write(self, message: bytes) -> None:
        header, payload = open_frame(message)
        self._pool.write(range(self._pool.num_pages), header, payload)


@asynccontextmanager
async def receiving(shape: RoomShape) -> AsyncIterator[Receiver]:
    """Starts the sending process; it ends with the block."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "bench.kv_overlap.link", json.dumps(asdict(shape))), stdout=asyncio.subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        port = int(await process.stdout.readline())
        async with dial(f"127.0.0.1:{port}") as channel:
            with ThreadPoolExecutor(1) as worker:
                yield Receiver(channel, shape, worker)
    finally:
        process.terminate()
        await process.wait()


class Sender:
    """Sends the room whenever it is asked."""

    def __init__(self, shape: RoomShape) -> None:
        self._frames, self._pool, self._worker = shape.frames(), shape.pool(), ThreadPoolExecutor(1)

    async def room(self, requests: AsyncIterator[bytes], context: Any) -> None:
        """The one method."""
        async for _ in requests:
            due = iter(self._frames)
            copies = deque(self._worker.submit(self._copy, piece) for piece in islice(due, COPIED_AHEAD))
            while copies:
                await context.write(await asyncio.wrap_future(copies.popleft()))
                copies.extend(self._worker.submit(self._copy, piece) for piece in islice(due, 1))

    def _copy(self, piece: Piece) -> bytes:
        return self._pool.frame(range(self._pool.num_pages), piece, room=1, pairing=1)


async def serve(shape: RoomShape) -> None:
    """Says its port on stdout, and sends until it is terminated."""
    server = grpc.aio.server(options=server_options(10.0))
    server.add_generic_rpc_handlers((raw_stream_handler(SERVICE, {METHOD: Sender(shape).room}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(port, flush=True)
    await server.wait_for_termination()


if __name__ == "__main__":
    keep_freed_megabytes()
    torch.set_num_threads(1)
    asyncio.run(serve(RoomShape(**json.loads(sys.argv[1]))))
