"""The applied log of a pipeline as each of its stages tells it: equal on all of them, or the protocol is broken."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from time import monotonic

from harness import Mesh

from kvmesh.rpc.channels import dial
from kvmesh.v1 import prefill_pb2 as pb
from kvmesh.v1.prefill_pb2_grpc import PrefillServiceStub

_CATCH_UP_SECONDS = 5.0
_LOOK_SECONDS = 0.1


@dataclass(slots=True)
class Ledger:
    """The digest at each step that any stage was seen at."""

    digests: dict[tuple[str, int, int], bytes] = field(default_factory=dict)
    """By pipeline, generation and number of steps."""
    compared: int = 0
    """How often a place was seen again, at any stage."""

    def enter(self, log: pb.DescribeLogResponse) -> None:
        """Asserts that what a stage tells is what was told of the same step before."""
        if log.generation == 0:
            return
        for steps, digest in ((log.num_applied, log.digest), (log.num_confirmed, log.confirmed_digest)):
            place = (log.pipeline, log.generation, steps)
            self.compared += place in self.digests
            assert self.digests.setdefault(place, digest) == digest, f"{place} diverged: {log}"


async def described(mesh: Mesh, pipeline: str) -> list[pb.DescribeLogResponse]:
    """What each stage says of its log, by rank."""
    return await asyncio.gather(*(_describe(mesh, f"{pipeline} rank {rank}") for rank in range(mesh.shape.pp)))


async def equal_logs(mesh: Mesh) -> dict[str, pb.DescribeLogResponse]:
    """Asserts that on an idle mesh every stage of a pipeline has applied the same log; rank 0's, by pipeline."""
    heads = {}
    for pipeline in _pipelines(mesh):
        deadline = monotonic() + _CATCH_UP_SECONDS
        logs = await described(mesh, pipeline)
        while len({(log.generation, log.num_applied, log.num_confirmed) for log in logs}) > 1:
            assert monotonic() < deadline, f"the stages of {pipeline} stand at different steps: {logs}"
            await asyncio.sleep(_LOOK_SECONDS)
            logs = await described(mesh, pipeline)
        assert len({digest for log in logs for digest in (log.digest, log.confirmed_digest)}) == 1, f"diverged: {logs}"
        assert logs[0].generation, f"{pipeline} has no generation: {logs}"
        assert not any(log.open_rooms or log.lag_steps for log in logs), f"{pipeline} is not idle: {logs}"
        heads[pipeline] = logs[0]
    return heads


@asynccontextmanager
async def followed_logs(mesh: Mesh) -> AsyncIterator[Ledger]:
    """Looks at every stage's log again and again until the block ends."""
    ledger = Ledger()

    async def follow() -> None:
        while True:
            for pipeline in _pipelines(mesh):
                for log in await described(mesh, pipeline):
                    ledger.enter(log)
            await asyncio.sleep(_LOOK_SECONDS)

    async with asyncio.TaskGroup() as group:
        following = group.create_task(follow())
        yield ledger
        following.cancel()


def _pipelines(mesh: Mesh) -> list[str]:
    return [f"p{number}" for number in range(mesh.shape.pipelines)]


async def _describe(mesh: Mesh, stage: str) -> pb.DescribeLogResponse:
    where = mesh.child(stage).where
    assert where is not None
    async with dial(where.address) as channel:
        return await PrefillServiceStub(channel).DescribeLog(pb.DescribeLogRequest(), timeout=5)
