"""A mesh whose links have TLS says the same as one without, and whoever listens on its links reads none of it."""

import asyncio
import re
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from harness import Mesh
from parity import Reference, answer, random_prompts
from test_up import ANYWHERE, FAST, kvmesh

from kvmesh.cli.processes import ChildSpec
from kvmesh.client import Client
from kvmesh.kv.frames import MAGIC
from tests.certificates import Authority
from tests.eavesdropper import Eavesdropper, eavesdropping

PP = 2
LENGTH = 12
STEPS_PATH = b"kvmesh.v1.PrefillService/Steps"


def free_port() -> int:
    with socket.socket() as probing:
        probing.bind(("127.0.0.1", 0))
        return int(probing.getsockname()[1])


@asynccontextmanager
async def overheard(
    model: Path, directory: Path, flags: tuple[str, ...]
) -> AsyncIterator[tuple[Mesh, list[Eavesdropper]]]:
    """A mesh with somebody between each stage and all who dial it."""
    async with AsyncExitStack() as stack:
        listens = {f"p0 rank {rank}": f"127.0.0.1:{free_port()}" for rank in range(PP)}
        between = {name: await stack.enter_async_context(eavesdropping(at)) for name, at in listens.items()}

        def placed(spec: ChildSpec) -> ChildSpec:
            if spec.name not in listens:
                return spec
            here = ("--listen", listens[spec.name], "--advertise", between[spec.name].address)
            return replace(spec, flags=(*spec.flags, *here))

        on_the_wire = ("--shared-mib", "0")
        shape = {"stage_flags": ["--step-tokens", "37", *flags], "decoder_flags": [*on_the_wire, *flags]}
        mesh = Mesh(model, directory, pp=PP, placed=placed, **shape)
        yield await stack.enter_async_context(mesh), list(between.values())


async def outputs_of(mesh: Mesh, prompts: list[list[int]]) -> list[list[int]]:
    """One after the other, so that two meshes compute the same batches."""
    async with Client(mesh.gateway) as client:
        return [await answer(client, prompt, LENGTH) for prompt in prompts]


def holding(between: list[Eavesdropper], text: bytes) -> int:
    """How many directions of connections hold a text."""
    return sum(text in heard for one in between for heard in one.heard)


@pytest.mark.timeout(180)
async def test_tls_changes_no_token_and_hides_every_frame(tmp_path: Path, tiny_model_dir: Path) -> None:
    reference = Reference(tiny_model_dir)
    prompts = random_prompts([1, 37, 38, 200], reference.vocab_size)
    flags = Authority().files(tmp_path / "files").flags
    async with overheard(tiny_model_dir, tmp_path / "plain", ()) as (mesh, between):
        plain = await outputs_of(mesh, prompts)
        assert holding(between, MAGIC) == 2 * PP, "both ends of a link send frames"
        assert holding(between, STEPS_PATH) == PP - 1
    async with overheard(tiny_model_dir, tmp_path / "tls", flags) as (mesh, between):
        assert await outputs_of(mesh, prompts) == plain
        assert sum(len(heard) for one in between for heard in one.heard) > 200 * 1024, "KV passed here"
        assert holding(between, MAGIC) == 0
        assert holding(between, STEPS_PATH) == 0
    for prompt, output in zip(prompts, plain, strict=True):
        reference.check(prompt, output, LENGTH)


@pytest.mark.timeout(180)
async def test_one_command_runs_a_mesh_with_tls_and_what_it_shows_asks_it(tmp_path: Path, tiny_model_dir: Path) -> None:
    flags = Authority().files(tmp_path / "files", "stages.kvmesh").flags
    shape = ("--model", str(tiny_model_dir), "--pp", "2", *FAST, *ANYWHERE, "--state-dir", str(tmp_path / "state"))
    async with kvmesh("up", *shape, *flags, "--tls-name", "stages.kvmesh") as up:
        shown = (await up.said(r"kvmesh trace (.*) ROOM")).group(1).split()
        async with Client(shown[shown.index("--gateway") + 1]) as client:
            await answer(client, [1, 2, 3], 4)
        told = await traced(*shown)
        assert {"gateway", "bootstrap", "decode", "prefill"} <= set(re.findall(r"^(\w+)", told, re.MULTILINE)), told
        assert {"prefill p0/0", "prefill p0/1"} <= set(re.findall(r"^prefill p0/\d", told, re.MULTILINE))
        assert "no answer" not in told
        plain = await traced(*shown[: shown.index("--tls-cert")])
        assert re.search(r"no answer: \S+: unreachable: it closed the connection at once \(TLS at one end only", plain)
        up.process.send_signal(signal.SIGINT)
        assert await up.end() == 0, up.out


async def traced(*flags: str) -> str:
    """What `kvmesh trace` says of the first room, once its spans have ended."""
    async with asyncio.timeout(30):
        while True:
            async with kvmesh("trace", *flags, "1.1") as trace:
                if await trace.end() == 0:
                    return trace.out


async def test_one_command_with_a_bad_certificate_starts_nothing(tmp_path: Path, tiny_model_dir: Path) -> None:
    flags = Authority().files(tmp_path / "files", valid=(-9, -1)).flags
    async with kvmesh("up", "--model", str(tiny_model_dir), *flags) as up:
        assert await up.end() == 2
    assert up.out.startswith("tls_cert is ")
    assert len(up.out.splitlines()) == 1
