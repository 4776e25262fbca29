"""`kvmesh size --prometheus` on a real Prometheus that reads a real mesh: what it takes is what the services count."""

import asyncio
import json
import sys
from pathlib import Path
from time import monotonic

import pytest
from monitoring_files import needs_prometheus
from monitoring_server import Prometheus, quickened

from kvmesh.cli.measured import Measured, measure
from kvmesh.client import Client
from tests.mesh.harness import Mesh

pytestmark = [needs_prometheus, pytest.mark.deep, pytest.mark.timeout(180)]

SPAN_SECONDS = 2.0
CLIENTS = 8
PROMPT_LEN, OUTPUT_LEN = 40, 200
"""Mostly decoding, so that as many rooms share a step as there are clients."""


async def test_load_and_rates_are_those_of_the_services(tiny_model_dir: Path, tmp_path: Path) -> None:
    async with Mesh(tiny_model_dir, tmp_path, pp=2) as mesh:
        async with Prometheus(quickened(tmp_path, pages(mesh)), tmp_path) as prometheus, Client(mesh.gateway) as client:
            began = monotonic()
            for clients in (1, CLIENTS):
                await asyncio.gather(*(ask(client, seconds=4 * SPAN_SECONDS) for _ in range(clients)))
            found = await looked(prometheus, monotonic() - began)
            answer = await typed(prometheus)
        # Steps of a model so small take what else runs on this host makes them take: then that is told.
        assert all(flag == "step" and "did not grow" in why for flag, why in found.missing.items())
        values = found.values
        assert values["prompt_tokens"] == pytest.approx(PROMPT_LEN)
        assert values["output_tokens"] == pytest.approx(OUTPUT_LEN)
        assert (values["pp"], values["prefill_pages"], values["num_pages"]) == (2, 1024, 2048)
        assert values["prefill_rate"] == pytest.approx(await slowest(mesh), rel=0.3)
        if "step" in values:
            (few, short), (many, long) = values["step"]
            assert few < 3 < many <= CLIENTS
            assert 0 < short < long
        assert 0 <= values["overhead"] < 1
        assert answer["rate"] > 0
        assert [flag.split()[0] for flag in answer["measured"]][:3] == ["--rate", "--prompt-tokens", "--output-tokens"]


def pages(mesh: Mesh) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name in mesh.names:
        child = mesh.child(name)
        assert child.where is not None
        found.setdefault(child.spec.module.rpartition(".")[2], []).append(child.where.metrics)
    return found


async def ask(client: Client, seconds: float) -> None:
    """One question after the other."""
    until = monotonic() + seconds
    while monotonic() < until:
        prompt = [(7 * i) % 256 for i in range(PROMPT_LEN)]
        async for _ in client.generate(
            tokens=prompt, max_output_tokens=OUTPUT_LEN, ignore_eos=True, timeout_seconds=60
        ):
            pass


def url(prometheus: Prometheus) -> str:
    return prometheus.base_url.removesuffix("/api/v1/")


async def looked(prometheus: Prometheus, seconds: float) -> Measured:
    return await asyncio.to_thread(
        measure, url(prometheus), "kvmesh", seconds, with_transfer=True, span_seconds=SPAN_SECONDS
    )


async def slowest(mesh: Mesh) -> float:
    """Tokens a second of the slower stage since it began."""
    stages = [await mesh.metrics(f"p0 rank {rank}") for rank in (0, 1)]
    return min(page["kvmesh_prefill_tokens_total"] / page["kvmesh_step_seconds_sum"] for page in stages)


async def typed(prometheus: Prometheus) -> dict:  # type: ignore[type-arg]
    """The command itself; steps are given, since its spans are longer than this test."""
    command = (
        "size",
        "--prometheus",
        url(prometheus),
        "--window",
        "1m",
        "--step",
        "1:0.01",
        "--step",
        "9:0.02",
        "--json",
    )
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "kvmesh.cli", *command, stdout=asyncio.subprocess.PIPE
    )
    out, _ = await process.communicate()
    assert process.returncode == 0
    return json.loads(out)
