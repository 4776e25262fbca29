"""Each process of a mesh in turn is killed, and stopped for twice the watchdog's time, in the middle of a load.

The victims of one model share one mesh: each leaves it whole, paired and idle for the next. After a failure the next victim
gets a new mesh.
"""

import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from applied_log import equal_logs
from faults import Fault, brought_back, generations, pipeline_of, struck
from harness import Mesh
from load import LoadOf
from parity import Reference

from kvmesh.model.source import resolve

CACHE = Path(os.environ.get("KVMESH_CACHE_DIR", "~/.cache/kvmesh")).expanduser()
STAGES = [f"p{pipeline} rank {rank}" for pipeline in range(2) for rank in range(3)]
VICTIMS = [*STAGES, "decoder 0", "decoder 1", "bootstrap", "gateway"]
IN_SLICE = {("p0 rank 1", Fault.KILL), ("decoder 1", Fault.STOP), ("p1 rank 0", Fault.STOP), ("bootstrap", Fault.KILL)}

pytestmark = [pytest.mark.deep, pytest.mark.timeout(180), pytest.mark.asyncio(loop_scope="module")]


class Field:
    """A mesh that serves test after test, and the load that fits its model."""

    def __init__(self, make: Callable[[Path], Mesh], directory: Path, weights: Path, load_of: LoadOf) -> None:
        """Args:
        make: a mesh for an empty directory.
        weights: the model's, for the reference.
        """
        self.reference = Reference(weights)
        self.load = load_of
        self._make, self._directory = make, directory
        self._mesh: Mesh | None = None
        self._made = 0

    @asynccontextmanager
    async def mesh(self) -> AsyncIterator[Mesh]:
        """The mesh; one that a test left by an error is ended and not used again."""
        if self._mesh is None:
            self._made += 1
            self._mesh = await self._make(self._directory / str(self._made)).__aenter__()
        try:
            yield self._mesh
        except BaseException as error:
            mesh, self._mesh = self._mesh, None
            await mesh.__aexit__(type(error), error, error.__traceback__)
            raise

    async def close(self) -> None:
        """Checks and ends it."""
        if self._mesh is not None:
            await self._mesh.__aexit__(None, None, None)


def mesh_of(model: Path | str, step_tokens: int) -> Callable[[Path], Mesh]:
    """Two pipelines of three stages, two decoders; steps so short that a prompt takes many."""
    flags = ["--step-tokens", str(step_tokens)]
    return lambda directory: Mesh(model, directory, pp=3, pipelines=2, decoders=2, cache_dir=CACHE, stage_flags=flags)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def tiny(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Field]:
    directory = tmp_path_factory.mktemp("tiny")
    field = Field(
        mesh_of(tiny_model_dir, 8), directory, tiny_model_dir, LoadOf(prompt_lens=(60, 300), output_lens=(20, 60))
    )
    yield field
    await field.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def real(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Field]:
    directory, weights = tmp_path_factory.mktemp("real"), resolve("smollm2", CACHE).directory
    field = Field(mesh_of("smollm2", 32), directory, weights, LoadOf(prompt_lens=(20, 80), output_lens=(4, 12)))
    yield field
    await field.close()


async def survives(field: Field, victim: str, fault: Fault) -> None:
    """One victim: what must hold while it is away, and afterwards."""
    async with field.mesh() as mesh:
        before = generations(await mesh.paired())
        async with field.load.on(mesh.gateway, field.reference, seed_of(victim, fault)) as during:
            await during.more(2)
            noticed = await struck(mesh, victim, fault)
            after = generations(await brought_back(mesh, victim, fault))
        async with field.load.on(mesh.gateway, field.reference, 0) as afterwards:
            await afterwards.more(6)
        await mesh.idle()
        logs = await equal_logs(mesh)
        print(f"{victim} {fault.value}: noticed after {noticed:.2f} s; {during.check(field.reference)}")
        afterwards.check(field.reference)
        assert not during.lost or victim == "gateway", f"requests were lost: {during.lost}"
        assert not afterwards.lost, f"requests were lost: {afterwards.lost}"
        ended = {name for name, generation in before.items() if after[name] != generation}
        assert ended == {pipeline_of(victim)} - {None}, "only what must end has ended"
        assert {name: log.generation for name, log in logs.items()} == after
        if victim == "bootstrap":
            assert all(answer.attempts == 1 for answer in during.answers), "the registry touches nothing that runs"


def seed_of(victim: str, fault: Fault) -> int:
    """Of its own for each."""
    return VICTIMS.index(victim) * len(Fault) + list(Fault).index(fault)


def marked(victim: str, fault: Fault) -> Any:
    marks = [pytest.mark.slice] if (victim, fault) in IN_SLICE else []
    return pytest.param(victim, fault, marks=marks, id=f"{victim}-{fault.name}".replace(" ", "-"))


@pytest.mark.parametrize(("victim", "fault"), [marked(victim, fault) for fault in Fault for victim in VICTIMS])
async def test_a_lost_process_costs_a_pause_and_no_token(tiny: Field, victim: str, fault: Fault) -> None:
    await survives(tiny, victim, fault)


@pytest.mark.timeout(400)
@pytest.mark.parametrize(("victim", "fault"), [marked("p1 rank 2", Fault.KILL), marked("p0 rank 1", Fault.STOP)])
async def test_so_it_does_with_the_real_model(real: Field, victim: str, fault: Fault) -> None:
    await survives(real, victim, fault)
