"""Rendered manifests, read as the cluster would read them: pods, their environment, their command lines, their settings.

What contradicts is found by `contradictions`, so that tests can show that it is noticed.
"""

import importlib
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from kvmesh.errors import BadConfig
from kvmesh.rpc.address import parse
from kvmesh.rpc.health import LIVENESS, READINESS
from kvmesh.rpc.life import ServeSettings
from kvmesh.settings import load

ROOT = Path(__file__).parents[2]
BASE = ROOT / "deploy" / "k8s" / "base"
KUBECTL = Path(sys.executable).parent / "kubectl"
SERVICES = ("bootstrap", "prefill", "decode", "gateway")

POD_IP = "10.1.2.3"
LAST_CALLS_SECONDS = 5
"""From the end of the drain to the hard end of a process (kvmesh.rpc.life)."""

Document = dict[str, Any]


def render(directory: Path) -> list[Document]:
    """What `kubectl apply -k` would send."""
    done = subprocess.run([KUBECTL, "kustomize", directory], capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 0, done.stderr
    return list(yaml.safe_load_all(done.stdout))


def named(documents: list[Document], kind: str) -> dict[str, Document]:
    return {d["metadata"]["name"]: d for d in documents if d["kind"] == kind}


@dataclass(frozen=True)
class Pod:
    """One pod of a workload."""

    owner: Document
    index: int
    documents: list[Document]

    @property
    def spec(self) -> Document:
        return self.owner["spec"]["template"]["spec"]

    @property
    def labels(self) -> dict[str, str]:
        return self.owner["spec"]["template"]["metadata"]["labels"]

    @property
    def container(self) -> Document:
        (container,) = self.spec["containers"]
        return container

    @property
    def service(self) -> str:
        """The folder below services/."""
        return self.container["name"]

    @property
    def ports(self) -> dict[str, int]:
        return {p["name"]: p["containerPort"] for p in self.container["ports"]}

    def environment(self, pod_ip: str = POD_IP) -> dict[str, str]:
        """Variables, the downward API answered."""
        configs = named(self.documents, "ConfigMap")
        variables: dict[str, str] = {}
        for source in self.container.get("envFrom", []):
            variables |= configs[source["configMapRef"]["name"]]["data"]
        fields = {"status.podIP": pod_ip, "metadata.labels['apps.kubernetes.io/pod-index']": str(self.index)}
        for variable in self.container.get("env", []):
            if "value" in variable:
                variables[variable["name"]] = variable["value"]
            else:
                variables[variable["name"]] = fields[variable["valueFrom"]["fieldRef"]["fieldPath"]]
        return variables

    def command_line(self, pod_ip: str = POD_IP) -> list[str]:
        """The words that become the process, $(NAME) and, where a shell is the command, the shell's own expansion done."""
        environment = self.environment(pod_ip)
        words = [expand(w, environment) for w in [*self.container["command"], *self.container.get("args", [])]]
        if words[0] != "/bin/sh":
            return words
        # The same shell and script, with `exec` turned into a function that shows what it was given.
        script = f'show() {{ printf "%s\\n" "$@"; }}\n{re.sub(r"^exec ", "show ", words[-1])}'
        shown = subprocess.run(
            [*words[:-1], script], env=environment, capture_output=True, text=True, timeout=10, check=True
        )
        return shown.stdout.splitlines()

    def settings(self, pod_ip: str = POD_IP) -> ServeSettings:
        """What the service would read.

        Raises:
            BadConfig: it would refuse to start.
        """
        words = self.command_line(pod_ip)
        assert words[:3] == ["python", "-m", f"services.{self.service}"], shlex.join(words)
        module = importlib.import_module(f"services.{self.service}.config")
        return load(getattr(module, f"{self.service.capitalize()}Settings"), words[3:], self.environment(pod_ip))


def expand(word: str, environment: Mapping[str, str]) -> str:
    return re.sub(r"\$\((\w+)\)", lambda m: environment.get(m.group(1), m.group(0)), word)


def workloads(documents: list[Document]) -> list[Document]:
    return [d for d in documents if d["kind"] in ("StatefulSet", "Deployment")]


def pods(documents: list[Document]) -> list[Pod]:
    return [Pod(w, i, documents) for w in workloads(documents) for i in range(w["spec"]["replicas"])]


def contradictions(documents: list[Document]) -> list[str]:
    """Each place where two parts of the manifests, or a manifest and its service, disagree: one line with both values."""
    return [line for pod in pods(documents) for line in _of_pod(pod)] + [
        line for service in named(documents, "Service").values() for line in _of_service(service, documents)
    ]


def _of_pod(pod: Pod) -> Iterator[str]:
    who = f"{pod.owner['metadata']['name']}-{pod.index}"
    try:
        settings = pod.settings()
    except BadConfig as error:
        yield f"{who}: {error}"
        return
    for port, field in (("grpc", "listen"), ("health", "health_listen"), ("metrics", "metrics_listen")):
        bound = parse(getattr(settings, field), field=field).port
        if pod.ports[port] != bound:
            yield f"{who}: port {port} is {pod.ports[port]}, {field} binds {bound}"
    for probe, service in (("startupProbe", LIVENESS), ("readinessProbe", READINESS), ("livenessProbe", LIVENESS)):
        asked = pod.container[probe]["grpc"]
        if asked != {"port": pod.ports["health"], "service": service}:
            yield f"{who}: {probe} asks {asked}, health serves {service} on {pod.ports['health']}"
    grace = pod.spec["terminationGracePeriodSeconds"]
    if grace < settings.drain_seconds + LAST_CALLS_SECONDS:
        yield f"{who}: grace of {grace} s, drain of {settings.drain_seconds:g} s and {LAST_CALLS_SECONDS} s for the last calls"
    yield from _of_stage(pod, settings, who)
    yield from _of_registry_address(pod, settings, who)


def _of_stage(pod: Pod, settings: ServeSettings, who: str) -> Iterator[str]:
    pp_size = getattr(settings, "pp_size", None)
    replicas = pod.owner["spec"]["replicas"]
    if pp_size is not None and pp_size != replicas:
        yield f"{who}: pp_size is {pp_size}, replicas are {replicas}"


def _of_registry_address(pod: Pod, settings: ServeSettings, who: str) -> Iterator[str]:
    dialled = getattr(settings, "bootstrap", None)
    if dialled is None:
        return
    address = parse(dialled, field="bootstrap")
    service = named(pod.documents, "Service").get(address.host)
    if service is None or address.port not in [p["port"] for p in service["spec"]["ports"]]:
        yield f"{who}: the registry is dialled at {address}, no Service has that name and port"


def _of_service(service: Document, documents: list[Document]) -> Iterator[str]:
    who, spec = service["metadata"]["name"], service["spec"]
    selected = [p for p in pods(documents) if spec["selector"].items() <= p.labels.items()]
    if not selected:
        yield f"Service {who} selects no pod: {spec['selector']}"
    for pod in selected:
        for port in spec["ports"]:
            target = pod.ports.get(port["targetPort"])
            # A headless Service has no port of its own: what clients dial is what the pod binds.
            if target is None or (spec.get("clusterIP") == "None" and target != port["port"]):
                yield f"Service {who} sends {port['port']} to {port['targetPort']}, the pod's ports are {pod.ports}"
