"""What contradicts in rendered manifests: each place where two parts of them, or a manifest and its service, disagree.

One line each, with both values, so that tests can show that it is noticed. What one process can see by itself, the
service refuses at its start as well; the rest shows only here.
"""

import re
from collections.abc import Iterator
from pathlib import PurePosixPath

from manifests import Document, Pod, named, pods, replicas, selects, template, workloads

from kvmesh.errors import BadConfig
from kvmesh.rpc.address import parse
from kvmesh.rpc.health import LIVENESS, READINESS
from kvmesh.rpc.life import SPARE_SECONDS, ServeSettings


def contradictions(documents: list[Document]) -> list[str]:
    return [
        *(line for pod in pods(documents) for line in _of_pod(pod)),
        *_of_leases(documents),
        *_of_pipelines(documents),
        *(line for service in named(documents, "Service").values() for line in _of_service(service, documents)),
        *_of_labels(documents),
        *_of_budgets(documents),
        *_of_scaling(documents),
    ]


def _of_pod(pod: Pod) -> Iterator[str]:
    who = pod.name
    try:
        settings = pod.settings()
    except BadConfig as error:
        yield f"{who}: {error}"
        return
    except KeyError as error:
        yield f"{who}: nothing is called {error}"
        return
    for port, field in (("grpc", "listen"), ("health", "health_listen"), ("metrics", "metrics_listen")):
        bound = parse(getattr(settings, field), field=field).port
        if pod.ports[port] != bound:
            yield f"{who}: port {port} is {pod.ports[port]}, {field} binds {bound}"
    for probe, service in (("startupProbe", LIVENESS), ("readinessProbe", READINESS), ("livenessProbe", LIVENESS)):
        asked = pod.container[probe]["grpc"]
        if asked != {"port": pod.ports["health"], "service": service}:
            yield f"{who}: {probe} asks {asked}, health serves {service} on {pod.ports['health']}"
    yield from _of_end(pod, settings)
    yield from _of_stage(pod, settings)
    yield from _of_registry_address(pod, settings)
    yield from _of_volumes(pod, settings)


def _of_end(pod: Pod, settings: ServeSettings) -> Iterator[str]:
    grace, drain = pod.spec["terminationGracePeriodSeconds"], settings.drain_seconds
    if pod.grace_seconds < drain + SPARE_SECONDS:
        yield (
            f"{pod.name}: grace of {grace} s, preStop of {pod.pre_stop_seconds} s, drain of {drain:g} s and "
            f"{SPARE_SECONDS} s for the last calls"
        )
    told = settings.grace_seconds  # type: ignore[attr-defined]  # every service has it
    if told != pod.grace_seconds:
        yield f"{pod.name}: grace of {grace} s less preStop is {pod.grace_seconds} s, the service is told {told:g} s"


def _of_stage(pod: Pod, settings: ServeSettings) -> Iterator[str]:
    if pod.service != "prefill":
        return
    pp_size, told = settings.pp_size, settings.replicas  # type: ignore[attr-defined]
    if pod.owner["kind"] == "LeaderWorkerSet":
        count = pod.owner["spec"]["leaderWorkerTemplate"]["size"]
    else:
        count = replicas(pod.owner, pod.documents)
    if not pp_size == count == told:
        yield f"{pod.name}: pp_size is {pp_size}, replicas are {count}, the service is told {told}"


def _of_registry_address(pod: Pod, settings: ServeSettings) -> Iterator[str]:
    dialled = getattr(settings, "bootstrap", None)
    if dialled is None:
        return
    address = parse(dialled, field="bootstrap")
    service = named(pod.documents, "Service").get(address.host)
    if service is None or address.port not in [p["port"] for p in service["spec"]["ports"]]:
        yield f"{pod.name}: the registry is dialled at {address}, no Service has that name and port"


def _of_volumes(pod: Pod, settings: ServeSettings) -> Iterator[str]:
    volumes = {v["name"]: v for v in pod.spec["volumes"]}
    volumes |= {c["metadata"]["name"]: {} for c in pod.owner["spec"].get("volumeClaimTemplates", [])}
    for path, mount in pod.mounts.items():
        if mount["name"] not in volumes:
            yield f"{pod.name}: {path} mounts {mount['name']}, the volumes are {sorted(volumes)}"
            continue
        claim = volumes[mount["name"]].get("persistentVolumeClaim", {}).get("claimName")
        if claim is not None and claim not in named(pod.documents, "PersistentVolumeClaim"):
            yield f"{pod.name}: {path} needs the claim {claim}, there is none"
    writable = {PurePosixPath(p) for p, m in pod.mounts.items() if not m.get("readOnly")}
    written = {f: getattr(settings, f) for f in ("cache_dir", "state_dir") if hasattr(settings, f)}
    for field, path in {**written, "the temporary directory": "/tmp"}.items():
        if PurePosixPath(path) not in writable:
            yield f"{pod.name}: {field} is {path}, what can be written is {sorted(map(str, writable))}"
    model = PurePosixPath(getattr(settings, "model", ""))
    if model.is_absolute() and not any(model.is_relative_to(path) for path in pod.mounts):
        yield f"{pod.name}: model is {model}, the mounts are {sorted(pod.mounts)}"


