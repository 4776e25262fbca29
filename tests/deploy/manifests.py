"""Rendered manifests, read as the cluster would read them: pods, their variables, command lines and settings."""

import importlib
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from kvmesh.rpc.life import ServeSettings
from kvmesh.settings import load

ROOT = Path(__file__).parents[2]
K8S = ROOT / "deploy" / "k8s"
BASE = K8S / "base"
OVERLAYS = ("laptop", "production")
KUBECTL = Path(sys.executable).parent / "kubectl"
SERVICES = ("bootstrap", "prefill", "decode", "gateway")

POD_IP = "10.1.2.3"

_UNITS = {"Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30}

Document = dict[str, Any]


def render(directory: Path) -> list[Document]:
    """What `kubectl apply -k` would send."""
    done = subprocess.run([KUBECTL, "kustomize", directory], capture_output=True, text=True, timeout=30, check=False)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    return list(yaml.safe_load_all(done.stdout))


def named(documents: list[Document], kind: str) -> dict[str, Document]:
    return {d["metadata"]["name"]: d for d in documents if d["kind"] == kind}


def selects(selector: Mapping[str, str], labels: Mapping[str, str]) -> bool:
    return selector.items() <= labels.items()


def num_bytes(quantity: str) -> int:
    return int(quantity[:-2]) * _UNITS[quantity[-2:]]


@dataclass(frozen=True)
class Pod:
    """One pod of a workload."""

    owner: Document
    index: int
    documents: list[Document]
    group: int = 0
    """Of a LeaderWorkerSet."""

    @property
    def name(self) -> str:
        middle = f"-{self.group}" if self.owner["kind"] == "LeaderWorkerSet" else ""
        return f"{self.owner['metadata']['name']}{middle}-{self.index}"

    @property
    def template(self) -> Document:
        return template(self.owner)

    @property
    def spec(self) -> Document:
        return self.template["spec"]

    @property
    def labels(self) -> dict[str, str]:
        """The template's, and those that the controller adds."""
        added = {
            "StatefulSet": {"apps.kubernetes.io/pod-index": str(self.index)},
            "LeaderWorkerSet": {
                "leaderworkerset.sigs.k8s.io/group-index": str(self.group),
                "leaderworkerset.sigs.k8s.io/worker-index": str(self.index),
            },
        }
        return self.template["metadata"]["labels"] | added.get(self.owner["kind"], {})

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

    @property
    def pre_stop_seconds(self) -> int:
        return self.container.get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)

    @property
    def grace_seconds(self) -> int:
        """From SIGTERM to SIGKILL."""
        return self.spec["terminationGracePeriodSeconds"] - self.pre_stop_seconds

    @property
    def mounts(self) -> dict[str, Document]:
        """Where volumes are mounted: mount path → the mount."""
        return {m["mountPath"]: m for m in self.container["volumeMounts"]}

    def environment(self, pod_ip: str = POD_IP) -> dict[str, str]:
        """Variables, the downward API answered.

        Raises:
            KeyError: a ConfigMap or a field that is not there.
        """
        configs = named(self.documents, "ConfigMap")
        variables: dict[str, str] = {}
        if self.owner["kind"] == "LeaderWorkerSet":
            size = self.owner["spec"]["leaderWorkerTemplate"]["size"]
            variables |= {"LWS_WORKER_INDEX": str(self.index), "LWS_GROUP_SIZE": str(size)}
        for source in self.container.get("envFrom", []):
            variables |= configs[source["configMapRef"]["name"]]["data"]
        fields = {"status.podIP": pod_ip} | {f"metadata.labels['{k}']": v for k, v in self.labels.items()}
        for variable in self.container.get("env", []):
            if "value" in variable:
                variables[variable["name"]] = variable["value"]
            else:
                variables[variable["name"]] = fields[variable["valueFrom"]["fieldRef"]["fieldPath"]]
        return variables

    def words(self, pod_ip: str = POD_IP) -> list[str]:
        """The words that the kubelet starts: $(NAME) expanded."""
        environment = self.environment(pod_ip)
        return [expand(w, environment) for w in [*self.container["command"], *self.container.get("args", [])]]

    def command_line(self, pod_ip: str = POD_IP) -> list[str]:
        """The words that become the process: where a shell is the command, its own expansion done too."""
        words = self.words(pod_ip)
        if words[0] != "/bin/sh":
            return words
        # The same shell and script, with `exec` turned into a function that shows what it was given.
        script = f'show() {{ printf "%s\\n" "$@"; }}\n{re.sub(r"^exec ", "show ", words[-1])}'
        shown = subprocess.run(
            [*words[:-1], script], env=self.environment(pod_ip), capture_output=True, text=True, timeout=10, check=True
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
        settings = load(getattr(module, f"{self.service.capitalize()}Settings"), words[3:], self.environment(pod_ip))
        settings.check_serving()
        return settings


def expand(word: str, environment: Mapping[str, str]) -> str:
    return re.sub(r"\$\((\w+)\)", lambda m: environment.get(m.group(1), m.group(0)), word)


def template(workload: Document) -> Document:
    """The pod template of a workload."""
    spec = workload["spec"]
    return spec["leaderWorkerTemplate"]["workerTemplate"] if workload["kind"] == "LeaderWorkerSet" else spec["template"]


def workloads(documents: list[Document]) -> list[Document]:
    return [d for d in documents if d["kind"] in ("StatefulSet", "Deployment", "LeaderWorkerSet")]


@dataclass(frozen=True)
class Scaler:
    """What has the number of a workload's replicas: KEDA's kind or Kubernetes' own."""

    document: Document

    @property
    def who(self) -> str:
        return f"{self.document['kind']} {self.document['metadata']['name']}"

    @property
    def target(self) -> tuple[str, str, str]:
        """Version of the API, kind and name of what it scales."""
        target = self.document["spec"]["scaleTargetRef"]
        return target["apiVersion"], target["kind"], target["name"]

    @property
    def least(self) -> int:
        spec = self.document["spec"]
        return spec["minReplicas"] if self.document["kind"] == "HorizontalPodAutoscaler" else spec["minReplicaCount"]

    @property
    def queries(self) -> list[str]:
        """KEDA's; Kubernetes' own asks by name."""
        return [t["metadata"]["query"] for t in self.document["spec"].get("triggers", [])]


def scalers(documents: list[Document]) -> list[Scaler]:
    return [Scaler(d) for d in documents if d["kind"] in ("ScaledObject", "HorizontalPodAutoscaler")]


def replicas(workload: Document, documents: list[Document]) -> int:
    """How many there are at first: where an autoscaler has the number, its least."""
    if "replicas" in workload["spec"]:
        return workload["spec"]["replicas"]
    mine = (workload["apiVersion"], workload["kind"], workload["metadata"]["name"])
    return next((s.least for s in scalers(documents) if s.target == mine), 1)


def pods(documents: list[Document]) -> list[Pod]:
    found = []
    for workload in workloads(documents):
        count = replicas(workload, documents)
        if workload["kind"] == "LeaderWorkerSet":
            size = workload["spec"]["leaderWorkerTemplate"]["size"]
            found += [Pod(workload, i, documents, group) for group in range(count) for i in range(size)]
        else:
            found += [Pod(workload, i, documents) for i in range(count)]
    return found
