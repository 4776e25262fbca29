import asyncio
import threading
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvmesh.rpc.channels import dial
from kvmesh.rpc.health import Health
from kvmesh.telemetry import metrics
from kvmesh.telemetry.page import MetricsPage

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


# What the page of metrics says, which a thread of its own serves.


def shown(name: str) -> float | None:
    return metrics.page_of("prefill").get_sample_value(name)


async def test_the_page_says_what_the_probes_are_told() -> None:
    age: list[float | None] = [None]
    async with health() as (own, stub):
        assert (shown("kvmesh_ready"), shown("kvmesh_live")) == (0, 1)
        own.set_ready(True)
        own.watch_progress("the worker", lambda: age[0], limit_seconds=1.0)
        watch = stub.Watch(health_pb2.HealthCheckRequest(service="liveness"))
        assert await following(watch) == SERVING
        assert (shown("kvmesh_ready"), shown("kvmesh_live")) == (1, 1)
        age[0] = 2.0
        assert await following(watch) == NOT_SERVING
        assert (shown("kvmesh_ready"), shown("kvmesh_live")) == (1, 0)
        watch.cancel()


async def test_a_loop_that_stands_still_shows_on_the_page_while_it_does() -> None:
    """Read by a thread, for which the loop waits: late by the watchdog's time it is neither ready nor alive."""
    async with health() as (own, stub), MetricsPage("prefill", "127.0.0.1", 0) as page:
        own.set_ready(True)
        watch = stub.Watch(health_pb2.HealthCheckRequest(service=""))
        while await following(watch) != SERVING:
            pass
        seen: dict[str, float] = {}

        def read_until(live: float) -> None:
            while not seen.get("kvmesh_live") == seen.get("kvmesh_ready") == live:  # a page reads one after the other
                with urllib.request.urlopen(f"http://127.0.0.1:{page.address[1]}/metrics", timeout=5) as answer:
                    lines = [line.rpartition(" ") for line in answer.read().decode().splitlines()]
                seen.update({name: float(value) for name, _, value in lines if name.startswith("kvmesh_")})

        thread = threading.Thread(target=read_until, args=(0,))
        thread.start()
        thread.join(20)  # the loop stands still meanwhile
        assert not thread.is_alive()
        assert seen["kvmesh_loop_lag_seconds"] > WATCHDOG_SECONDS
        await asyncio.to_thread(read_until, 1)
        watch.cancel()
