"""Runs the pods of rendered manifests on one node: starts, probes and ends them as the kubelet does.

    async with LocalCluster(node, documents, volumes, directory) as cluster:
        …

Knows Kubernetes' words and nothing of the mesh: a process is a pod's command, ready is what its probe says, the end is
SIGTERM and an exit within the grace.
"""

import asyncio
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from manifests import ROOT, Document, Pod, named, pods, selects
from node import Mount, Node, image_environment

_KUBELET = {"timeoutSeconds": 1, "periodSeconds": 10, "failureThreshold": 3}
"""What a probe has where it does not say."""


def peak_bytes(pid: int) -> int:
    """Most memory that a process had so far."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) << 10


@dataclass
class Running:
    """A pod that was started."""

    pod: Pod
    address: str
    process: asyncio.subprocess.Process
    log: Path
    peak_bytes: int = field(default=0)
    """Most memory it had, looked at before it ended."""

    async def healthy(self, probe: Document) -> bool:
        """One answer to one probe."""
        asked = health_pb2.HealthCheckRequest(service=probe["grpc"]["service"])
        timeout = probe.get("timeoutSeconds", _KUBELET["timeoutSeconds"])
        async with grpc.aio.insecure_channel(f"{self.address}:{probe['grpc']['port']}") as channel:
            try:
                answer = await health_pb2_grpc.HealthStub(channel).Check(asked, timeout=timeout)
            except grpc.aio.AioRpcError:
                return False
        return answer.status == health_pb2.HealthCheckResponse.SERVING

    async def passes(self, name: str, *, within_seconds: float | None = None) -> None:
        """Waits until a probe is content.

        Args:
            name: e.g. "startupProbe".
            within_seconds: how long it may take; else as long as the kubelet would ask.
        """
        probe = {**_KUBELET, **self.pod.container[name]}
        async with asyncio.timeout(within_seconds or probe["periodSeconds"] * probe["failureThreshold"]):
            while not await self.healthy(probe):
                assert self.process.returncode is None, (
                    f"{self.pod.name} ended with {self.process.returncode}\n{self.last()}"
                )
                await asyncio.sleep(0.1)

    async def end(self, *, pre_stop: bool) -> int:
        """What the deletion of a pod is; the exit code.

        Raises:
            TimeoutError: it outlived its grace, so the kubelet would have killed it.
        """
        self.peak_bytes = peak_bytes(self.process.pid)
        if pre_stop:
            await asyncio.sleep(self.pod.pre_stop_seconds)
        self.process.terminate()
        async with asyncio.timeout(self.pod.grace_seconds):
            return await self.process.wait()

    def last(self, count: int = 15) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-count:])


class LocalCluster:
    """All pods of some manifests, from one apply to one delete."""

    def __init__(self, node: Node, documents: list[Document], volumes: Mapping[str, Path], directory: Path) -> None:
        """Args:
        node: with an address for each pod.
        documents: the manifests.
        volumes: directories for volumes that are not made anew for each pod: claims and Secrets by their names, and
            "cache", shared by all, so that the model is unpacked once.
        directory: for all other volumes, and logs.
        """
        self._node, self._documents, self._volumes, self._directory = node, documents, volumes, directory
        self._pods = pods(documents)
        self.running: dict[str, Running] = {}

    async def __aenter__(self) -> Self:
        addresses = {p.name: a for p, a in zip(self._pods, self._node.addresses, strict=False)}
        assert len(addresses) == len(self._pods), "too few addresses"
        hosts = self._directory / "hosts"
        hosts.write_text("".join(f"{address} {name}\n" for address, name in self._names(addresses)))
        try:
            await asyncio.gather(*(self._start(pod, addresses[pod.name], hosts) for pod in self._pods))
        except BaseException:
            await self._kill()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            error.add_note("\n".join(f"--- {n}\n{r.last()}" for n, r in self.running.items()))
        await self._kill()

    def of(self, service: str) -> list[Running]:
        """The pods of one service, in the order of their indexes."""
        return [r for r in self.running.values() if r.pod.service == service]

    def directory_of(self, pod: Pod, volume: str) -> Path:
        """Where a volume lies that is made anew for each pod."""
        return self._directory / pod.name / volume

    async def ready(self) -> None:
        """Waits for every pod's startup probe, then for its readiness."""
        started = [asyncio.create_task(r.passes("startupProbe")) for r in self.running.values()]
        await asyncio.gather(*started)
        # How long readiness takes is nobody's to limit: a pod waits for its peers.
        await asyncio.gather(*(r.passes("readinessProbe", within_seconds=60) for r in self.running.values()))

    async def _start(self, pod: Pod, address: str, hosts: Path) -> None:
        place = self._directory / pod.name
        place.mkdir(parents=True, exist_ok=True)
        log = place / "log"
        command = self._node.command(pod.words(address), address, hosts, self._mounts(pod))
        with log.open("ab") as end:
            process = await asyncio.create_subprocess_exec(
                *command,
                env={**image_environment(ROOT, Path(sys.prefix)), **pod.environment(address)},
                stdin=asyncio.subprocess.DEVNULL,
                stdout=end,
                stderr=end,
                start_new_session=True,
            )
        self.running[pod.name] = Running(pod, address, process, log)

    def _mounts(self, pod: Pod) -> list[Mount]:
        volumes = {v["name"]: v for v in pod.spec["volumes"]}
        found = []
        for path, mount in pod.mounts.items():
            volume = volumes.get(mount["name"], {})
            claim = volume.get("persistentVolumeClaim", {}).get("claimName", mount["name"])
            shared = volume.get("secret", {}).get("secretName", claim)
            source = self._volumes.get(shared, self.directory_of(pod, mount["name"]))
            source.mkdir(exist_ok=True)
            found.append(Mount(path, source, bool(mount.get("readOnly"))))
        return found

    def _names(self, addresses: Mapping[str, str]) -> Sequence[tuple[str, str]]:
        """What the cluster's name server would say of Services.

        All pods of a headless one; of another one pod, since a virtual address is not to be had.
        """
        rows = [("127.0.0.1", "localhost")]
        for name, service in named(self._documents, "Service").items():
            behind = [addresses[p.name] for p in self._pods if selects(service["spec"]["selector"], p.labels)]
            chosen = behind if service["spec"].get("clusterIP") == "None" else behind[:1]
            rows += [(address, name) for address in chosen]
        return rows

    async def _kill(self) -> None:
        for running in self.running.values():
            if running.process.returncode is None:
                running.process.kill()
        await asyncio.gather(*(r.process.wait() for r in self.running.values()))
