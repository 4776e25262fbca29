import asyncio
import signal
import socket
import urllib.request
from time import monotonic
from typing import Any

import grpc
import pytest
from google.protobuf import descriptor_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from toy_process import ToyProcess, python, toy

from kvmesh.errors import Unavailable
from kvmesh.rpc.channels import dial
from kvmesh.rpc.status import peer_errors
from kvmesh.v1 import decode_pb2 as pb
from kvmesh.v1.decode_pb2_grpc import DecodeServiceStub


async def watch(process: ToyProcess, service: str, wanted: int) -> None:
    """Waits until the process says `wanted` of a health service."""
    async with dial(process.health) as channel, asyncio.timeout(20):
        async for answer in health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=service)):
            if answer.status == wanted:
                return


def page(address: str) -> str:
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as response:
        return str(response.read().decode())


async def test_a_signal_drains_the_service_and_the_process_ends_well() -> None:
    async with toy() as process:
        await process.announced()
        await watch(process, "readiness", health_pb2.HealthCheckResponse.SERVING)
        process.signal(signal.SIGTERM)
        code, err = await process.end()
    assert code == 0
    assert err.index("drains") < err.index("drained")


async def test_an_interrupt_drains_too() -> None:
    async with toy() as process:
        await process.announced()
        await watch(process, "", health_pb2.HealthCheckResponse.SERVING)
        process.signal(signal.SIGINT)
        assert (await process.end())[0] == 0


async def test_a_stream_still_open_after_the_drain_ends_unavailable() -> None:
    async with toy() as process:
        await process.announced()
        async with dial(process.address) as channel:
            stream = DecodeServiceStub(channel).GenerateRoom(pb.GenerateRoomRequest())
            await stream.read()
            process.signal(signal.SIGTERM)
            with pytest.raises(Unavailable), peer_errors("the toy"):
                while await asyncio.wait_for(stream.read(), 10):
                    pass
        assert (await process.end())[0] == 0


async def test_while_it_drains_it_is_not_ready_and_alive() -> None:
    async with toy("--toy", "slow", "--drain-seconds", "5") as process:
        await process.announced()
        await watch(process, "readiness", health_pb2.HealthCheckResponse.SERVING)
        process.signal(signal.SIGTERM)
        await watch(process, "readiness", health_pb2.HealthCheckResponse.NOT_SERVING)
        await watch(process, "liveness", health_pb2.HealthCheckResponse.SERVING)


async def test_a_drain_over_its_time_is_cancelled_and_told() -> None:
    async with toy("--toy", "slow", "--drain-seconds", "0.5") as process:
        await process.announced()
        await watch(process, "readiness", health_pb2.HealthCheckResponse.SERVING)
        began = monotonic()
        process.signal(signal.SIGTERM)
        code, err = await process.end()
    assert code == 1
    assert "not drained within 0.5 s" in err
    assert 0.5 <= monotonic() - began < 5


async def test_a_second_signal_ends_at_once() -> None:
    async with toy("--toy", "slow", "--drain-seconds", "600") as process:
        await process.announced()
        await watch(process, "readiness", health_pb2.HealthCheckResponse.SERVING)
        process.signal(signal.SIGTERM)
        await process.said("drains")
        process.signal(signal.SIGTERM)
        assert (await process.end())[0] == 128 + signal.SIGTERM


async def test_a_process_that_hangs_in_its_drain_is_ended_with_its_stack() -> None:
    async with toy("--toy", "hang", "--drain-seconds", "0.1") as process:
        await process.announced()
        await watch(process, "readiness", health_pb2.HealthCheckResponse.SERVING)
        process.signal(signal.SIGTERM)
        code, err = await process.end()
    assert code == 1
    assert "toy_service.py" in err


@pytest.mark.parametrize(
    ("toy_does", "code", "line"),
    [
        ("misfit", 3, "page_size is 16 here and 32 at rank 1"),
        ("bad_config", 2, "model is unusable: no weights"),
    ],
)
async def test_a_fault_of_the_deployment_is_one_line_and_its_own_exit_code(toy_does: str, code: int, line: str) -> None:
    async with toy("--toy", toy_does) as process:
        assert await process.end() == (code, line + "\n")


async def test_a_misfit_met_in_a_task_group_is_one_line_too() -> None:
    async with toy("--toy", "misfit_group") as process:
        code, err = await process.end()
    assert code == 3
    assert "dtype is fp32 here and bf16 at rank 1" in err.splitlines()
    assert "toy_service.py" not in err


async def test_a_failed_background_task_ends_the_process_with_its_traceback_in_one_line() -> None:
    """F-D10, F-D12"""
    async with toy("--toy", "group") as process:
        code, err = await process.end()
    assert code == 1
    [line] = [line for line in err.splitlines() if "critical" in line]
    assert "RuntimeError: the worker broke (tests/integration/toy_service.py" in line


async def test_a_service_may_end_its_process_with_a_code_of_its_own() -> None:
    async with toy("--toy", "stop") as process:
        code, err = await process.end()
    assert code == 4
    assert "drained" in err