def _settled(documents: list[Document]) -> Iterator[tuple[Pod, ServeSettings]]:
    """Pods whose settings can be read; the others have their line already."""
    for pod in pods(documents):
        try:
            yield pod, pod.settings()
        except (BadConfig, KeyError):
            continue


def _of_leases(documents: list[Document]) -> Iterator[str]:
    leases = [s.lease_seconds for p, s in _settled(documents) if p.service == "bootstrap"]  # type: ignore[attr-defined]
    for pod, settings in _settled(documents):
        heartbeat = getattr(settings, "heartbeat_seconds", None)
        for lease in leases:
            if heartbeat is not None and heartbeat >= lease:
                yield f"{pod.name}: heartbeat of {heartbeat:g} s, the registry's lease is {lease:g} s"


def _of_pipelines(documents: list[Document]) -> Iterator[str]:
    seats: dict[tuple[str, int], str] = {}
    for pod, settings in _settled(documents):
        if pod.service == "prefill":
            seat = (settings.pipeline, settings.rank)  # type: ignore[attr-defined]
            if seat in seats:
                yield f"{pod.name} and {seats[seat]}: both are rank {seat[1]} of pipeline {seat[0]}"
            seats[seat] = pod.name


def _of_service(service: Document, documents: list[Document]) -> Iterator[str]:
    who, spec = service["metadata"]["name"], service["spec"]
    selected = [p for p in pods(documents) if selects(spec["selector"], p.labels)]
    if not selected:
        yield f"Service {who} selects no pod: {spec['selector']}"
    for pod in selected:
        for port in spec["ports"]:
            target = pod.ports.get(port["targetPort"])
            # A headless Service has no port of its own: what clients dial is what the pod binds.
            if target is None or (spec.get("clusterIP") == "None" and target != port["port"]):
                yield f"Service {who} sends {port['port']} to {port['targetPort']}, the pod's ports are {pod.ports}"


def _of_labels(documents: list[Document]) -> Iterator[str]:
    """Two workloads that would fight for pods."""
    for workload in workloads(documents):
        selector = workload["spec"].get("selector", {}).get("matchLabels")
        for other in workloads(documents):
            if selector and other is not workload and selects(selector, template(other)["metadata"]["labels"]):
                yield f"{workload['metadata']['name']} also selects the pods of {other['metadata']['name']}: {selector}"


def _of_budgets(documents: list[Document]) -> Iterator[str]:
    budgets = named(documents, "PodDisruptionBudget")
    held: dict[str, list[str]] = {}
    for name, budget in budgets.items():
        mine = [p.name for p in pods(documents) if selects(budget["spec"]["selector"]["matchLabels"], p.labels)]
        if not mine:
            yield f"PodDisruptionBudget {name} selects no pod"
        for pod in mine:
            held.setdefault(pod, []).append(name)
    for pod, names in held.items():
        if len(names) > 1:  # the eviction of such a pod is refused
            yield f"{pod}: counted by the disruption budgets {' and '.join(names)}"


def _of_scaling(documents: list[Document]) -> Iterator[str]:
    by_name = {(w["kind"], w["metadata"]["name"]): w for w in workloads(documents)}
    for name, scaled in named(documents, "ScaledObject").items():
        target = scaled["spec"]["scaleTargetRef"]
        workload = by_name.get((target["kind"], target["name"]))
        if workload is None or workload["apiVersion"] != target["apiVersion"]:
            yield f"ScaledObject {name} scales {target['kind']} {target['name']}, there is none"
        elif "replicas" in workload["spec"]:
            yield f"ScaledObject {name}: {target['name']} has replicas too: {workload['spec']['replicas']}"
        elif workload["kind"] == "StatefulSet" and "prefill" in target["name"]:
            yield f"ScaledObject {name} scales the stages of a pipeline, which grows as a whole"
        namespace = scaled["metadata"].get("namespace", "kvmesh")
        for trigger in scaled["spec"]["triggers"]:
            asked = set(re.findall(r'job="kvmesh/([^"]*)"', trigger["metadata"]["query"]))
            if asked != {namespace}:
                yield f"ScaledObject {name} asks for the mesh of namespace {sorted(asked)}, its own is {namespace}"
