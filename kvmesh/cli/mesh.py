"""A whole mesh as child processes of this one: started, watched, started again where asked, ended in order.

Called by `kvmesh up` and by the tests of the mesh. Knows which services a mesh has; what they say to each other it does not.
"""

import asyncio
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from time import monotonic
from types import TracebackType
from typing import Self

from kvmesh.cli.processes import Announcement, Child, ChildDied, ChildSpec
from kvmesh.cli.shape import Shape
from kvmesh.rpc.tasks import race

_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.5, 10.0
"""Before a dead child is started again; doubled with each death."""
_STEADY_SECONDS = 60.0
"""A child that lived so long begins anew with the first pause."""
_FINAL_CODES = (2, 3)
"""Exit codes of bad configuration and of a misfit: starting again changes nothing."""


class LocalMesh:
    """Children by name. Entering starts them all, leaving ends them all."""

    def __init__(
        self,
        shape: Shape,
        directory: Path,
        *,
        restarted: Callable[[Child, ChildDied], None] | None = None,
        placed: Callable[[ChildSpec], ChildSpec] = lambda spec: spec,
    ) -> None:
        """Args:
        shape: what to start.
        directory: for the registry's state and the children's logs; made when absent.
        restarted: given, a dead child is started again, and this is called; else its death ends the mesh.
        placed: says of each service where it runs: the spec with `within` and addresses; else all are beside this process.
        """
        self.shape = shape
        self.children: dict[str, Child] = {}
        self.logs = directory / "logs"
        self.exit_codes: dict[str, int] = {}
        """How each ended, after leaving."""
        self._announced: dict[str, asyncio.Event] = {}
        self._state_dir = directory / "registry"
        self._restarted = restarted
        self._placed = placed

    async def __aenter__(self) -> Self:
        """Starts the registry, then everything else at once.

        Raises:
            ChildDied: the registry did not start.
        """
        self.logs.mkdir(parents=True, exist_ok=True)
        self._state_dir.mkdir(parents=True, exist_ok=True)
        try:
            await (await self.start(self._placed(self.shape.bootstrap(self._state_dir)))).announced()
            others = [*self.shape.stages(self.registry), *self.shape.decoder_specs(self.registry)]
            for spec in [*others, self.shape.gateway(self.registry)]:
                await self.start(self._placed(spec))
        except BaseException:
            await self.kill()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    @property
    def registry(self) -> str:
        """The registry's address."""
        return self.address("bootstrap")

    @property
    def gateway(self) -> str:
        """The gateway's address."""
        return self.address("gateway")

    def health(self, name: str) -> str:
        """The health address of an announced child."""
        return self._where(name).health

    def address(self, name: str) -> str:
        """The address of an announced child."""
        return self._where(name).address

    def _where(self, name: str) -> Announcement:
        where = self.children[name].where
        assert where is not None, f"{name} is not announced yet"
        return where

    async def start(self, spec: ChildSpec) -> Child:
        """Starts a child, or the next life of one."""
        child = self.children[spec.name] = await Child.start(spec, self.logs)
        self._announced.setdefault(spec.name, asyncio.Event())
        return child

    async def start_again(self, child: Child) -> Child:
        """Starts the next life of a child that ended."""
        return await self.start(_where_it_was(child))

    async def serving(self) -> None:
        """Waits until every child has announced itself, in this life or a later one; `watch` must run beside it."""
        for announced in list(self._announced.values()):
            await announced.wait()

    async def watch(self) -> None:
        """Watches every child until cancelled.

        Raises:
            ChildDied: one ended, and it is not to be started again.
        """
        await race(*(self._watch(name) for name in list(self.children)))

    async def _watch(self, name: str) -> None:
        pause = _FIRST_PAUSE_SECONDS
        while True:
            began = monotonic()
            child = self.children[name]
            try:
                await child.announced()
                self._announced[name].set()
                await child.died()
            except ChildDied as died:
                if self._restarted is None or died.exit_code in _FINAL_CODES:
                    raise
                pause = _FIRST_PAUSE_SECONDS if monotonic() - began > _STEADY_SECONDS else pause
                await asyncio.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
                self._restarted(await self.start_again(child), died)

    async def stop(self) -> None:
        """Ends what takes requests first, and the registry last: each finishes what the next still owes it."""
        tiers = [["gateway"], [n for n in self.children if n.startswith("decoder")]]
        tiers += [[n for n in self.children if n.endswith(f"rank {rank}")] for rank in range(self.shape.pp)]
        for tier in [*tiers, ["bootstrap"]]:
            living = [self.children[name] for name in tier if name in self.children]
            codes = await asyncio.gather(*(child.stop(self.shape.drain_seconds) for child in living))
            self.exit_codes |= {c.spec.name: code for c, code in zip(living, codes, strict=True)}

    async def kill(self) -> None:
        """Ends every child at once."""
        await asyncio.gather(*(child.kill() for child in self.children.values()))

    def kill_now(self) -> None:
        """The same, without waiting for it: from a signal's callback, while `stop` waits."""
        for child in self.children.values():
            child.signal(signal.SIGKILL)


def _where_it_was(child: Child) -> ChildSpec:
    """The spec of a child's next life: what others know by its address alone comes back at that address."""
    spec = child.spec
    if "--listen" not in spec.flags or child.where is None:
        return spec
    place = spec.flags.index("--listen") + 1
    return replace(spec, flags=(*spec.flags[:place], child.where.address, *spec.flags[place + 1 :]))
