"""What the gateway knows of the mesh: the limits that requests are checked against, and whether anything can serve.

Follows the registry's WatchMesh, again after each loss; the last picture stays until a newer one comes.
"""

from collections.abc import Awaitable, Callable, Sequence

import grpc

from kvmesh.errors import KvmeshError, Unavailable
from kvmesh.rpc.channels import dial
from kvmesh.rpc.retry import reconnect_policy
from kvmesh.rpc.status import peer_errors
from kvmesh.telemetry import logs
from kvmesh.v1 import bootstrap_pb2 as pb
from kvmesh.v1.bootstrap_pb2_grpc import BootstrapServiceStub
from kvmesh.v1.types_pb2 import Member

log = logs.get(__name__)


class MeshView:
    """The latest picture."""

    def __init__(
        self, address: str, watchdog_seconds: float, fingerprint: str, changed: Callable[[], Awaitable[None]]
    ) -> None:
        """Args:
        address: of the registry.
        fingerprint: of the model this gateway tokenizes for.
        changed: called after each picture.
        """
        self.limits = pb.MeshLimits()
        self.decoders: Sequence[Member] = ()
        self._paired = False
        self._trouble = logs.OnChange(log)
        self._address, self._watchdog_seconds = address, watchdog_seconds
        self._fingerprint, self._changed = fingerprint, changed

    async def run(self) -> None:
        """Follows the registry until cancelled."""
        async with dial(self._address, watchdog_seconds=self._watchdog_seconds) as channel:
            async for attempt in reconnect_policy():
                with attempt:
                    await self._follow(channel)

    async def _follow(self, channel: grpc.aio.Channel) -> None:
        try:
            with peer_errors("the registry"):
                async for picture in BootstrapServiceStub(channel).WatchMesh(pb.WatchMeshRequest()):
                    self._trouble.clear()
                    await self._take(picture)
                raise Unavailable("the registry ended the watch")
        except KvmeshError as error:
            self._trouble.info(f"no view of the mesh: {error.message}")
            raise

    @property
    def why_not_ready(self) -> str:
        """Why no request can be served now; empty when one can."""
        served = self.limits.model_fingerprint
        if served and served != self._fingerprint:
            return f"the mesh serves model {served[:12]}, this gateway tokenizes for {self._fingerprint[:12]}"
        return "" if self._paired else "no pipeline and decoder are paired"

    def check_model(self) -> None:
        """Raises:
        Unavailable: the mesh serves another model than this gateway tokenizes for.
        """
        served = self.limits.model_fingerprint
        if served and served != self._fingerprint:
            raise Unavailable(self.why_not_ready, reason="misfit")

    async def _take(self, picture: pb.WatchMeshResponse) -> None:
        whole = {p.generation for p in picture.pipelines if p.generation and not any(s.load.draining for s in p.seats)}
        taking = [d for d in picture.decoders if not d.load.draining]
        self.limits = picture.limits
        self.decoders = [d.member for d in picture.decoders]
        self._paired = any(g in whole for d in taking for g in d.load.paired_generations)
        await self._changed()
