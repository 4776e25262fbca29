"""Does KV that arrives slow a decoder's steps? `python -m bench.decode_beside_kv --json`

The decoder's two threads on a real model, one compute thread, no mesh: some rooms decode, and frames of other rooms' KV arrive
at a link's rate. Three ways take turns: no frame arrives (`alone`); the copier writes them, as the product does (`copier`); the
decode thread writes them between two steps (`worker`), as a decoder without a copier would. What counts is the time between a
room's tokens. With two cores or more: copier and worker need one each.
"""

import argparse
import asyncio
import json
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from itertools import count, cycle, pairwise
from pathlib import Path
from time import monotonic, sleep
from typing import Literal

import torch

from bench.first_token import spread
from kvmesh.kv.frames import HEADER_BYTES, FrameHeader, FrameKind, seal
from kvmesh.kv.layout import plan_frames
from kvmesh.model.runner import Runner
from kvmesh.model.sampling import SamplingParams
from kvmesh.model.source import resolve
from kvmesh.protocol.coverage import ShardSpan
from kvmesh.protocol.ids import PageId, PairingNumber, Rank, RoomId
from kvmesh.rpc.allocator import keep_freed_megabytes
from kvmesh.v1 import prefill_pb2 as pb
from services.decode.copier import Copier
from services.decode.inbox import Inbox
from services.decode.records import (
    CloseRoom,
    FrameArrived,
    HandedOver,
    LetGo,
    OpenRoom,
    Received,
    Report,
    ThreadFailed,
    TokenDrawn,
)
from services.decode.threads import DecodeThreads
from services.decode.worker import DecodeWorker

CACHE_DIR = Path(os.environ.get("KVMESH_CACHE_DIR", "~/.cache/kvmesh")).expanduser()
PAGE_SIZE = 16
PAIRING, RANK = PairingNumber(1), Rank(0)
WINDOW_BYTES = 32 << 20
"""In flight at most, as a link's default window."""
WARM_UP_STEPS = 5
MOST_SECONDS = 300.0
"""Of one round: then something is broken."""
Way = Literal["alone", "copier", "worker"]
WAYS: tuple[Way, ...] = ("alone", "copier", "worker")
Arrival = OpenRoom | CloseRoom | FrameArrived


class OneThread:
    """A decoder without a copier: whoever decodes a step first writes what has arrived."""

    def __init__(self, runner: Runner, receive: Callable[[Report], None]) -> None:
        self._inbox: Inbox[Arrival | LetGo | HandedOver] = Inbox()
        self._receive = receive
        self._copier = Copier(runner.pool, runner.vocab_size, self._inbox.post, receive, self._inbox.moved)
        self._worker = DecodeWorker(runner, self._inbox.post, receive, self._inbox.moved)
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def post(self, record: Arrival) -> None:
        """Queues a record."""
        self._inbox.post(record)

    async def stop(self) -> None:
        """Lets the thread end after what it is doing."""
        self._inbox.stop()
        self._thread.join()

    def _run(self) -> None:
        try:
            self._inbox.serve(self._take, self._worker.turn)
        except Exception as error:
            self._receive(ThreadFailed(error))

    def _take(self, record: Arrival | LetGo | HandedOver) -> None:
        if isinstance(record, HandedOver):
            self._worker.take(record)
        else:
            self._copier.take(record)


