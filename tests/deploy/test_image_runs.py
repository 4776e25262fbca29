"""The image, built for real and run as pods run it: read-only, as an ordinary user, a whole mesh of it that answers."""

import asyncio
import os
import tomllib
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from image_build import argument, built_image, why_not
from image_checks import MIB, compilers, leftovers, not_compiled, packaged_tests, sizes, unpinned
from image_container import Container, Image, mounts_below, processes_in
from manifests import ROOT, SERVICES

from kvmesh.cli.watch import until_ready
from kvmesh.client import Client, Piece
from kvmesh.rpc.tasks import race

MOST_MIB = 950
"""Of what the Dockerfile adds to its base with the CPU build of torch: torch 560, the model 94, all others 230."""
START_SECONDS, DRAIN_SECONDS = 120.0, 20.0
STATE, MODELS = "/var/lib/kvmesh", "/var/cache/kvmesh"
VARIABLES = {
    "KVMESH_MODEL": "smollm2",
    "KVMESH_PP_SIZE": "2",
    "KVMESH_THREADS": "1",
    "KVMESH_NUM_PAGES": "256",
    "KVMESH_DRAIN_SECONDS": f"{DRAIN_SECONDS:g}",
}
"""One environment for all services, as the pods have it."""

pytestmark = [pytest.mark.deep, pytest.mark.slice, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def image() -> Iterator[Image]:
    if reason := why_not():
        pytest.skip(reason)
    with built_image() as image:
        yield image
        assert processes_in(image.root) == []


@pytest.fixture
def volumes(image: Image, tmp_path: Path) -> dict[str, Path]:
    """What a pod may write to, beside /tmp: empty folders of the image's user."""
    folders = {STATE: tmp_path / "state", MODELS: tmp_path / "models"}
    for folder in folders.values():
        folder.mkdir()
        os.chown(folder, *image.user)
    return folders


# What it is.


def test_its_labels_say_what_it_is(image: Image) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    labels = {k.removeprefix("org.opencontainers.image."): v for k, v in image.config["Labels"].items()}
    assert labels["title"] == project["name"]
    assert labels["description"] == project["description"]
    assert labels["licenses"] == project["license"]
    assert labels["version"] == project["version"] == argument("VERSION")
    assert labels["revision"] == image.revision
    assert labels["base.name"].startswith("localhost/kvmesh-base:")


def test_it_is_small(image: Image) -> None:
    found = sizes(image.root)
    largest = sorted(found.items(), key=lambda item: -item[1])[:10]
    print("MiB: " + ", ".join(f"{name} {size / MIB:.0f}" for name, size in largest))
    assert found["added"] <= MOST_MIB * MIB


def test_every_distribution_in_it_is_at_the_version_of_the_constraints(image: Image) -> None:
    assert unpinned(image.root, (ROOT / "constraints.txt").read_text()) == []


def test_it_has_no_compiler(image: Image) -> None:
    assert compilers(image.root) == []


def test_nothing_of_the_build_is_left_in_it(image: Image) -> None:
    assert leftovers(image.root) == []


def test_it_has_no_tests(image: Image) -> None:
    assert packaged_tests(image.root) == []


def test_a_start_compiles_nothing(image: Image) -> None:
    assert not_compiled(image.root) == []


# What runs in it.


@pytest.mark.parametrize("service", SERVICES)
def test_a_service_tells_its_settings(image: Image, service: str) -> None:
    done = image.run("/bin/sh", "-ec", f"exec python -m services.{service} --help")
    assert (done.returncode, done.stderr) == (0, "")
    assert "--drain-seconds" in done.stdout


def test_its_own_command_is_the_command_line(image: Image) -> None:
    done = image.run(*image.config["Cmd"])
    assert (done.returncode, done.stderr) == (0, "")
    assert "kvmesh" in done.stdout


def test_it_runs_as_a_user_who_has_a_name(image: Image) -> None:
    done = image.run("id")
    assert done.stdout.strip() == "uid=10001(kvmesh) gid=10001(kvmesh) groups=10001(kvmesh)"


@pytest.mark.parametrize("path", ["/", "/opt/kvmesh", "/etc", STATE, MODELS])
def test_the_root_can_not_be_written(image: Image, path: str) -> None:
    done = image.run("touch", f"{path}/written")
    assert done.returncode != 0
    assert "Read-only file system" in done.stderr


@pytest.mark.parametrize("path", ["/tmp", "/dev/shm", STATE, MODELS])
def test_tmp_and_volumes_can_be_written(image: Image, volumes: dict[str, Path], path: str) -> None:
    done = image.run("touch", f"{path}/written", volumes=volumes)
    assert (done.returncode, done.stderr) == (0, "")


def test_without_a_volume_for_models_a_service_says_so(image: Image) -> None:
    done = image.run("python", "-m", "services.decode", "--model", "smollm2", "--bootstrap", "127.0.0.1:1")
    assert done.returncode == 2
    assert MODELS in done.stderr
    assert len(done.stderr.splitlines()) == 1


async def test_a_mesh_of_it_answers_and_every_service_drains(
    image: Image, volumes: dict[str, Path], tmp_path: Path
) -> None:
    logs = tmp_path / "logs"
    logs.mkdir()
    async with mesh(image, volumes, logs) as services:
        pieces = await answer(services["gateway"], "What is the capital of France?")
        print(repr("".join(piece.text for piece in pieces)))
        for name, service in services.items():
            assert unprivileged(image, service) == [], name
        assert set(processes_in(image.root)) == {service.service_pid for service in services.values()}
        codes = {name: await services[name].stop(DRAIN_SECONDS) for name in reversed(services)}
    assert "Paris" in "".join(piece.text for piece in pieces)
    assert codes == dict.fromkeys(services, 0)
    assert processes_in(image.root) == []
    assert mounts_below(image.root) == []


@asynccontextmanager
async def mesh(image: Image, volumes: dict[str, Path], logs: Path) -> AsyncIterator[dict[str, Container]]:
    """Registry, two stages, a decoder and a gateway, each ready; by name, in the order of their start."""
    services: dict[str, Container] = {}

    async def start(name: str, module: str, *flags: str) -> None:
        services[name] = await image.start(
            name, f"services.{module}", *flags, volumes=volumes, variables=VARIABLES, logs=logs
        )

    try:
        async with asyncio.timeout(START_SECONDS):
            await start("bootstrap", "bootstrap", "--state-dir", STATE)
            registry = (await services["bootstrap"].announced()).address
            for rank in (1, 0):
                await start(f"rank {rank}", "prefill", "--bootstrap", registry, "--rank", str(rank))
            for module in ("decode", "gateway"):
                await start(module, module, "--bootstrap", registry)
            await race(all_ready(services), *(service.died() for service in services.values()))
        yield services
    except BaseException as error:
        for name, service in services.items():
            error.add_note("\n".join([f"--- {name} (exit code {service.exit_code})", *service.last_lines(12)]))
        raise
    finally:
        for service in services.values():
            await service.kill()


async def all_ready(services: dict[str, Container]) -> None:
    async with asyncio.TaskGroup() as group:
        for service in services.values():
            group.create_task(ready(service))


async def ready(service: Container) -> None:
    await until_ready((await service.announced()).health)


async def answer(gateway: Container, question: str) -> list[Piece]:
    where = await gateway.announced()
    async with Client(where.address) as client:
        asked = client.generate(
            messages=[{"role": "user", "content": question}], max_output_tokens=16, timeout_seconds=60
        )
        return [piece async for piece in asked]


def unprivileged(image: Image, service: Container) -> list[str]:
    """What a service has that it should not have."""
    status, mounts = service.status(), service.mounts()
    user, group = image.user
    wanted = {"Uid": f"{user} {user} {user} {user}", "Gid": f"{group} {group} {group} {group}", "Groups": ""}
    wanted |= {"CapEff": "0" * 16, "CapBnd": "0" * 16, "NoNewPrivs": "1"}
    wrong = [f"{key} is {status[key]}" for key, value in wanted.items() if status[key] != value]
    if "ro" not in mounts["/"].split(","):
        wrong.append(f"the root is mounted {mounts['/']}")
    return wrong
