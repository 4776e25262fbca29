"""The pods of base, laptop, production, a LeaderWorkerSet and TLS, run here: their own commands, variables, probes, ports.

They come up, answer, and go again in the orders that matter, with a request on its way. A workload that stops first
finds all others alive, one that stops last finds none; so each is first and last once, and each pair stops in both
orders. Whatever goes first, the request ends with its last token and every pod with exit code 0, within its grace.
"""

import asyncio
import copy
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from combinations import combined, production_without, rendered
from local_cluster import LocalCluster, Running
from manifests import Document, named, num_bytes, pods
from node import Node, why_not

from kvmesh.client import Client
from tests.certificates import Authority

pytestmark = [
    pytest.mark.deep,
    pytest.mark.timeout(300),
    pytest.mark.skipif(bool(why_not()), reason=why_not() or "there is a node"),
]

ALONG_THE_WALK = ("gateway", "decode", "prefill", "bootstrap")
AGAINST_THE_WALK = ALONG_THE_WALK[::-1]
DECODE_FIRST = ("decode", "bootstrap", "gateway", "prefill")
PREFILL_FIRST = ("prefill", "gateway", "bootstrap", "decode")
ALL_AT_ONCE = ()
"""As `kubectl delete -k` does."""

RUNS = [
    ("base", ALONG_THE_WALK),
    ("base", AGAINST_THE_WALK),
    ("base", DECODE_FIRST),
    ("base", PREFILL_FIRST),
    ("base", ALL_AT_ONCE),
    ("laptop", AGAINST_THE_WALK),
    ("laptop", ALL_AT_ONCE),
    ("production", ALONG_THE_WALK),
    ("production", AGAINST_THE_WALK),
    ("production", ALL_AT_ONCE),
    ("lws", ALONG_THE_WALK),
    ("tls", ALONG_THE_WALK),
]
COLD = ("laptop", AGAINST_THE_WALK)
"""In this run each pod unpacks the model for itself, as on a first day."""
OUTPUT_TOKENS = 96
"""Enough that the request is still on its way when the first pod is told to go."""
GPU = ("gpu",)


def manifests(name: str) -> list[Document]:
    """What to run. There is no GPU here, so production runs without that component."""
    if name in ("lws", "tls"):
        return combined((name,))
    return production_without(GPU) if name == "production" else rendered(name)


@pytest.fixture(scope="module")
def node() -> Iterator[Node]:
    with Node(max(len(pods(manifests(name))) for name, _ in RUNS)) as made:
        yield made


@pytest.fixture
def volumes(tmp_path_factory: pytest.TempPathFactory, tiny_model_dir: Path) -> dict[str, Path]:
    """The cache of this machine, for what the image's model is unpacked into; a small model on the volume for one; the
    Secret of TLS, with the name that its component expects."""
    cache = Path(os.environ.get("KVMESH_CACHE_DIR", "~/.cache/kvmesh")).expanduser()
    cache.mkdir(parents=True, exist_ok=True)
    secret = tmp_path_factory.mktemp("secret") / "kvmesh-tls"
    Authority().files(secret, "kvmesh-prefill")
    return {"cache": cache, "kvmesh-model": tiny_model_dir, "kvmesh-tls": secret}


class Request:
    """A request on its way."""

    def __init__(self, gateway: str) -> None:
        self._gateway = gateway
        self.began = asyncio.Event()
        self.num_tokens = 0

    async def answered(self) -> str:
        """Runs it; the reason it finished for."""
        async with Client(self._gateway) as client:
            async for piece in client.generate(
                messages=[{"role": "user", "content": "Count to a hundred."}], max_output_tokens=OUTPUT_TOKENS
            ):
                self.num_tokens += len(piece.tokens)
                self.began.set()
                if piece.end is not None:
                    return piece.end.finish_reason
        return ""


async def stopped(cluster: LocalCluster, order: tuple[str, ...]) -> dict[str, int]:
    """Ends all pods; their exit codes."""
    if not order:
        running = list(cluster.running.values())
        codes = await asyncio.gather(*(r.end(pre_stop=True) for r in running))
        return {r.pod.name: code for r, code in zip(running, codes, strict=True)}
    found: dict[str, int] = {}
    for service in order:
        # Those of a pipeline one after the other too: here the rank that decides goes last, there first.
        members = cluster.of(service) if order != PREFILL_FIRST else cluster.of(service)[::-1]
        for running in members:
            found[running.pod.name] = await running.end(pre_stop=False)
    return found


