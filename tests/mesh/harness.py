"""A whole mesh of real processes for tests: any shape, waited for until paired, checked when it is left.

    async with Mesh(tiny_model_dir, tmp_path, pp=2, stage_flags=["--step-tokens", "24"]) as mesh:
        async with Client(mesh.gateway) as client: …

Leaving checks what must hold of every idle mesh: all pages free and no room open on every service that lives; each ends well
when asked; no process is left. A test that kills a service says so with `mesh.lost(name)`.
"""

import asyncio
import os
import signal
import urllib.request
from collections.abc import Callable, Sequence
from contextlib import aclosing
from pathlib import Path
from time import monotonic
from types import TracebackType
from typing import Any, Self

from kvmesh.cli.mesh import LocalMesh
from kvmesh.cli.processes import Child, ChildSpec
from kvmesh.cli.shape import Shape
from kvmesh.cli.watch import pictures, standing_pairs, until_ready
from kvmesh.rpc.tasks import race
from kvmesh.v1 import bootstrap_pb2 as pb

START_SECONDS = 90.0
IDLE_SECONDS = 15.0
_LOOK_SECONDS = 0.05
"""A metrics page can't tell of a change: it is read again."""

IDLE = {
    "prefill": {"kvmesh_rooms_open": 0, "kvmesh_rooms_waiting": 0, "kvmesh_steps_in_flight": 0},
    "decode": {"kvmesh_rooms_open": 0, "kvmesh_rooms_waiting": 0},
    "gateway": {"kvmesh_rooms_open": 0, "kvmesh_requests_open": 0},
    "bootstrap": {},
}


class Mesh:
    """A mesh while it is entered."""

    def __init__(
        self,
        model: Path | str,
        directory: Path,
        *,
        pp: int = 2,
        pipelines: int = 1,
        decoders: int = 1,
        dtype: str = "fp32",
        stage_threads: int = 1,
        decoder_threads: int = 1,
        cache_dir: Path | None = None,
        bootstrap_flags: Sequence[str] = (),
        stage_flags: Sequence[str] = (),
        decoder_flags: Sequence[str] = (),
        gateway_flags: Sequence[str] = (),
        placed: Callable[[ChildSpec], ChildSpec] = lambda spec: spec,
    ) -> None:
        """Args: see kvmesh.cli.shape.Shape; `directory` takes state and logs; for `placed` see LocalMesh."""
        self.shape = Shape(
            model=str(model),
            cache_dir=cache_dir or Path(os.environ.get("KVMESH_CACHE_DIR", "~/.cache/kvmesh")).expanduser(),
            pp=pp,
            pipelines=pipelines,
            decoders=decoders,
            dtype=dtype,
            stage_threads=stage_threads,
            decoder_threads=decoder_threads,
            bootstrap_flags=bootstrap_flags,
            stage_flags=stage_flags,
            decoder_flags=decoder_flags,
            gateway_flags=gateway_flags,
        )
        self._local = LocalMesh(self.shape, directory, placed=placed)
        self._lost: set[str] = set()

    async def __aenter__(self) -> Self:
        """Starts everything and waits until every pair stands and the gateway is ready."""
        await self._local.__aenter__()
        try:
            async with asyncio.timeout(START_SECONDS):
                await race(self._local.watch(), self._ready())
        except BaseException as error:
            await self._local.kill()
            error.add_note(self._ends_of_logs())
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                await self.idle()
        except BaseException as found:
            found.add_note(self._ends_of_logs())
            raise
        finally:
            if error is not None:
                error.add_note(self._ends_of_logs())
            pids = [child.pid for child in self._local.children.values()]
            await self._local.stop()
        assert not [pid for pid in pids if _lives(pid)], "processes are left"
        if error is None:
            ended_badly = {n: code for n, code in self._local.exit_codes.items() if code != 0 and n not in self._lost}
            assert not ended_badly, f"{ended_badly}\n{self._ends_of_logs()}"

    async def _ready(self) -> None:
        await self._local.serving()
        await self.paired()
        await until_ready(self._local.health("gateway"))

    # Where it is.

    @property
    def gateway(self) -> str:
        """The gateway's address."""
        return self._local.gateway

    @property
    def registry(self) -> str:
        """The registry's address."""
        return self._local.registry

    @property
    def names(self) -> list[str]:
        """All services, e.g. "bootstrap", "p0 rank 1", "decoder 0", "gateway"."""
        return list(self._local.children)

    def child(self, name: str) -> Child:
        """One service: its pid, log, addresses."""
        return self._local.children[name]

    async def metrics(self, name: str) -> dict[str, float]:
        """What a service's metrics page says, by name with labels."""
        where = self.child(name).where
        assert where is not None
        page = await asyncio.to_thread(_read, f"http://{where.metrics}/metrics")
        rows = [line.rpartition(" ") for line in page.splitlines() if line.startswith("kvmesh_")]
        return {key: float(value) for key, _, value in rows}

    # What happens to it.

    def signal(self, name: str, number: int) -> None:
        """Sends a service a signal; see `lost` for those that end it."""
        self.child(name).signal(number)

    def lost(self, name: str) -> None:
        """States that a service's end is what the test wants."""
        self._lost.add(name)

    async def killed(self, name: str) -> None:
        """Kills a service at once."""
        self.lost(name)
        self.child(name).signal(signal.SIGKILL)
        await self.child(name).kill()

    async def started_again(self, name: str) -> Child:
        """Starts the next life of a service that ended, at its address where others know it by that."""
        child = await self._local.start_again(self.child(name))
        self._lost.discard(name)
        await asyncio.wait_for(child.announced(), START_SECONDS)
        return child

    # What to wait for.

    async def paired(self) -> pb.WatchMeshResponse:
        """Waits until every pipeline is paired with every decoder; the picture."""
        return await self.pictured(lambda p: standing_pairs(p) >= self.shape.pipelines * self.shape.decoders)

    async def pictured(self, wanted: Any, timeout_seconds: float = START_SECONDS) -> pb.WatchMeshResponse:
        """Waits for a picture of the mesh for which `wanted` is true."""
        async with asyncio.timeout(timeout_seconds), aclosing(pictures(self.registry)) as followed:
            async for picture in followed:
                if wanted(picture):
                    return picture
        raise AssertionError("the watch has no end")

    async def idle(self) -> None:
        """Waits until every living service has all its pages free and no room open."""
        deadline = monotonic() + IDLE_SECONDS
        while busy := [line for name in self.names for line in await self._busy(name)]:
            assert monotonic() < deadline, f"not idle after {IDLE_SECONDS:g} s: {busy}"
            await asyncio.sleep(_LOOK_SECONDS)

    async def _busy(self, name: str) -> list[str]:
        child = self.child(name)
        if child.exit_code is not None or name in self._lost:
            return []
        page, service = await self.metrics(name), child.spec.module.rpartition(".")[2]
        busy = [f"{name}: {key} is {page[key]:g}" for key, value in IDLE[service].items() if page[key] != value]
        held = {key: num for key, num in page.items() if key.startswith("kvmesh_pages{") and num and "free" not in key}
        busy += [f"{name}: {key} is {num:g}" for key, num in held.items()]
        return busy

    def _ends_of_logs(self) -> str:
        return "\n".join(
            f"--- {name} (exit code {child.exit_code})\n" + "\n".join(child.last_lines(12))
            for name, child in self._local.children.items()
        )


_direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""No service is behind the environment's proxy."""


def _read(url: str) -> str:
    with _direct.open(url, timeout=5) as response:
        return str(response.read().decode())


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
