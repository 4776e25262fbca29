"""Faults by signal, one process at a time: where in the load it strikes, who must notice, and how the process comes back."""

import asyncio
import enum
import signal
from collections.abc import Awaitable, Callable, Sequence
from time import monotonic

from harness import Mesh

from kvmesh.cli.watch import until_ready
from kvmesh.v1 import bootstrap_pb2 as pb

WATCHDOG_SECONDS = 2.0
"""Of every service: the default."""
SLACK_SECONDS = 1.5
"""Beside the watchdog's time: this machine runs ten processes on two cores."""
_LOOK_SECONDS = 0.02
Page = dict[str, float]
"""Metrics of one service."""


class Fault(enum.Enum):
    """What happens to a process."""

    KILL = "killed"
    STOP = "stopped for twice the watchdog's time"


def pipeline_of(name: str) -> str | None:
    """The pipeline of a stage's name; None for another service."""
    return name.partition(" rank ")[0] if " rank " in name else None


def generations(picture: pb.WatchMeshResponse) -> dict[str, int]:
    """The generation of each pipeline."""
    return {p.pipeline: p.generation for p in picture.pipelines}


async def struck(mesh: Mesh, victim: str, fault: Fault) -> float:
    """Strikes a process while it works; returns after how many seconds those beside it have noticed.

    The loss of the registry stops nothing, so nothing shows it: 0.
    """
    noticed = await _notice(mesh, victim)
    await _until(lambda: _works(mesh, victim), 30.0, f"{victim} has work")
    began = monotonic()
    if fault is Fault.KILL:
        await mesh.killed(victim)
    else:
        mesh.signal(victim, signal.SIGSTOP)
    await _until(noticed, WATCHDOG_SECONDS + SLACK_SECONDS, f"the loss of {victim} is noticed")
    took = monotonic() - began
    if fault is Fault.STOP:
        await asyncio.sleep(max(0.0, 2 * WATCHDOG_SECONDS - took))
    return took


async def brought_back(mesh: Mesh, victim: str, fault: Fault) -> pb.WatchMeshResponse:
    """Starts or continues the process and waits until the mesh is whole, paired and ready; the picture."""
    if fault is Fault.KILL:
        await mesh.started_again(victim)
    else:
        mesh.signal(victim, signal.SIGCONT)
    picture = await mesh.paired()
    where = mesh.child("gateway").where
    assert where is not None
    await until_ready(where.health)
    return picture


async def _works(mesh: Mesh, victim: str) -> bool:
    """Whether a process is in the middle of something; the registry is while requests come."""
    page = await mesh.metrics("gateway" if victim == "bootstrap" else victim)
    return page["kvmesh_rooms_open"] > 0


async def _notice(mesh: Mesh, victim: str) -> Callable[[], Awaitable[bool]]:
    """A look whether those beside a process have noticed its loss, as compared with now."""
    pipeline = pipeline_of(victim)
    if pipeline is not None:  # the other stages of its pipeline have ended the generation
        beside = [n for n in mesh.names if pipeline_of(n) == pipeline and n != victim]
        before = {name: _generations_ended(page) for name, page in (await _pages(mesh, beside)).items()}
        return _look(mesh, beside, lambda name, page: _generations_ended(page) > before[name])
    if victim.startswith("decoder"):  # all stages have closed their links to it
        beside, links = [n for n in mesh.names if pipeline_of(n)], mesh.shape.decoders - 1
        return _look(mesh, beside, lambda _, page: page["kvmesh_links_open"] == links)
    if victim == "gateway":  # the decoders have ended its rooms
        beside = [n for n in mesh.names if n.startswith("decoder")]
        return _look(mesh, beside, lambda _, page: page["kvmesh_rooms_open"] == 0)
    return _look(mesh, [], lambda _, page: True)


def _look(mesh: Mesh, names: Sequence[str], fits: Callable[[str, Page], bool]) -> Callable[[], Awaitable[bool]]:
    async def look() -> bool:
        return all(fits(name, page) for name, page in (await _pages(mesh, names)).items())

    return look


async def _pages(mesh: Mesh, names: Sequence[str]) -> dict[str, Page]:
    return dict(zip(names, await asyncio.gather(*map(mesh.metrics, names)), strict=True))


def _generations_ended(page: Page) -> float:
    """For any reason."""
    return sum(value for key, value in page.items() if key.startswith("kvmesh_generations_ended_total"))


async def _until(true: Callable[[], Awaitable[bool]], seconds: float, what: str) -> None:
    """Looks until something is true: a metrics page can't tell of a change."""
    deadline = monotonic() + seconds
    while not await true():
        assert monotonic() < deadline, f"not within {seconds:g} s: {what}"
        await asyncio.sleep(_LOOK_SECONDS)