class Round:
    """So many steps of one way."""

    def __init__(self, runner: Runner, prompt_len: int, num_rooms: int) -> None:
        """Args:
        num_rooms: that decode; one more receives.
        """
        self._runner, self._prompt_len, self._num_rooms = runner, prompt_len, num_rooms
        self._span = ShardSpan(0, runner.pool.shard.num_layers, 0, runner.pool.shard.num_heads)
        self._pages_of_room = runner.pool.num_pages // (num_rooms + 1)
        self._drawn_at: list[float] = []
        """When room 1 got its tokens."""
        self._posted, self._written = 0, 0
        """Bytes of KV; each is counted by one thread."""
        self._begun, self._enough = threading.Event(), threading.Event()
        self._failed: BaseException | None = None

    def run(self, way: Way, steps: int, bytes_per_second: float) -> tuple[list[float], float]:
        """Seconds between two tokens of a room, and bytes of KV that were written a second."""
        self._steps = WARM_UP_STEPS + steps
        threads: DecodeThreads | OneThread
        threads = (
            OneThread(self._runner, self._receive) if way == "worker" else DecodeThreads(self._runner, self._receive)
        )
        threads.start()
        for room in range(1, self._num_rooms + 1):
            threads.post(self._opened(room, max_output_len=self._steps + 2))
            for message in self._frames(room):
                self._posted += len(message) - HEADER_BYTES
                threads.post(self._arrived(message))
            token = seal(
                FrameHeader(FrameKind.FIRST_TOKEN, room=room, pairing=PAIRING),
                pb.FirstToken(token=1).SerializeToString(),
            )
            threads.post(self._arrived(token))
        self._begun.wait(MOST_SECONDS)
        began, before = monotonic(), self._written
        if way != "alone":
            self._flood(threads.post, bytes_per_second)
        self._enough.wait(MOST_SECONDS)
        took, written = monotonic() - began, self._written - before
        asyncio.run(threads.stop())
        if self._failed is not None or not self._enough.is_set():
            raise RuntimeError(f"{way}: the rooms did not decode") from self._failed
        return [b - a for a, b in pairwise(self._drawn_at[WARM_UP_STEPS : self._steps + 1])], written / took

    def _flood(self, post: Callable[[Arrival], None], bytes_per_second: float) -> None:
        """One room's KV, again and again, until there are enough steps."""
        room = self._num_rooms + 1
        frames = list(self._frames(room))
        began, posted = monotonic(), 0
        for message in self._again(room, frames, post):
            ahead = began + posted / bytes_per_second - monotonic()
            if self._enough.wait(max(0.0, ahead)):
                return
            while self._posted - self._written > WINDOW_BYTES and not self._enough.is_set():
                sleep(0.001)
                began = monotonic() - posted / bytes_per_second  # what was not sent in time is not made up for
            posted += len(message) - HEADER_BYTES
            self._posted += len(message) - HEADER_BYTES
            post(self._arrived(message))

    def _again(self, room: int, frames: Sequence[bytes], post: Callable[[Arrival], None]) -> Iterator[bytes]:
        for number, message in zip(count(), cycle(frames)):
            if number % len(frames) == 0:
                post(CloseRoom(RoomId(room)))
                post(self._opened(room, max_output_len=2))
            yield message

    def _arrived(self, message: bytes) -> FrameArrived:
        return FrameArrived(PAIRING, RANK, message, monotonic(), self._runner.pool.shard.dtype)

    def _opened(self, room: int, max_output_len: int) -> OpenRoom:
        begin = (room - 1) * self._pages_of_room
        return OpenRoom(
            room=RoomId(room),
            pairing=PAIRING,
            shards={RANK: (self._span,)},
            pages=tuple(PageId(page) for page in range(begin, begin + self._pages_of_room)),
            prompt_len=self._prompt_len,
            cached_len=0,
            output_index=0,
            max_output_len=max_output_len,
            sampling=SamplingParams(),
            stop_ids=frozenset(),
        )

    def _frames(self, room: int) -> Iterator[bytes]:
        pool = self._runner.pool
        pages = self._opened(room, 2).pages
        for piece in plan_frames(pool.shard, 0, self._prompt_len):
            yield pool.frame(pages, piece, room=room, pairing=PAIRING)

    def _receive(self, report: Report) -> None:
        """In the threads."""
        if isinstance(report, Received):
            self._written += report.num_bytes
        elif isinstance(report, TokenDrawn):
            if report.room == self._num_rooms:  # it was opened last: all decode
                self._begun.set()
            if report.room == 1:
                self._drawn_at.append(report.drawn_at)
            if len(self._drawn_at) > self._steps:
                self._enough.set()
        elif isinstance(report, ThreadFailed):
            self._failed = report.error
            self._begun.set()
            self._enough.set()


def report(gaps: dict[Way, list[float]], rates: dict[Way, float]) -> dict[str, object]:
    """The figures: seconds between two tokens of a room, their growth over `alone`, and the bytes of KV written a second."""
    spreads = {way: spread(gaps[way]) for way in WAYS}
    alone = spreads["alone"]
    return {
        "step_seconds": spreads,
        "growth_p50": {way: round(spreads[way]["p50"] / alone["p50"] - 1, 3) for way in WAYS[1:]},
        "growth_p99": {way: round(spreads[way]["p99"] / alone["p99"] - 1, 3) for way in WAYS[1:]},
        "kv_gbps": {way: round(rates[way] / 1e9, 3) for way in WAYS[1:]},
    }


def measure(runner: Runner, options: argparse.Namespace) -> dict[str, object]:
    """All ways, taking turns."""
    gaps: dict[Way, list[float]] = {way: [] for way in WAYS}
    rates: dict[Way, float] = dict.fromkeys(WAYS, 0.0)
    for _ in range(options.rounds):
        for way in WAYS:
            found, rate = Round(runner, options.prompt_len, options.rooms).run(way, options.steps, options.gbps * 1e9)
            gaps[way] += found
            rates[way] += rate / options.rounds
    return report(gaps, rates)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.decode_beside_kv", description=__doc__)
    add = parser.add_argument
    add("--json", action="store_true", help="print nothing but the JSON line")
    add("--model", default="smollm2", help="default %(default)s")
    add("--dtype", default="fp32", choices=("fp32", "bf16"), help="default %(default)s")
    add("--rooms", type=int, default=4, help="that decode; default %(default)s")
    add("--prompt-len", type=int, default=512, help="tokens of each room; default %(default)s")
    add("--steps", type=int, default=60, help="of a round; default %(default)s")
    add("--rounds", type=int, default=3, help="of each way; default %(default)s")
    add("--gbps", type=float, default=1.0, help="10^9 bytes of KV a second that arrive at most; default %(default)s")
    options = parser.parse_args(arguments)
    for name in ("rooms", "prompt_len", "steps", "rounds"):
        if getattr(options, name) < (2 if name == "steps" else 1):
            parser.error(f"--{name.replace('_', '-')}: at least {2 if name == 'steps' else 1}")
    if options.gbps <= 0:
        parser.error("--gbps: above 0")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures and prints."""
    options = _options(arguments)
    keep_freed_megabytes()
    torch.set_num_threads(1)
    files = resolve(options.model, CACHE_DIR)
    tokens = options.prompt_len + WARM_UP_STEPS + options.steps + 2
    runner = Runner.load(
        files,
        0,
        files.config.num_layers,
        dtype=options.dtype,
        device="cpu",
        num_pages=(options.rooms + 1) * -(-tokens // PAGE_SIZE),
        page_size=PAGE_SIZE,
    )
    runner.pool.slots.normal_()
    found = measure(runner, options)
    if not options.json:
        print(json.dumps(found, indent=2))
    print(json.dumps({**found, "model": options.model, "dtype": options.dtype, "rooms": options.rooms}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
