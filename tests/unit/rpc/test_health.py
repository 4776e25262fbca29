import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvmesh.rpc.channels import dial
from kvmesh.rpc.health import Health

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
WATCHDOG_SECONDS = 0.4


@asynccontextmanager
async def health() -> AsyncIterator[tuple[Health, Any]]:
    health = Health(WATCHDOG_SECONDS)
    port = health.bind("127.0.0.1:0")
    await health.start()
    async with asyncio.TaskGroup() as group, dial(f"127.0.0.1:{port}") as channel:
        running = group.create_task(health.run())
        yield health, health_pb2_grpc.HealthStub(channel)
        running.cancel()
        await health.stop()


async def check(stub: Any, service: str) -> int:
    return int((await stub.Check(health_pb2.HealthCheckRequest(service=service))).status)


async def following(watch: Any) -> int:
    return int((await asyncio.wait_for(watch.read(), 5)).status)


async def test_a_process_begins_alive_and_not_ready() -> None:
    async with health() as (_, stub):
        assert [await check(stub, s) for s in ("", "readiness", "liveness")] == [NOT_SERVING, NOT_SERVING, SERVING]


@pytest.mark.parametrize("service", ["", "readiness"])
async def test_a_watcher_sees_readiness_come_and_go(service: str) -> None:
    async with health() as (own, stub):
        watch = stub.Watch(health_pb2.HealthCheckRequest(service=service))
        assert await following(watch) == NOT_SERVING
        own.set_ready(True)
        assert await following(watch) == SERVING
        own.set_ready(False, "rank 1 was lost")
        assert await following(watch) == NOT_SERVING
        watch.cancel()


async def test_liveness_follows_own_progress_and_nothing_else() -> None:
    age: list[float | None] = [None]
    async with health() as (own, stub):
        own.watch_progress("the worker", lambda: age[0], limit_seconds=1.0)
        watch = stub.Watch(health_pb2.HealthCheckRequest(service="liveness"))
        assert await following(watch) == SERVING
        own.set_ready(False, "rank 1 was lost")
        age[0] = 0.9
        age[0] = 1.1
        assert await following(watch) == NOT_SERVING
        assert await check(stub, "readiness") == NOT_SERVING
        age[0] = None
        assert await following(watch) == SERVING
        watch.cancel()


async def test_one_stuck_progress_of_two_is_enough() -> None:
    async with health() as (own, stub):
        own.watch_progress("moves", lambda: 0.0, limit_seconds=1.0)
        own.watch_progress("is stuck", lambda: 9.0, limit_seconds=1.0)
        watch = stub.Watch(health_pb2.HealthCheckRequest(service="liveness"))
        while await following(watch) == SERVING:
            pass
        watch.cancel()


async def test_a_watcher_is_told_of_the_end() -> None:
    async with health() as (own, stub):
        own.set_ready(True)
        watch = stub.Watch(health_pb2.HealthCheckRequest(service=""))
        while await following(watch) != SERVING:
            pass
        await own.stop()
        assert await following(watch) == NOT_SERVING


async def test_a_service_nobody_knows_is_not_found() -> None:
    async with health() as (_, stub):
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await check(stub, "unknown")
    assert raised.value.code() is grpc.StatusCode.NOT_FOUND
