"""Members whose registry has not been started: alive, not ready, and in time for it when it comes."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from grpc_health.v1 import health_pb2, health_pb2_grpc
from service_process import Running, service

from kvmesh.rpc.channels import dial

SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


def free_port() -> int:
    with socket.socket() as probing:
        probing.bind(("127.0.0.1", 0))
        return int(probing.getsockname()[1])


@asynccontextmanager
async def members(tmp_path: Path, model: Path, registry: str) -> AsyncIterator[dict[str, Running]]:
    """A pipeline of one stage and a decoder, started together."""
    flags = ("--bootstrap", registry, "--model", str(model), "--num-pages", "16", "--page-size", "4")
    async with AsyncExitStack() as stack:
        started = [
            stack.enter_async_context(service(name, tmp_path / f"{name}.log", *flags)) for name in ("prefill", "decode")
        ]
        prefill, decode = [await member for member in started]
        yield {"prefill": prefill, "decode": decode}


async def status_of(member: Running, name: str) -> int:
    async with dial(member.health) as channel:
        answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=name), timeout=5)
        return int(answer.status)


async def until_ready(member: Running) -> None:
    async with dial(member.health) as channel, asyncio.timeout(20):
        asked = health_pb2.HealthCheckRequest(service="readiness")
        async for answer in health_pb2_grpc.HealthStub(channel).Watch(asked):
            if answer.status == SERVING:
                return


async def test_without_a_registry_members_are_alive_and_not_ready_and_a_late_one_makes_them_ready(
    tmp_path: Path, tiny_model_dir: Path
) -> None:
    """F-N6, F-N1"""
    registry = f"127.0.0.1:{free_port()}"
    async with members(tmp_path, tiny_model_dir, registry) as both:
        for member in both.values():
            assert await status_of(member, "liveness") == SERVING
            assert await status_of(member, "readiness") == NOT_SERVING
        flags = ("--listen", registry, "--state-dir", str(tmp_path / "state"))
        async with service("bootstrap", tmp_path / "registry.log", *flags):
            for member in both.values():
                await until_ready(member)
