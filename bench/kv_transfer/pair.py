"""The two processes of a path, and a round of it. Called by `__main__`, which lets pairs take turns."""

import multiprocessing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.context import ForkServerContext, ForkServerProcess
from types import TracebackType
from typing import Any, Self

import numpy as np

from bench.kv_transfer.rooms import PAGE_BYTES, Room, Turn, drawn
from bench.kv_transfer.side import Failed, MakeEnd, Took, live

ANSWER_SECONDS = 60.0
"""What an end gets for one command: a round takes less than a second."""


class Missing(Exception):
    """What a path needs is not here."""


class Broken(Exception):
    """A path failed."""


class Damaged(Exception):
    """A path brought something else than it was given."""


@dataclass(frozen=True, slots=True)
class Path:
    """One way from pages to pages."""

    name: str
    source: MakeEnd
    target: MakeEnd
    is_peer: bool = False
    """Not kvmesh's: reported as null where it is missing or fails."""
    is_straight: bool = False
    """It knows no pages: each lies at the target where it lay at the source."""
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Run:
    """One round of one path."""

    num_bytes: int
    seconds: float
    cpu_seconds: float
    """Of both processes."""
    peak_bytes: int
    """The growth of both."""

    @property
    def gbps(self) -> float:
        """10^9 bytes of KV a second."""
        return self.num_bytes / self.seconds / 1e9


def context() -> ForkServerContext:
    """Processes come from one that has imported everything, so that a dozen of them start in a second."""
    made = multiprocessing.get_context("forkserver")
    made.set_forkserver_preload(["bench.kv_transfer.side", "bench.kv_transfer.paths"])
    return made


class Pair:
    """Both ends of a path, while it is entered."""

    def __init__(self, path: Path, room_pages: Sequence[int], processes: ForkServerContext) -> None:
        self.path, self._room_pages = path, room_pages
        num_pages = sum(room_pages)
        self._source = _Process(processes, path.source, num_pages, True, path.environment, f"{path.name} source")
        self._target = _Process(processes, path.target, num_pages, False, path.environment, f"{path.name} target")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Both end, whatever they do."""
        self._source.kill()
        self._target.kill()

    def connect(self) -> None:
        """Makes both ends, and connects them.

        Raises:
            Missing: what the path needs is not here.
            Broken: it fails.
        """
        of_source, of_target = self._both("offer")
        self._both("meet", (of_target,), (of_source,))

    def run(self, draw: np.random.Generator, *, checked: bool = True) -> Run:
        """A round, pages drawn anew.

        Raises:
            Broken: the path failed.
            Damaged: the target's pages do not hold what the source's do.
        """
        rooms = drawn(self._room_pages, draw)
        there = rooms if self.path.is_straight else drawn(self._room_pages, draw)
        self._both("begin", (Turn(rooms, there, checked),), (Turn(there, rooms, checked),))
        took: tuple[Took, Took] = self._both("carry")
        self._compare(rooms)
        return Run(
            num_bytes=sum(self._room_pages) * PAGE_BYTES,
            seconds=max(t.ended for t in took) - min(t.began for t in took if t.begins),
            cpu_seconds=sum(t.cpu_seconds for t in took),
            peak_bytes=sum(t.peak_bytes for t in took),
        )

    def _compare(self, rooms: Sequence[Room]) -> None:
        said, found = self._both("digests")
        wrong = [room.number for room, one, other in zip(rooms, said, found, strict=True) if one != other]
        if wrong:
            raise Damaged(f"{self.path.name}: the target's pages of rooms {wrong} are not what the source sent")

    def _both(self, name: str, for_source: tuple[Any, ...] = (), for_target: tuple[Any, ...] = ()) -> tuple[Any, Any]:
        """A command to both, the target first; their answers, the source's first."""
        self._target.ask(name, *for_target)
        self._source.ask(name, *for_source)
        return self._source.answer(), self._target.answer()


class _Process:
    """One side and the pipe to it."""

    def __init__(
        self,
        processes: ForkServerContext,
        make_end: MakeEnd,
        num_pages: int,
        is_source: bool,
        environment: Mapping[str, str],
        name: str,
    ) -> None:
        self._name = name
        self._door, theirs = processes.Pipe()
        arguments = (theirs, make_end, num_pages, is_source, environment)
        self._process: ForkServerProcess = processes.Process(target=live, args=arguments, name=name, daemon=True)
        self._process.start()
        theirs.close()

    def ask(self, name: str, *arguments: Any) -> None:
        """Sends a command."""
        try:
            self._door.send((name, *arguments))
        except OSError as error:
            raise Broken(f"{self._name} died") from error

    def answer(self) -> Any:
        """Waits for its answer."""
        if not self._door.poll(ANSWER_SECONDS):
            raise Broken(f"{self._name} did not answer within {ANSWER_SECONDS:g} s")
        try:
            answer = self._door.recv()
        except EOFError as error:
            raise Broken(f"{self._name} died") from error
        if isinstance(answer, Failed):
            raise (Missing if answer.is_missing else Broken)(f"{self._name}: {answer.message}")
        return answer

    def kill(self) -> None:
        """Ends it, whatever it does."""
        self._process.kill()
        self._process.join()
        self._door.close()
