"""Runs of the mesh in pairs, one with all that observes it on and one with it off, each with its proof.

Called by `__main__`. A run is a short stretch of the same long answers, so both of a pair have the same rooms in one batch.
"""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from time import monotonic

import grpc

from bench.observability.load import Arrivals, Load, pass_by
from bench.observability.mesh import SwitchedMesh
from bench.observability.pages import Page, Scraper
from bench.observability.proof import NotSwitched, Seen
from kvmesh.rpc.channels import dial
from kvmesh.rpc.tasks import race

RECORDED_SECONDS = 5.0
"""How long after a room's end the last of its spans may take to be kept."""
LOOK_SECONDS = 0.01


@dataclass(frozen=True, slots=True)
class Pair:
    """Decode tokens a second of two runs next to each other, of all answers together."""

    on: float
    off: float

    @property
    def ratio(self) -> float:
        """Above 1 where what was on cost something."""
        return self.off / self.on


class Pairs:
    """Measures pairs on one mesh, by one connection."""

    def __init__(self, mesh: SwitchedMesh, load: Load, scraper: Scraper, run_tokens: int) -> None:
        """Args:
        run_tokens: of each answer in a run.
        """
        self._mesh, self._load, self._scraper = mesh, load, scraper
        self._run_tokens = run_tokens
        self._num_runs = 0

    async def measure(self, wanted: Callable[[int], bool]) -> list[Pair]:
        """Pairs, by turns with what is on first and with it second, after one that warms up.

        Args:
            wanted: whether one more is, after so many.

        Raises:
            NotSwitched: a figure would not be what it says.
        """
        pairs: list[Pair] = []
        async with dial(self._mesh.gateway) as channel, self._load.streaming(channel) as arrivals:
            await self._pair(channel, arrivals, on_first=True)
            while wanted(len(pairs)):
                pairs.append(await self._pair(channel, arrivals, on_first=len(pairs) % 2 == 0))
        return pairs

    async def _pair(self, channel: grpc.aio.Channel, arrivals: Arrivals, *, on_first: bool) -> Pair:
        order = (True, False) if on_first else (False, True)
        rates = {on: await self._run(channel, arrivals, on=on) for on in order}
        return Pair(on=rates[True], off=rates[False])

    async def _run(self, channel: grpc.aio.Channel, arrivals: Arrivals, *, on: bool) -> float:
        """Tokens a second, from one arrival to another."""
        self._num_runs += 1  # each run is a trace of its own
        trace_id = self._num_runs.to_bytes(16, "big")
        await self._mesh.turn(on=on)
        before = await self._mesh.pages()
        first = last = await arrivals.reach(arrivals.latest.num_tokens + 1)

        async def measured() -> None:
            nonlocal last
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(pass_by(channel, f"00-{trace_id.hex()}-{1:016x}-01"))
                last = await arrivals.reach(first.num_tokens + self._run_tokens * self._load.num_answers)

        await race(measured(), *([self._scraper.run()] if on else []))
        await (self._recorded(before, trace_id) if on else self._recorded_nothing(before, trace_id))
        return (last.num_tokens - first.num_tokens) / (last.at - first.at)

    async def _recorded(self, before: Mapping[str, Page], trace_id: bytes) -> None:
        """Waits until all is recorded: from then on the room that passed by has nothing left to do anywhere."""
        deadline = monotonic() + RECORDED_SECONDS
        while missing := [what for seen in await self._seen(before, trace_id) for what in seen.missing()]:
            if monotonic() > deadline:
                raise NotSwitched(f"on, and not recorded: {', '.join(missing)}")
            await asyncio.sleep(LOOK_SECONDS)

    async def _recorded_nothing(self, before: Mapping[str, Page], trace_id: bytes) -> None:
        if recorded := [what for seen in await self._seen(before, trace_id) for what in seen.recorded()]:
            raise NotSwitched(f"off, and recorded: {', '.join(recorded)}")

    async def _seen(self, before: Mapping[str, Page], trace_id: bytes) -> list[Seen]:
        """What each process shows of a run now."""
        after, spans = await self._mesh.pages(), await self._mesh.spans(trace_id)
        return [Seen(name, self._mesh.service(name), page, after[name], spans[name]) for name, page in before.items()]
