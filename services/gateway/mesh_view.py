"""What the gateway knows of the mesh: the limits that requests are checked against, and whether anything can serve.

Follows the registry's WatchMesh, again after each loss; the last picture stays until a newer one comes.
"""

from collections.abc import Callable

from kvmesh.errors import Unavailable
from kvmesh.rpc.channels import dial
from kvmesh.rpc.retry import reconnect_policy
from kvmesh.rpc.status import peer_errors
from kvmesh.v1 import bootstrap_pb2 as pb
from kvmesh.v1.bootstrap_pb2_grpc import BootstrapServiceStub


class MeshView:
    """The latest picture."""

    def __init__(self, address: str, watchdog_seconds: float, changed: Callable[[], None]) -> None:
        """Args:
        address: of the registry.
        changed: called after each picture.
        """
        self.limits = pb.MeshLimits()
        self.paired = False
        """Whether some whole pipeline and some decoder stand paired, neither draining."""
        self._address, self._watchdog_seconds, self._changed = address, watchdog_seconds, changed

    async def run(self) -> None:
        """Follows the registry until cancelled."""
        async with dial(self._address, watchdog_seconds=self._watchdog_seconds) as channel:
            async for attempt in reconnect_policy():
                with attempt, peer_errors("the registry"):
                    async for picture in BootstrapServiceStub(channel).WatchMesh(pb.WatchMeshRequest()):
                        self._take(picture)
                    raise Unavailable("the registry ended the watch")

    def _take(self, picture: pb.WatchMeshResponse) -> None:
        whole = {p.generation for p in picture.pipelines if p.generation and not any(s.load.draining for s in p.seats)}
        decoders = [d for d in picture.decoders if not d.load.draining]
        self.limits = picture.limits
        self.paired = any(g in whole for d in decoders for g in d.load.paired_generations)
        self._changed()