@pytest.mark.parametrize("field", ["listen", "health_listen", "metrics_listen"])
@pytest.mark.parametrize(("family", "host"), [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")])
async def test_a_port_in_use_is_one_line_that_names_the_setting(field: str, family: int, host: str) -> None:
    with socket.socket(family) as taken:
        taken.bind((host, 0))
        taken.listen()
        address = f"[{host}]:{taken.getsockname()[1]}" if ":" in host else f"{host}:{taken.getsockname()[1]}"
        async with toy(f"--{field.replace('_', '-')}", address) as process:
            assert await process.end() == (2, f"{field} is {address}: Address already in use\n")


async def test_two_services_never_share_a_port() -> None:
    """F-N7"""
    async with toy() as first:
        await first.announced()
        async with toy("--listen", first.address) as second:
            code, err = await second.end()
    assert (code, err) == (2, f"listen is {first.address}: Address already in use\n")


SERVICES = [
    ("bootstrap", ["--state-dir", "/nonexistent"]),
    ("prefill", ["--bootstrap", "h:1", "--model", "/nonexistent"]),
    ("decode", ["--bootstrap", "h:1", "--model", "/nonexistent"]),
    ("gateway", ["--bootstrap", "h:1", "--model", "/nonexistent"]),
]


@pytest.mark.parametrize(("service", "flags"), SERVICES, ids=[s for s, _ in SERVICES])
async def test_each_service_says_only_one_line_when_its_port_is_taken(service: str, flags: list[str]) -> None:
    """F-N7"""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        async with python("-m", f"services.{service}", *flags, "--listen", address) as process:
            assert await process.end() == (2, f"listen is {address}: Address already in use\n")


BAD_SETTINGS = [
    "--watchdog-seconds=0",
    "--drain-seconds=-1",
    "--log-level=loud",
    "--listen=nowhere",
    "--advertise=[::]",
]


@pytest.mark.parametrize("flag", BAD_SETTINGS)
async def test_a_bad_setting_is_one_line_that_names_it(flag: str) -> None:
    async with toy(flag) as process:
        code, err = await process.end()
    assert code == 2
    [line] = err.splitlines()
    assert flag[2:].partition("=")[0].replace("-", "_") in line


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]"])
async def test_everything_is_served_over_either_family(host: str) -> None:
    flags = [f"--{name}={host}:0" for name in ("listen", "health-listen", "metrics-listen")]
    async with toy(*flags) as process:
        await process.announced()
        assert all(a.startswith(host + ":") for a in (process.address, process.health, process.metrics))
        await watch(process, "readiness", health_pb2.HealthCheckResponse.SERVING)
        assert "kvmesh_ready 1.0" in await asyncio.to_thread(page, process.metrics)
        async with dial(process.address) as channel:
            assert (await DecodeServiceStub(channel).GenerateRoom(pb.GenerateRoomRequest()).read()).index == 1


async def test_the_advertised_address_is_told_instead_of_the_bound_one() -> None:
    async with toy("--listen=[::]:0", KVMESH_ADVERTISE="fd00::7") as process:
        await process.announced()
        assert process.address.startswith("[fd00::7]:")


async def test_a_stuck_worker_is_no_longer_alive() -> None:
    """F-D10: health is about progress, not about a port that answers."""
    async with toy("--toy", "stuck", "--watchdog-seconds", "0.4") as process:
        await process.announced()
        await watch(process, "liveness", health_pb2.HealthCheckResponse.NOT_SERVING)
        assert "kvmesh_live 0.0" in await asyncio.to_thread(page, process.metrics)


async def test_reflection_lists_the_service_and_its_methods() -> None:
    async with toy() as process:
        await process.announced()
        async with dial(process.address) as channel:
            stub: Any = reflection_pb2_grpc.ServerReflectionStub(channel)
            asked = [
                reflection_pb2.ServerReflectionRequest(list_services=""),
                reflection_pb2.ServerReflectionRequest(file_containing_symbol="kvmesh.v1.DecodeService"),
            ]
            listed, described = [a async for a in stub.ServerReflectionInfo(iter(asked))]
    assert "kvmesh.v1.DecodeService" in [s.name for s in listed.list_services_response.service]
    file = descriptor_pb2.FileDescriptorProto.FromString(described.file_descriptor_response.file_descriptor_proto[0])
    assert [m.name for m in file.service[0].method] == ["GenerateRoom"]


async def test_help_lists_every_setting_and_exits_well() -> None:
    async with toy("--help") as process:
        out, _ = await asyncio.wait_for(process.process.communicate(), 20)
    assert process.process.returncode == 0
    assert all(word in out.decode() for word in ("--metrics-listen", "KVMESH_TOY", "drain_seconds".replace("_", "-")))


async def test_nothing_but_the_one_line_stands_on_stdout() -> None:
    async with toy() as process:
        await process.announced()
        await watch(process, "readiness", health_pb2.HealthCheckResponse.SERVING)
        process.signal(signal.SIGTERM)
        out, _ = await asyncio.wait_for(process.process.communicate(), 20)
    assert out == b""


async def test_a_call_after_the_end_is_refused() -> None:
    async with toy() as process:
        await process.announced()
        process.signal(signal.SIGTERM)
        await process.end()
        async with dial(process.address) as channel:
            with pytest.raises(grpc.aio.AioRpcError):
                await DecodeServiceStub(channel).GenerateRoom(pb.GenerateRoomRequest()).read()
        with pytest.raises(OSError):
            await asyncio.to_thread(page, process.metrics)
