"""The process of one end: makes its pool and its end, then does what the parent asks, one command after another.

Started by `pair.py` over a pipe. A command is the name of a method below and its arguments; the answer is what it returns, or
`Failed`.
"""

import asyncio
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from time import perf_counter, process_time
from typing import Any

import torch
import uvloop

from bench.kv_transfer import content, usage
from bench.kv_transfer.ends import End, NotHere
from bench.kv_transfer.rooms import Room, Turn
from kvmesh.kv import frames
from kvmesh.kv.checksum import checksum
from kvmesh.kv.pool import PagePool
from kvmesh.rpc.allocator import keep_freed_megabytes

MakeEnd = Callable[[PagePool], End]


@dataclass(frozen=True, slots=True)
class Failed:
    """A command that failed."""

    message: str
    is_missing: bool
    """What the path needs is not here; else it is broken."""


@dataclass(frozen=True, slots=True)
class Took:
    """What one end's part of a round took."""

    begins: bool
    """Whether it is this end that began the round."""
    began: float
    ended: float
    """On the monotonic clock, which processes of one host share."""
    cpu_seconds: float
    peak_bytes: int
    """How far memory grew over what was resident when the end was made."""


class Side:
    """What the parent may ask."""

    def __init__(self, make_end: MakeEnd, num_pages: int, *, is_source: bool) -> None:
        self._make_end = make_end
        self._pool = content.make_pool(num_pages)
        if is_source:
            content.fill(self._pool)
        self._is_source = is_source
        content.digests(
            [Room(0, [0])], partial(content.slots_of_page, self._pool)
        )  # what that loads is no path's memory
        self._resident_bytes = usage.resident_bytes()

    async def offer(self) -> Any:
        """Makes the end."""
        self._end = self._make_end(self._pool)
        return await self._end.offer()

    async def meet(self, offered: Any) -> None:
        """Connects it."""
        await self._end.meet(offered)

    async def begin(self, turn: Turn) -> None:
        """Prepares a round."""
        if not self._is_source:
            content.wipe(self._pool)
        frames.__dict__["checksum"] = checksum if turn.checked else _no_checksum
        self._turn = turn
        await self._end.begin(turn)
        usage.forget_peak()

    async def carry(self) -> Took:
        """The round."""
        cpu, began = process_time(), perf_counter()
        await self._end.carry(self._turn)
        ended, cpu_seconds = perf_counter(), process_time() - cpu
        grown = usage.peak_bytes() - self._resident_bytes - self._end.bench_bytes
        return Took(self._end.begins, began, ended, cpu_seconds, max(0, grown))

    async def digests(self) -> list[str]:
        """What lies in the rooms' pages."""
        return content.digests(self._turn.rooms, self._end.page_of)


def live(door: Connection, make_end: MakeEnd, num_pages: int, is_source: bool, environment: Mapping[str, str]) -> None:
    """The whole life of the process.

    Args:
        environment: variables that the path's library reads.
    """
    os.dup2(sys.stderr.fileno(), 1)  # NIXL logs to stdout, which is the result's
    os.environ.update(environment)
    keep_freed_megabytes()
    torch.set_num_threads(1)
    uvloop.run(_obey(door, Side(make_end, num_pages, is_source=is_source)))


async def _obey(door: Connection, side: Side) -> None:
    """Until the process is killed: libraries' threads would hold an ordinary end up."""
    while True:
        name, *arguments = await asyncio.to_thread(door.recv)
        door.send(await _answer(side, name, arguments))


async def _answer(side: Side, name: str, arguments: list[Any]) -> Any:
    try:
        return await getattr(side, name)(*arguments)
    except NotHere as error:
        return Failed(str(error), is_missing=True)
    except (Exception, asyncio.CancelledError) as error:
        return Failed(f"{type(error).__name__}: {error}", is_missing=False)


_SMALL_BYTES = 4096
"""Credits are checked in every round: those of one still arrive when the next has begun."""


def _no_checksum(*parts: bytes | bytearray | memoryview) -> int:
    return checksum(*parts) if sum(map(len, parts)) < _SMALL_BYTES else 0
