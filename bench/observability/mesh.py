"""A mesh whose processes can be turned on and off while they run, and asked what they recorded. Used by the pairs."""

import asyncio
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Self

from bench.observability.pages import Page, own_series, read
from kvmesh.cli.mesh import LocalMesh
from kvmesh.cli.processes import Announcement, ChildSpec
from kvmesh.cli.shape import Shape
from kvmesh.cli.watch import until_ready
from kvmesh.rpc.channels import dial
from kvmesh.rpc.tasks import race
from kvmesh.v1.trace_pb2 import ListSpansRequest
from kvmesh.v1.trace_pb2_grpc import TraceServiceStub

ANSWER_SECONDS = 10.0
"""What a process gets to answer in when it is turned, or asked for its spans."""

_Control = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class SwitchedMesh:
    """A mesh while it is entered; it starts turned on."""

    def __init__(self, shape: Shape, directory: Path) -> None:
        """Args:
        directory: for the registry's state, logs and sockets; its name must be short enough for a socket's.
        """
        self._directory = directory
        self._local = LocalMesh(shape, directory, placed=self._switched)
        self._controls: list[_Control] = []

    async def __aenter__(self) -> Self:
        """Starts everything and waits until the gateway can serve."""
        await self._local.__aenter__()
        try:
            await race(self._local.watch(), self._ready())
        except BaseException:
            await self._local.kill()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for _, writer in self._controls:
            writer.close()
        await self._local.stop()

    async def _ready(self) -> None:
        await self._local.serving()
        await until_ready(self._local.health("gateway"))
        for name in self._local.children:
            self._controls.append(await asyncio.open_unix_connection(self._control(name)))

    def _control(self, name: str) -> str:
        return str(self._directory / f"{name.replace(' ', '-')}.sock")

    def _switched(self, spec: ChildSpec) -> ChildSpec:
        flags = (self._control(spec.name), spec.module, *spec.flags)
        return replace(spec, module="bench.observability.process", flags=flags)

    @property
    def gateway(self) -> str:
        """The gateway's address."""
        return self._local.gateway

    @property
    def metrics_addresses(self) -> list[str]:
        """Of every page."""
        return [where.metrics for where in self._where.values()]

    @property
    def _where(self) -> dict[str, Announcement]:
        return {name: child.where for name, child in self._local.children.items() if child.where is not None}

    def service(self, name: str) -> str:
        """What a process is, e.g. "prefill"."""
        return self._where[name].service

    async def turn(self, *, on: bool) -> None:
        """Turns every process; returns once all have."""
        line = b"on\n" if on else b"off\n"
        async with asyncio.timeout(ANSWER_SECONDS):
            for reader, writer in self._controls:
                writer.write(line)
                if await reader.readline() != line:
                    raise RuntimeError("a process did not turn; its log says why")

    async def pages(self) -> dict[str, Page]:
        """What each process's page says of the mesh now, by the process's name."""
        return {name: own_series((await read(where.metrics, {})).decode()) for name, where in self._where.items()}

    async def spans(self, trace_id: bytes) -> dict[str, Counter[str]]:
        """How many spans of each name each process kept of a trace."""
        found: dict[str, Counter[str]] = {}
        for name, where in self._where.items():
            async with dial(where.address) as channel:
                asked = ListSpansRequest(trace_ids=[trace_id])
                answer = await TraceServiceStub(channel).ListSpans(asked, timeout=ANSWER_SECONDS)
            found[name] = Counter(span.name for span in answer.spans)
        return found
