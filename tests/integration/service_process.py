"""A real service as a process, seen from outside: its announcement, its end, what it said."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]


@dataclass
class Running:
    """A service that announced itself."""

    process: asyncio.subprocess.Process
    address: str
    health: str
    metrics: str
    log: Path

    async def ended(self, seconds: float = 20) -> int:
        """Waits for its end; the exit code."""
        return await asyncio.wait_for(self.process.wait(), seconds)

    async def terminate(self) -> int:
        """SIGTERM, and the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return await self.ended()


def start_in_background(name: str, log: Path, *flags: str) -> tuple[subprocess.Popen[str], dict[str, str]]:
    """Starts a service for a whole module of tests; the caller ends it."""
    with log.open("wb") as err:
        process = subprocess.Popen(
            [sys.executable, "-m", f"services.{name}", *flags],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=err,
            text=True,
        )
    assert process.stdout is not None
    line = process.stdout.readline()
    process.stdout.close()
    assert line, f"{name} ended at once: {log.read_text()}"
    return process, json.loads(line)


def end_in_background(process: subprocess.Popen[str]) -> int:
    """SIGTERM; the exit code. What does not end is killed, and that is a failure."""
    process.terminate()
    try:
        return process.wait(20)
    finally:
        process.kill()
        process.wait()


@asynccontextmanager
async def service(name: str, log: Path, *flags: str) -> AsyncIterator[Running]:
    """Starts `python -m services.NAME`; whatever is left of it at the end is killed."""
    with log.open("wb") as err:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            f"services.{name}",
            *flags,
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=asyncio.subprocess.PIPE,
            stderr=err,
        )
    try:
        assert process.stdout is not None
        line = await asyncio.wait_for(process.stdout.readline(), 60)
        assert line, f"{name} ended at once: {log.read_text()}"  # noqa: ASYNC240
        said = json.loads(line)
        yield Running(process, said["address"], said["health"], said["metrics"], log)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def refused(name: str, *flags: str) -> tuple[int, str]:
    """Starts a service that must not start: its exit code and all it said on stderr."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        f"services.{name}",
        *flags,
        cwd=ROOT,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        _, err = await asyncio.wait_for(process.communicate(), 60)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode is not None
    return process.returncode, err.decode()
