"""Members whose certificates do not fit: each a real process. They say why, try on, and the right one is served."""

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from pipeline_player import played_pipeline
from registry_players import SECONDS, read_metrics, registry
from service_process import Running, refused, service

from kvmesh.rpc.channels import dial
from kvmesh.v1 import bootstrap_pb2
from kvmesh.v1.bootstrap_pb2_grpc import BootstrapServiceStub
from tests.certificates import Authority

pytestmark = pytest.mark.timeout(120)

OURS, THEIRS = Authority(), Authority()
_LOOK_SECONDS = 0.05
"""A file and a page of metrics can't tell of a change."""
LOST_WORDS = ("Traceback", "Error:", " error ")


def of_ours(tmp: Path) -> tuple[str, ...]:
    return OURS.files(tmp / "ours").flags


def of_another_ca(tmp: Path) -> tuple[str, ...]:
    return THEIRS.files(tmp / "theirs").flags


def of_another_ca_that_knows_ours(tmp: Path) -> tuple[str, ...]:
    return THEIRS.files(tmp / "theirs", trusted=THEIRS.pem + OURS.pem).flags


def in_plain_text(tmp: Path) -> tuple[str, ...]:
    return ()


def with_a_name_that_no_stage_has(tmp: Path) -> tuple[str, ...]:
    return (*of_ours(tmp), "--tls-name", "stages.kvmesh")


def sizes(model: Path) -> tuple[str, ...]:
    return ("--model", str(model), "--num-pages", "16", "--page-size", "4")


async def said(log: Path, text: str) -> list[str]:
    """Waits until a log has a line with a text; all such lines."""
    async with asyncio.timeout(SECONDS * 2):
        while True:
            lines = [line for line in log.read_text().splitlines() if text in line]  # noqa: ASYNC240
            if lines:
                return lines
            await asyncio.sleep(_LOOK_SECONDS)


async def tried_again(member: Running, times: int) -> dict[str, float]:
    """Waits until a member has tried something again so often; its metrics."""
    async with asyncio.timeout(SECONDS * 2):
        while True:
            page = await asyncio.to_thread(read_metrics, member.metrics)
            rows = [line.rpartition(" ") for line in page.splitlines() if line.startswith("kvmesh_")]
            now = {name: float(value) for name, _, value in rows}
            if now["kvmesh_reconnects_total"] >= times:
                return now
            await asyncio.sleep(_LOOK_SECONDS)


async def pictured(stub: BootstrapServiceStub, wanted: Callable[[bootstrap_pb2.WatchMeshResponse], bool]) -> None:
    async with asyncio.timeout(SECONDS * 2):
        async for picture in stub.WatchMesh(bootstrap_pb2.WatchMeshRequest()):
            if wanted(picture):
                return


def num_pairs(picture: bootstrap_pb2.WatchMeshResponse) -> int:
    return sum(len(decoder.load.paired_generations) for decoder in picture.decoders)


async def is_alive(member: Running) -> bool:
    """Its health port, in plain text as ever."""
    async with dial(member.health) as channel:
        asked = health_pb2.HealthCheckRequest(service="liveness")
        answer = await health_pb2_grpc.HealthStub(channel).Check(asked, timeout=5)
    return answer.status == health_pb2.HealthCheckResponse.SERVING  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("stage", "decoder", "why"),
    [
        (of_ours, of_another_ca, "its certificate is not trusted (unable to get local issuer certificate); give both"),
        (of_ours, of_another_ca_that_knows_ours, "it closed the connection at once (TLS at one end only, or it does"),
        (of_ours, in_plain_text, "it closed the connection at once (TLS at one end only, or it does not take"),
        (of_ours, with_a_name_that_no_stage_has, "its certificate names neither the host dialled nor tls_name; set"),
        (in_plain_text, of_ours, "it serves without TLS; set tls_cert, tls_key and tls_ca there too, or nowhere"),
    ],
)
async def test_a_decoder_that_does_not_fit_never_pairs_and_says_once_why(
    tmp_path: Path,
    tiny_model_dir: Path,
    stage: Callable[[Path], object],
    decoder: Callable[..., tuple[str, ...]],
    why: str,
) -> None:
    tls = None if stage is in_plain_text else OURS.files(tmp_path / "stage").load()
    async with AsyncExitStack() as stack:
        process, stub = await stack.enter_async_context(registry(tmp_path))
        played = await stack.enter_async_context(played_pipeline(stub, tiny_model_dir, tls))
        flags = ("--bootstrap", process.address, *sizes(tiny_model_dir), *decoder(tmp_path))
        wrong = await stack.enter_async_context(service("decode", tmp_path / "wrong.log", *flags))
        (line,) = await said(wrong.log, why)
        assert f"no pairing with played{played.number}: rank 0 of played{played.number}: " in line
        assert " warning " in line
        assert (await tried_again(wrong, 3))["kvmesh_pairings_standing"] == 0
        assert len(await said(wrong.log, "no pairing with")) == 1
        assert not any(word in wrong.log.read_text() for word in LOST_WORDS)
        assert await is_alive(wrong)
        assert await wrong.terminate() == 0


