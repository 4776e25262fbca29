import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from kvmesh.cli.mesh import LocalMesh
from kvmesh.cli.processes import Child, ChildDied, ChildSpec
from kvmesh.cli.shape import Shape
from tests.waiting import process_end

ROOT = Path(__file__).parents[2]


def registry(directory: Path, *flags: str) -> ChildSpec:
    return ChildSpec("the registry", "services.bootstrap", ("--state-dir", str(directory / "state"), *flags))


@asynccontextmanager
async def started(spec: ChildSpec, directory: Path) -> AsyncIterator[Child]:
    child = await Child.start(spec, directory)
    try:
        yield child
    finally:
        await child.kill()


def alive(pid: int) -> bool:
    """Whether a process runs; one that ended and was not yet waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


async def test_a_child_announces_where_it_is_logs_to_its_file_and_ends_when_asked(tmp_path: Path) -> None:
    async with started(registry(tmp_path), tmp_path) as child:
        where = await child.announced()
        assert where.service == "bootstrap"
        assert await child.announced() == where
        assert await child.stop(5) == 0
    assert child.log == tmp_path / "the-registry.log"
    assert "serving on" in child.log.read_text()
    assert not alive(child.pid)


async def test_a_child_that_never_serves_is_named_with_its_exit_code_and_last_lines(tmp_path: Path) -> None:
    async with started(registry(tmp_path, "--lease-seconds", "zero"), tmp_path) as child:
        with pytest.raises(ChildDied, match="the registry ended with exit code 2"):
            await asyncio.wait_for(child.announced(), 20)
        assert child.last_lines(3) == ["--lease-seconds is 'zero'; a number is needed"]


async def test_a_child_that_is_killed_is_told_by_its_signal(tmp_path: Path) -> None:
    async with started(registry(tmp_path), tmp_path) as child:
        await child.announced()
        child.signal(signal.SIGKILL)
        with pytest.raises(ChildDied, match="the registry was ended by SIGKILL"):
            await asyncio.wait_for(child.died(), 10)


async def test_an_end_that_was_asked_for_is_no_death(tmp_path: Path) -> None:
    async with started(registry(tmp_path), tmp_path) as child, asyncio.TaskGroup() as group:
        await child.announced()
        watching = group.create_task(child.died())
        assert await child.stop(5) == 0
        assert not watching.done()
        watching.cancel()


async def test_a_frozen_child_is_killed_when_its_time_to_drain_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvmesh.cli.processes._PATIENCE_SECONDS", 0.2)
    async with started(registry(tmp_path), tmp_path) as child:
        await child.announced()
        child.signal(signal.SIGSTOP)
        assert await asyncio.wait_for(child.stop(0.1), 10) == -signal.SIGKILL


PARENT = """
import asyncio, sys
from pathlib import Path
from kvmesh.cli.processes import Child, ChildSpec
async def main():
    child = await Child.start(ChildSpec("r", "services.bootstrap", ("--state-dir", sys.argv[1])), Path(sys.argv[1]))
    await child.announced()
    print(child.pid, flush=True)
    await asyncio.Event().wait()
asyncio.run(main())
"""


@pytest.mark.parametrize("frozen", [False, True])
async def test_a_child_dies_with_a_parent_that_was_killed_even_when_it_is_frozen(tmp_path: Path, frozen: bool) -> None:
    parent = await asyncio.create_subprocess_exec(
        sys.executable, "-c", PARENT, str(tmp_path), cwd=ROOT, stdout=asyncio.subprocess.PIPE
    )
    assert parent.stdout is not None
    pid = int(await asyncio.wait_for(parent.stdout.readline(), 20))
    assert alive(pid)
    if frozen:
        os.kill(pid, signal.SIGSTOP)
    parent.kill()
    await parent.wait()
    await process_end(pid)
    assert not alive(pid)


async def test_a_mesh_whose_registry_does_not_start_leaves_no_process(tmp_path: Path) -> None:
    mesh = LocalMesh(Shape(model="/none", cache_dir=tmp_path, bootstrap_flags=["--lease-seconds", "0"]), tmp_path)
    with pytest.raises(ChildDied, match="bootstrap ended with exit code 2"):
        async with mesh:
            pass
    assert not any(alive(child.pid) for child in mesh.children.values())


async def test_a_member_that_can_not_start_ends_the_mesh_even_when_the_dead_are_to_be_started_again(
    tmp_path: Path,
) -> None:
    again: list[str] = []
    shape = Shape(model="/none", cache_dir=tmp_path, pp=1)
    mesh = LocalMesh(shape, tmp_path, restarted=lambda child, died: again.append(child.spec.name))
    with pytest.raises(ChildDied, match="exit code 2"):
        async with asyncio.timeout(40), mesh:
            await mesh.watch()
    assert again == []
    assert not any(alive(child.pid) for child in mesh.children.values())
