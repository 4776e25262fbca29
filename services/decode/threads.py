"""The two threads that share a decoder's pages, composed: the copier, which receives, and the worker, which decodes.

Called by the decoder (start, stop, how long one has not moved), its rooms and its links (post). A failure of either is reported
as ThreadFailed.
"""

import asyncio
import threading
from collections.abc import Callable, Mapping

import torch

from kvmesh.model.runner import Runner
from services.decode.copier import Copier
from services.decode.inbox import Inbox
from services.decode.records import (
    CloseRoom,
    FrameArrived,
    HandedOver,
    LetGo,
    OpenRoom,
    Receive,
    ThreadFailed,
)
from services.decode.worker import DecodeWorker


class DecodeThreads:
    """Copier and worker, each with one queue in."""

    def __init__(self, runner: Runner, receive: Receive) -> None:
        """Args:
        runner: the whole model and the decoder's pool; from here on only these threads touch it.
        receive: called in either thread with each report; hands it to the event loop.
        """
        self._receive = receive
        self._arrivals: Inbox[OpenRoom | CloseRoom | FrameArrived | LetGo] = Inbox()
        self._handed: Inbox[HandedOver | CloseRoom] = Inbox()
        self._copier = Copier(runner.pool, runner.vocab_size, self._handed.post, receive, self._arrivals.moved)
        self._worker = DecodeWorker(runner, self._arrivals.post, receive, self._handed.moved)
        self._copier_is_up = threading.Event()
        self._threads = [
            threading.Thread(target=self._copy, name="copier", daemon=True),
            threading.Thread(target=self._decode, args=(torch.get_num_threads(),), name="decode-worker", daemon=True),
        ]

    def start(self) -> None:
        """Starts the threads."""
        copier, worker = self._threads
        copier.start()
        self._copier_is_up.wait()  # its number of compute threads first: see _compute_with
        worker.start()

    async def stop(self) -> None:
        """Lets the worker end after the step it is in and the copier after its frame, and waits for both."""
        self._arrivals.stop()
        self._handed.stop()
        for thread in self._threads:
            await asyncio.to_thread(thread.join)

    def post(self, record: OpenRoom | CloseRoom | FrameArrived) -> None:
        """Queues a record; they are dealt with in the order posted."""
        self._arrivals.post(record)

    @property
    def ages(self) -> Mapping[str, Callable[[], float | None]]:
        """By thread: the time since it last moved; None when it owes nothing."""
        return {"worker": self._handed.age_seconds, "copier": self._arrivals.age_seconds}

    def age_seconds(self) -> float | None:
        """Of the thread that has not moved for longer; None when neither owes anything."""
        return max((age for seconds in self.ages.values() if (age := seconds()) is not None), default=None)

    @property
    def is_idle(self) -> bool:
        """Neither holds a room, nor a page."""
        return self._copier.is_idle and self._worker.is_idle

    def _copy(self) -> None:
        try:
            _compute_with(1)  # a copy spread over the worker's cores would wait for its steps
            self._copier_is_up.set()
            self._arrivals.serve(self._copier.take)
        except Exception as error:
            self._receive(ThreadFailed(error))
        finally:
            self._copier_is_up.set()

    def _decode(self, num_threads: int) -> None:
        try:
            _compute_with(num_threads)
            self._handed.serve(self._worker.take, self._worker.turn)
        except Exception as error:
            self._receive(ThreadFailed(error))


def _compute_with(num_threads: int) -> None:
    """How many threads torch uses for what this thread computes.

    A thread's number is settled when it first asks for it, by whatever any thread set last; so it asks at once.
    """
    torch.set_num_threads(num_threads)
    torch.get_num_threads()