@pytest.mark.parametrize(
    ("name", "order"), RUNS, ids=[f"{name}: {', '.join(order) or 'all at once'}" for name, order in RUNS]
)
async def test_pods_come_up_answer_and_go(
    node: Node, volumes: dict[str, Path], tmp_path: Path, name: str, order: tuple[str, ...]
) -> None:
    if (name, order) == COLD:
        del volumes["cache"]
    async with LocalCluster(node, manifests(name), volumes, tmp_path) as cluster:
        await cluster.ready()
        for running in cluster.running.values():
            assert await running.healthy(running.pod.container["livenessProbe"])
        gateway = cluster.of("gateway")[0]
        request = Request(f"{gateway.address}:{gateway.pod.ports['grpc']}")
        answering = asyncio.create_task(request.answered())
        await asyncio.wait_for(request.began.wait(), 30)
        assert not answering.done()
        codes = await stopped(cluster, order)
        assert await asyncio.wait_for(answering, 30) in ("length", "stop")
        assert codes == dict.fromkeys(cluster.running, 0)
        assert within_their_memory(cluster) == {}
        assert within_their_disks(cluster) == {}


def within_their_memory(cluster: LocalCluster) -> dict[str, int]:
    """Pods that needed more than their limit, and how many bytes."""

    def needed(running: Running) -> int:
        return running.peak_bytes - num_bytes(running.pod.container["resources"]["limits"]["memory"])

    return {r.pod.name: needed(r) for r in cluster.running.values() if needed(r) > 0}


def within_their_disks(cluster: LocalCluster) -> dict[str, int]:
    """Volumes that hold more than their limit, and how many bytes; all are empty afterwards."""
    found = {}
    for running in cluster.running.values():
        for volume in running.pod.spec["volumes"]:
            directory = cluster.directory_of(running.pod, volume["name"])
            if "emptyDir" in volume and directory.is_dir():
                held = sum(file.stat().st_size for file in directory.rglob("*") if file.is_file())
                if held > num_bytes(volume["emptyDir"]["sizeLimit"]):
                    found[f"{running.pod.name}: {volume['name']}"] = held
                shutil.rmtree(directory)
    return found


async def test_a_pod_that_can_not_start_says_why(node: Node, volumes: dict[str, Path], tmp_path: Path) -> None:
    """Shows that these runs can fail: what the manifests' tests find, the services find too."""
    broken = copy.deepcopy(rendered("base"))
    (config,) = named(broken, "ConfigMap").values()
    config["data"]["KVMESH_HEARTBEAT_SECONDS"] = "2"
    async with LocalCluster(node, broken, volumes, tmp_path) as cluster:
        (registry,) = cluster.of("bootstrap")
        assert await asyncio.wait_for(registry.process.wait(), 30) == 2
        assert "heartbeat_seconds is 2 and lease_seconds is 2" in registry.last()
        with pytest.raises(AssertionError, match="ended with 2"):
            await registry.passes("startupProbe")


def deaf(document: Document) -> Document:
    """A registry that serves nothing and does not listen to SIGTERM."""
    spec = document["spec"]["template"]["spec"]
    spec["terminationGracePeriodSeconds"] = 1
    spec["containers"][0] |= {"command": ["/bin/sh", "-ec"], "args": ["trap '' TERM; sleep 60"]}
    spec["containers"][0]["startupProbe"] |= {"periodSeconds": 1, "failureThreshold": 1}
    return document


async def test_a_pod_that_is_never_up_or_outlives_its_grace_is_noticed(node: Node, tmp_path: Path) -> None:
    registry = deaf(copy.deepcopy(named(rendered("base"), "StatefulSet")["kvmesh-bootstrap"]))
    config = [d for d in rendered("base") if d["kind"] == "ConfigMap"]
    async with LocalCluster(node, [registry, *config], {}, tmp_path) as cluster:
        with pytest.raises(TimeoutError):
            await cluster.ready()
        with pytest.raises(TimeoutError):
            await cluster.of("bootstrap")[0].end(pre_stop=True)