async def test_a_right_decoder_pairs_beside_a_wrong_one(tmp_path: Path, tiny_model_dir: Path) -> None:
    async with AsyncExitStack() as stack:
        process, stub = await stack.enter_async_context(registry(tmp_path))
        stage = OURS.files(tmp_path / "stage").load()
        await stack.enter_async_context(played_pipeline(stub, tiny_model_dir, stage))
        flags = ("--bootstrap", process.address, *sizes(tiny_model_dir))
        wrong = service("decode", tmp_path / "wrong.log", *flags, *of_another_ca(tmp_path))
        await said((await stack.enter_async_context(wrong)).log, "not trusted")
        right = service("decode", tmp_path / "right.log", *flags, *of_ours(tmp_path))
        await stack.enter_async_context(right)
        await pictured(stub, lambda picture: len(picture.decoders) == 2 and num_pairs(picture) == 1)


@pytest.mark.parametrize(
    ("stranger", "why"),
    [
        (of_another_ca, "rank 1 of p0: its certificate is not trusted"),
        (in_plain_text, "rank 1 of p0: unreachable: it closed the connection at once (TLS at one end only"),
    ],
)
async def test_a_stage_that_does_not_fit_says_once_why_it_can_not_link_and_the_next_one_links(
    tmp_path: Path, tiny_model_dir: Path, stranger: Callable[[Path], tuple[str, ...]], why: str
) -> None:
    async with AsyncExitStack() as stack:
        process, stub = await stack.enter_async_context(registry(tmp_path))
        flags = ("--bootstrap", process.address, "--pp-size", "2", *sizes(tiny_model_dir))
        last = service("prefill", tmp_path / "last.log", "--rank", "1", *flags, *of_ours(tmp_path / "last"))
        behind = await stack.enter_async_context(last)
        first = ("prefill", tmp_path / "first.log", "--rank", "0", *flags)
        async with service(*first, *stranger(tmp_path / "first")) as wrong:
            (line,) = await said(wrong.log, "life over")
            assert why in line
            await tried_again(wrong, 3)
            assert len(await said(wrong.log, "life over")) == 1
            assert not any(word in wrong.log.read_text() for word in LOST_WORDS)
            assert await wrong.terminate() == 0
        await stack.enter_async_context(service(*first, *of_ours(tmp_path / "first")))
        await pictured(stub, lambda picture: any(view.generation for view in picture.pipelines))
        assert await is_alive(behind)


@pytest.mark.parametrize("name", ["prefill", "decode"])
async def test_a_member_with_an_unusable_certificate_ends_at_once_with_one_line(
    tmp_path: Path, tiny_model_dir: Path, name: str
) -> None:
    flags = ("--bootstrap", "127.0.0.1:1", *sizes(tiny_model_dir))
    code, told = await refused(name, *flags, *OURS.files(tmp_path / "old", valid=(-9, -1)).flags)
    assert code == 2
    assert told.splitlines()[-1].startswith("tls_cert is ")
    assert "has expired" in told
    assert "Traceback" not in told
