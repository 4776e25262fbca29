"""The toy service as a process: what `kvmesh.rpc.life` does is seen from outside."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

ROOT = Path(__file__).parents[2]
TOY = Path(__file__).with_name("toy_service.py")


class ToyProcess:
    """The toy service as a process."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.address, self.health, self.metrics = "", "", ""

    async def announced(self) -> "ToyProcess":
        assert self.process.stdout is not None
        line = json.loads(await asyncio.wait_for(self.process.stdout.readline(), 20))
        assert line.keys() == {"service", "address", "health", "metrics"}
        self.address, self.health, self.metrics = line["address"], line["health"], line["metrics"]
        return self

    async def said(self, word: str) -> None:
        """Waits for a line on stderr that holds `word`."""
        assert self.process.stderr is not None
        async with asyncio.timeout(20):
            while word not in (line := (await self.process.stderr.readline()).decode()):
                assert line, f"ended without saying {word!r}"

    async def end(self) -> tuple[int, str]:
        """Waits for its end: exit code and the rest of stderr."""
        _, err = await asyncio.wait_for(self.process.communicate(), 50)
        assert self.process.returncode is not None
        return self.process.returncode, err.decode()

    def signal(self, number: int) -> None:
        self.process.send_signal(number)


@asynccontextmanager
async def toy(*flags: str, **environ: str) -> AsyncIterator[ToyProcess]:
    """Starts the toy service; nothing of it is left at the end."""
    async with python(str(TOY), *flags, **environ) as process:
        yield process


@asynccontextmanager
async def python(*arguments: str, **environ: str) -> AsyncIterator[ToyProcess]:
    """Runs Python in the repository's root; whatever is left of it at the end is killed."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("GRPC_", "KVMESH_"))}
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *arguments,
        cwd=ROOT,
        env={**inherited, "PYTHONPATH": str(ROOT), **environ},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        yield ToyProcess(process)
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGKILL)
            await process.communicate()
