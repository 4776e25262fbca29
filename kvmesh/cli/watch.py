"""The live picture of the mesh, followed. Called by the commands and by tests; knows only the registry's WatchMesh."""

from collections.abc import AsyncGenerator

from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvmesh.cli.shown import shown
from kvmesh.errors import Unavailable
from kvmesh.rpc.channels import dial
from kvmesh.rpc.retry import reconnect_policy
from kvmesh.rpc.status import peer_errors
from kvmesh.v1 import bootstrap_pb2 as pb
from kvmesh.v1.bootstrap_pb2_grpc import BootstrapServiceStub


async def pictures(registry: str) -> AsyncGenerator[pb.WatchMeshResponse, None]:
    """One picture after the other, over restarts of the registry. Use with `aclosing`."""
    async with dial(registry) as channel:
        async for attempt in reconnect_policy():
            with attempt, peer_errors("the registry"):
                async for picture in BootstrapServiceStub(channel).WatchMesh(pb.WatchMeshRequest()):
                    yield shown(picture)
                raise Unavailable("the registry ended the watch")


async def picture_now(registry: str, timeout_seconds: float) -> pb.WatchMeshResponse:
    """The picture, once.

    Raises:
        KvmeshError: the registry gave none in time.
    """
    async with dial(registry) as channel:
        with peer_errors("the registry"):
            async for picture in BootstrapServiceStub(channel).WatchMesh(
                pb.WatchMeshRequest(), timeout=timeout_seconds
            ):
                return shown(picture)
    raise Unavailable("the registry gave no picture")


def standing_pairs(picture: pb.WatchMeshResponse) -> int:
    """How many pairs of a whole pipeline and a decoder stand."""
    whole = {p.generation for p in picture.pipelines if p.generation}
    return sum(g in whole for d in picture.decoders for g in d.load.paired_generations)


async def until_ready(health: str) -> None:
    """Waits until a service says that it can serve.

    Args:
        health: address of its health port.
    """
    async with dial(health) as channel:
        async for attempt in reconnect_policy():
            with attempt, peer_errors("the service"):
                asked = health_pb2.HealthCheckRequest(service="readiness")
                async for answer in health_pb2_grpc.HealthStub(channel).Watch(asked):
                    if answer.status == health_pb2.HealthCheckResponse.SERVING:
                        return
                raise Unavailable("the service ended the watch")
