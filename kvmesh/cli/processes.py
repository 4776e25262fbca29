"""Services as child processes: started, awaited, named when they die, ended in order. Called by `mesh.py` and by tests.

A child has a session of its own, so that a Ctrl-C reaches only the parent, which ends its children in its order. It
announces itself with one line on stdout; its log is a file. It dies with the parent, however that ends.
"""

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections import deque
from dataclasses import dataclass
from pathlib import Path

_PATIENCE_SECONDS = 5.0
"""Beyond the time a service has to drain: then it is killed."""


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """What to start."""

    name: str
    """For people, e.g. "p0 rank 1"."""
    module: str
    flags: tuple[str, ...]
    within: tuple[str, ...] = ()
    """The command that starts it, if it is to run elsewhere, e.g. in a network namespace; it must become the service
    (exec), not fork it."""


@dataclass(frozen=True, slots=True)
class Announcement:
    """Where a service is: its one line on stdout."""

    service: str
    address: str
    health: str
    metrics: str


class ChildDied(Exception):
    """A child ended without being asked to."""

    def __init__(self, child: "Child", code: int) -> None:
        self.child, self.exit_code = child, code
        super().__init__(f"{child.spec.name} {how_ended(code)}")


class Child:
    """One life of one service."""

    def __init__(self, spec: ChildSpec, process: asyncio.subprocess.Process, log: Path) -> None:
        self.spec, self.log = spec, log
        self.stopping = False
        """Whether it was asked to end."""
        self._process = process
        self._reading = asyncio.Lock()
        self._announced: asyncio.Future[Announcement] = asyncio.get_running_loop().create_future()

    @classmethod
    async def start(cls, spec: ChildSpec, logs: Path) -> "Child":
        """Starts a service.

        Args:
            spec: what to start.
            logs: a directory; the child's log is appended to a file of its name there.
        """
        path = logs / f"{spec.name.replace(' ', '-')}.log"
        with path.open("ab") as log:
            process = await asyncio.create_subprocess_exec(
                *(*spec.within, sys.executable),
                *("-m", "kvmesh.cli.child", str(os.getpid()), spec.module, *spec.flags),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                start_new_session=True,
            )
        return cls(spec, process, path)

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """How it ended; negative for a signal, None while it lives."""
        return self._process.returncode

    @property
    def where(self) -> Announcement | None:
        """Where it is; None until it is announced."""
        return self._announced.result() if self._announced.done() else None

    async def announced(self) -> Announcement:
        """Waits until it is bound, its model loaded, and serves.

        Raises:
            ChildDied: it ended before that.
        """
        async with self._reading:
            if not self._announced.done():
                assert self._process.stdout is not None
                line = await self._process.stdout.readline()
                if not line:
                    raise ChildDied(self, await self._process.wait())
                self._announced.set_result(Announcement(**json.loads(line)))
        return self._announced.result()

    async def died(self) -> None:
        """Waits for an end that nobody asked for.

        Raises:
            ChildDied: always, in the end.
        """
        code = await self._process.wait()
        if not self.stopping:
            raise ChildDied(self, code)
        await asyncio.Event().wait()

    async def stop(self, drain_seconds: float) -> int:
        """Asks it to drain, and kills it when it takes too long; returns its exit code."""
        self.stopping = True
        self.signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(drain_seconds + _PATIENCE_SECONDS):
                return await self._process.wait()
        except TimeoutError:
            return await self.kill()

    async def kill(self) -> int:
        """Ends it at once."""
        self.stopping = True
        self.signal(signal.SIGKILL)
        return await self._process.wait()

    def signal(self, number: int) -> None:
        """Sends a signal, if it still lives."""
        if self.exit_code is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)

    def last_lines(self, count: int) -> list[str]:
        """The end of its log."""
        with self.log.open(errors="replace") as lines:
            return [line.rstrip("\n") for line in deque(lines, count)]


def how_ended(code: int) -> str:
    """An exit code for people."""
    if code < 0:
        return f"was ended by {signal.Signals(-code).name}"
    return f"ended with exit code {code}"
