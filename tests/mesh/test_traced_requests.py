"""Where a request's time went, from the services' own rings and at a collector: one span for each stop of the walk."""

import asyncio
import sys
from collections import Counter
from pathlib import Path
from time import monotonic

import pytest
from harness import Mesh
from parity import random_prompts

from kvmesh.cli.spans import collect, members, rows
from kvmesh.client import Client, End
from kvmesh.protocol.ids import short
from kvmesh.rpc.channels import dial
from kvmesh.rpc.life import SPARE_SECONDS
from kvmesh.v1 import inference_pb2
from kvmesh.v1.inference_pb2_grpc import InferenceServiceStub
from tests.played_collector import SECONDS, collector, silent_collector

STOPS = {
    "gateway": ["answer", "assign", "check", "request", "room"],
    "bootstrap": ["assign room"],
    "decode": ["decode", "receive", "reserve", "room at decoder"],
    "prefill p0/0": ["prefill", "queue", "send"],
    "prefill p0/1": ["prefill", "send"],
}
TRACE = "0af7651916cd43dd8448eb211c80319c"


async def ended(client: Client, tokens: list[int], output_len: int = 8) -> End:
    async for piece in client.generate(tokens=tokens, max_output_tokens=output_len, ignore_eos=True):
        if piece.end is not None:
            return piece.end
    raise AssertionError("no end")


async def kvmesh_trace(mesh: Mesh, room: str) -> tuple[int, str, str]:
    command = (
        sys.executable,
        "-m",
        "kvmesh.cli",
        "trace",
        room,
        "--gateway",
        mesh.gateway,
        "--bootstrap",
        mesh.registry,
    )
    child = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    out, err = await child.communicate()
    assert child.returncode is not None
    return child.returncode, out.decode(), err.decode()


def by_process(found: list[tuple[str, str]]) -> dict[str, list[str]]:
    names: dict[str, list[str]] = {}
    for process, name in sorted(found):
        names.setdefault("decode" if process.startswith("decode") else process, []).append(name)
    return names


async def test_a_request_shows_every_stop_of_its_walk(tmp_path: Path, tiny_model_dir: Path) -> None:
    """F-O6"""
    (prompt,) = random_prompts([100], 256)
    async with Mesh(tiny_model_dir, tmp_path, pp=2) as mesh:
        async with Client(mesh.gateway) as client:
            end = await ended(client, prompt)
        await mesh.idle()
        answers, silent = await collect([mesh.gateway, mesh.registry, *members(await mesh.paired())], end.room)
        assert silent == []
        found = rows(answers, end.room)
        assert by_process([(r.process, r.name) for r in found]) == STOPS
        assert [r.depth for r in found if r.name == "request"] == [0]
        assert {r.name: r.depth for r in found if r.process.startswith("prefill")} == {
            "queue": 3,
            "prefill": 3,
            "send": 3,
        }
        request = found[0]
        for row in found:
            assert request.begun - 0.01 <= row.begun <= row.ended <= request.ended + 0.01, row
            assert not row.error
        prefill = next(r for r in found if (r.process, r.name) == ("prefill p0/1", "prefill"))
        assert prefill.attributes.items() >= {"rank": "1", "tokens": "100"}.items()

        code, out, err = await kvmesh_trace(mesh, short(end.room))
        assert (code, err) == (0, "")
        assert all(name in out for names in STOPS.values() for name in names)
        code, out, err = await kvmesh_trace(mesh, "1.999")
        assert (code, out) == (1, "")
        assert "no spans of room 1.999" in err
        code, _, err = await kvmesh_trace(mesh, "room7")
        assert code == 2
        assert "1.24" in err


async def test_a_collector_gets_the_same_spans_in_the_client_s_own_trace(
    tmp_path: Path, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with collector() as (played, endpoint):
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint)
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_INSECURE", "true")
        async with Mesh(tiny_model_dir, tmp_path, pp=2) as mesh, dial(mesh.gateway) as channel:
            call = InferenceServiceStub(channel).Generate(
                inference_pb2.GenerateRequest(
                    tokens=inference_pb2.TokenIds(ids=list(range(40))), max_output_tokens=4, ignore_eos=True
                ),
                metadata=(("traceparent", f"00-{TRACE}-b7ad6b7169203331-01"),),
            )
            pieces = [piece async for piece in call]
        # The services have left, and their last spans before them.
        spans = [span for span in played.spans if span.trace == TRACE]
        count = Counter((span.service, span.name) for span in spans)
        stages = {"prefill": 2, "send": 2, "queue": 1}
        names = [("kvmesh-decode", n) for n in STOPS["decode"]] + [("kvmesh-gateway", n) for n in STOPS["gateway"]]
        wanted = Counter([*names, ("kvmesh-bootstrap", "assign room")])
        assert count == wanted + Counter({("kvmesh-prefill", name): num for name, num in stages.items()})
        rooms = {span.name: span.attributes.get("kvmesh.room") for span in spans}
        assert rooms == dict.fromkeys(rooms, short(pieces[-1].timing.room)) | {"check": None}
        processes = {span.attributes["kvmesh.process"] for span in spans}
        assert {p for p in processes if not p.startswith("decode")} == STOPS.keys() - {"decode"}


@pytest.mark.deep
@pytest.mark.slice
@pytest.mark.parametrize("kind", ["refused", "silent"])
async def test_a_collector_that_is_away_holds_nothing_up(
    kind: str, tmp_path: Path, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor the end: a service that is not gone within its drain and what is spared after it does not end with 0."""
    async with silent_collector() as (came, endpoint):
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9" if kind == "refused" else endpoint)
        monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
        (prompt,) = random_prompts([30], 256)
        async with Mesh(tiny_model_dir, tmp_path, pp=1) as mesh, Client(mesh.gateway) as client:
            assert (await ended(client, prompt)).output_tokens == 8
            if kind == "silent":
                await asyncio.wait_for(came.wait(), SECONDS)
            begun = monotonic()
            assert (await ended(client, prompt)).output_tokens == 8
            assert monotonic() - begun < 5
            await mesh.idle()
            begun = monotonic()
        tiers = 4  # gateway, decoder, stage, registry: one after the other, each with nothing left to finish
        assert monotonic() - begun < tiers * SPARE_SECONDS
